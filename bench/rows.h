// SPDX-License-Identifier: Apache-2.0
// The tokens of the benchmark. Every rank can tell what any token of any rank holds, so that outputs are checked
// without communication.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/options.h"

namespace crossdock::bench {

// A row as it travels: its bytes, and its scales where the recipe has some.
struct Row {
    std::vector<uint8_t> bytes;
    std::vector<float> scales;
};

// Bytes of one element of dispatched rows: as they are given, and as they arrive.
size_t input_element_bytes(const Options& options);
size_t output_element_bytes(const Options& options);
ncclDataType_t input_dtype(const Options& options);
ncclDataType_t output_dtype(const Options& options);
size_t num_scales(const Options& options);  // a row; 0 without a recipe

// The type of the experts' outputs and of combine's results.
size_t combine_element_bytes(const Options& options);

// [hidden]: multiples of 1/16 from -8 to 127/16, which every type here holds exactly.
std::vector<float> token_values(const Options& options, int rank, int token);

// What dispatch is given for a token, and what must arrive.
Row input_row(const Options& options, int rank, int token);
Row expected_row(const Options& options, int rank, int token);

// Weights [max_tokens][topk] of a rank's tokens: multiples of 1/64 in (0, 1].
std::vector<float> draw_weights(const Options& options, int rank);

// What expert e makes of a value x: x times this power of two.
float expert_factor(int expert);

// A value as it is after rounding to combine's type.
float rounded(ncclDataType_t dtype, float value);

// Rounding to combine's type, and reading it back.
void encode(ncclDataType_t dtype, const std::vector<float>& values, uint8_t* bytes);
float decode(ncclDataType_t dtype, const uint8_t* bytes, size_t index);
double unit_roundoff(ncclDataType_t dtype);

}  // namespace crossdock::bench
