// SPDX-License-Identifier: Apache-2.0
// The layer of the demo: embedding, router, SwiGLU experts. Everything is drawn from the seed, nothing is trained.
//
// An expert is a bf16 layer as frameworks run it: products of two bf16 values are exact in fp32, sums run in fp32 in
// the order of the index, and gate, up, silu(gate), silu(gate) * up and the result are each rounded to bf16. The order
// being fixed, a row's result has the same bits on every rank and in every batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "demo/options.h"

namespace crossdock::demo {

// The bf16 row [hidden] of a word that follows another one (or follows nothing: previous < 0).
void embed(const LayerShape& shape, uint32_t word, int64_t previous, uint16_t* row);

// A linear layer, softmax, the topk largest; their probabilities, scaled to sum 1, are the weights.
class Router {
  public:
    explicit Router(const LayerShape& shape);

    // row [hidden] bf16 -> experts [topk] in descending order of weight, weights [topk].
    void route(const uint16_t* row, int32_t* experts, float* weights) const;

  private:
    LayerShape shape_;
    std::vector<float> matrix_;  // [hidden][num_experts]
};

// The bf16 row [hidden] that a loss gives as the gradient of the output of the token at this place of the text.
void draw_gradient(const LayerShape& shape, size_t position, uint16_t* row);

// Matrices of one expert; every value is a bf16 value.
struct ExpertWeights {
    std::vector<float> gate;  // [hidden][intermediate]
    std::vector<float> up;    // [hidden][intermediate]
    std::vector<float> down;  // [intermediate][hidden]
};

ExpertWeights make_expert(const LayerShape& shape, int expert);

// rows [num_rows][hidden] bf16 -> results, likewise; they may be the same memory.
void run_expert(const LayerShape& shape, const ExpertWeights& weights, const uint16_t* rows, size_t num_rows,
                uint16_t* results);

// What the backward pass takes in addition.
struct TransposedExpert {
    std::vector<float> gate;  // [intermediate][hidden]
    std::vector<float> up;    // [intermediate][hidden]
    std::vector<float> down;  // [hidden][intermediate]
};

TransposedExpert transpose(const LayerShape& shape, const ExpertWeights& weights);

// The backward pass of rows that are computed once more: rows and the gradients of their results -> the gradients of
// the rows [num_rows][hidden] bf16, and the products of results and their gradients [num_rows], summed in fp32 in the
// order of the index: the gradient of the weight that the result is multiplied with. In bf16 are also the gradients of
// silu(gate) * up, of gate and of up, and each of the two products that make up a row's gradient.
void run_expert_backward(const LayerShape& shape, const ExpertWeights& weights, const TransposedExpert& transposed,
                         const uint16_t* rows, const uint16_t* gradients, size_t num_rows, uint16_t* row_gradients,
                         float* products);

}  // namespace crossdock::demo
