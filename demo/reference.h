// SPDX-License-Identifier: Apache-2.0
// The same layer computed densely, on one rank, without any communication.
#pragma once

#include <cstdint>
#include <vector>

#include "demo/board.h"
#include "demo/options.h"

namespace crossdock::demo {

// The tokens of one rank over all steps: what went into the layer, and what came out of it.
struct RankTokens {
    std::vector<uint16_t> rows;     // [tokens][hidden] bf16
    std::vector<int32_t> experts;   // [tokens][topk]
    std::vector<float> weights;     // [tokens][topk]
    std::vector<uint16_t> outputs;  // [tokens][hidden] bf16
    // High throughput:
    std::vector<uint16_t> gradients;        // of the outputs, likewise
    std::vector<uint16_t> token_gradients;  // what came out of the backward pass, likewise
    std::vector<float> weight_gradients;    // [tokens][topk]
};

// Computes every expert over its tokens, sums in fp64, and writes the comparison into the report.
//
// The bound. An expert's output has the same bits here and there (layer.h), so only the combine can differ: it sums K
// products in fp32, each step rounding to at most 2^-24 of a partial sum, and rounds the result once to bf16. With s
// the exact sum of the w_k x_k, S the sum of their magnitudes, g = K 2^-24 / (1 - K 2^-24) and u = 2^-8:
//     |output - s| <= u |s| + (1 + u) g S.
// The fp64 sum is off by at most K 2^-53 S, which the bound adds.
void compare_with_reference(const LayerShape& shape, const RankTokens& tokens, RankReport& report);

// The same with the backward pass. Here three roundings lie on the way of each term of an output or token gradient:
// the weighted row is rounded, the sum of those that one rank computed may be, and the result is. With n = K + 1 fp32
// steps, g = n 2^-24 / (1 - n 2^-24):  |output - s| <= ((1 + u)^3 (1 + g) - 1) S, and what the fp64 sum is off by. With
// several nodes the sum of another node's rows is rounded, too, a fourth rounding.
// A gradient of a router's weight is carried, not summed: it must be equal.
void compare_backward_with_reference(const LayerShape& shape, bool has_several_nodes, const RankTokens& tokens,
                                     RankReport& report);

}  // namespace crossdock::demo
