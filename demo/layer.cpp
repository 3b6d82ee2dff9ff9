// SPDX-License-Identifier: Apache-2.0
#include "demo/layer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "demo/activation.h"
#include "tools/common/bfloat16.h"
#include "tools/common/random.h"

namespace crossdock::demo {
namespace {

using tools::bfloat16_to_float;
using tools::float_to_bfloat16;
using tools::Random;
using tools::round_to_bfloat16;

// What a stream of random numbers is drawn for.
enum class Purpose : uint64_t { kWord = 1, kRouter = 2, kExpert = 3, kGradient = 4 };

Random random_for(const LayerShape& shape, Purpose purpose, uint64_t index) {
    return Random(tools::mix_bits(shape.seed * 4 + static_cast<uint64_t>(purpose)) ^ index);
}

// Uniform values of variance 1 / fan_in, in bf16.
std::vector<float> random_matrix(Random& random, size_t size, int fan_in) {
    const float scale = std::sqrt(3.0f / static_cast<float>(fan_in));
    std::vector<float> matrix(size);
    for (float& value : matrix) {
        value = round_to_bfloat16(random.symmetric() * scale);
    }
    return matrix;
}

// Rows and columns of a product that are summed at once: 4 x 16 sums stay in registers with 256-bit vectors.
constexpr size_t kRowTile = 4;
constexpr size_t kColumnTile = 16;

// sums[r][c] = sum over i, ascending, of inputs[r][i] * matrix[i][column + c]. The clone for newer CPUs has the same
// results: every product is exact, so there is nothing that a fused multiply-add could round differently.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
__attribute__((target_clones("default", "arch=haswell")))
#endif
void multiply_tile(const float* inputs, size_t depth, const float* matrix, size_t num_columns, float* sums) {
    float tile[kRowTile][kColumnTile] = {};
    for (size_t i = 0; i < depth; ++i) {
        const float* row = matrix + i * num_columns;
        for (size_t r = 0; r < kRowTile; ++r) {
            const float input = inputs[r * depth + i];
            for (size_t c = 0; c < kColumnTile; ++c) {
                tile[r][c] += input * row[c];
            }
        }
    }
    std::copy(&tile[0][0], &tile[0][0] + kRowTile * kColumnTile, sums);
}

// outputs [kRowTile][num_columns] = inputs [kRowTile][depth] x matrix [depth][num_columns], rounded to bf16.
void multiply(const float* inputs, size_t depth, const std::vector<float>& matrix, size_t num_columns, float* outputs) {
    float sums[kRowTile * kColumnTile];
    size_t column = 0;
    for (; column + kColumnTile <= num_columns; column += kColumnTile) {
        multiply_tile(inputs, depth, matrix.data() + column, num_columns, sums);
        for (size_t r = 0; r < kRowTile; ++r) {
            for (size_t c = 0; c < kColumnTile; ++c) {
                outputs[r * num_columns + column + c] = round_to_bfloat16(sums[r * kColumnTile + c]);
            }
        }
    }
    for (; column < num_columns; ++column) {
        for (size_t r = 0; r < kRowTile; ++r) {
            float sum = 0;
            for (size_t i = 0; i < depth; ++i) {
                sum += inputs[r * depth + i] * matrix[i * num_columns + column];
            }
            outputs[r * num_columns + column] = round_to_bfloat16(sum);
        }
    }
}

}  // namespace

void embed(const LayerShape& shape, uint32_t word, int64_t previous, uint16_t* row) {
    // A little of the word before gives a word other neighbours in other places, as attention would.
    constexpr float kContext = 0.35f;
    const float scale = std::sqrt(3.0f);
    Random own = random_for(shape, Purpose::kWord, word);
    Random before = random_for(shape, Purpose::kWord, static_cast<uint64_t>(previous));
    for (int i = 0; i < shape.hidden; ++i) {
        const float context = previous < 0 ? 0.0f : kContext * before.symmetric();
        row[i] = float_to_bfloat16(scale * (own.symmetric() + context));
    }
}

void draw_gradient(const LayerShape& shape, size_t position, uint16_t* row) {
    Random random = random_for(shape, Purpose::kGradient, position);
    for (int i = 0; i < shape.hidden; ++i) {
        row[i] = float_to_bfloat16(random.symmetric());
    }
}

Router::Router(const LayerShape& shape) : shape_(shape) {
    Random random = random_for(shape, Purpose::kRouter, 0);
    matrix_ =
        random_matrix(random, static_cast<size_t>(shape.hidden) * static_cast<size_t>(shape.num_experts), shape.hidden);
}

void Router::route(const uint16_t* row, int32_t* experts, float* weights) const {
    const auto num_experts = static_cast<size_t>(shape_.num_experts);
    std::vector<float> logits(num_experts, 0.0f);
    for (size_t i = 0; i < static_cast<size_t>(shape_.hidden); ++i) {
        const float value = bfloat16_to_float(row[i]);
        for (size_t e = 0; e < num_experts; ++e) {
            logits[e] += value * matrix_[i * num_experts + e];
        }
    }
    std::vector<int32_t> order(num_experts);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + shape_.topk, order.end(), [&](int32_t left, int32_t right) {
        const float left_logit = logits[static_cast<size_t>(left)];
        const float right_logit = logits[static_cast<size_t>(right)];
        return left_logit != right_logit ? left_logit > right_logit : left < right;
    });
    // The softmax of all experts, scaled to sum 1 over the chosen ones, is the softmax of the chosen ones.
    float sum = 0;
    for (int k = 0; k < shape_.topk; ++k) {
        experts[k] = order[static_cast<size_t>(k)];
        weights[k] = std::exp(logits[static_cast<size_t>(experts[k])] - logits[static_cast<size_t>(order[0])]);
        sum += weights[k];
    }
    for (int k = 0; k < shape_.topk; ++k) {
        weights[k] /= sum;
    }
}

ExpertWeights make_expert(const LayerShape& shape, int expert) {
    Random random = random_for(shape, Purpose::kExpert, static_cast<uint64_t>(expert));
    const size_t size = static_cast<size_t>(shape.hidden) * static_cast<size_t>(shape.intermediate);
    ExpertWeights weights;
    weights.gate = random_matrix(random, size, shape.hidden);
    weights.up = random_matrix(random, size, shape.hidden);
    weights.down = random_matrix(random, size, shape.intermediate);
    return weights;
}

void run_expert(const LayerShape& shape, const ExpertWeights& weights, const uint16_t* rows, size_t num_rows,
                uint16_t* results) {
    const auto hidden = static_cast<size_t>(shape.hidden);
    const auto intermediate = static_cast<size_t>(shape.intermediate);
    std::vector<float> inputs(kRowTile * hidden);
    std::vector<float> gate(kRowTile * intermediate);
    std::vector<float> up(kRowTile * intermediate);
    std::vector<float> outputs(kRowTile * hidden);
    for (size_t first = 0; first < num_rows; first += kRowTile) {
        // A last tile that is not full computes leftovers of the one before, which are not used.
        const size_t num_values = std::min(kRowTile, num_rows - first) * hidden;
        std::transform(rows + first * hidden, rows + first * hidden + num_values, inputs.begin(), bfloat16_to_float);
        multiply(inputs.data(), hidden, weights.gate, intermediate, gate.data());
        multiply(inputs.data(), hidden, weights.up, intermediate, up.data());
        for (size_t i = 0; i < gate.size(); ++i) {
            gate[i] = round_to_bfloat16(round_to_bfloat16(silu(gate[i])) * up[i]);
        }
        multiply(gate.data(), intermediate, weights.down, hidden, outputs.data());
        std::transform(outputs.begin(), outputs.begin() + static_cast<ptrdiff_t>(num_values), results + first * hidden,
                       float_to_bfloat16);
    }
}

namespace {

std::vector<float> transposed_matrix(const std::vector<float>& matrix, size_t num_rows, size_t num_columns) {
    std::vector<float> transposed(matrix.size());
    for (size_t row = 0; row < num_rows; ++row) {
        for (size_t column = 0; column < num_columns; ++column) {
            transposed[column * num_rows + row] = matrix[row * num_columns + column];
        }
    }
    return transposed;
}

// Of one tile of rows, all in fp32 with bf16 values.
class BackwardTile {
  public:
    BackwardTile(const LayerShape& shape, const ExpertWeights& weights, const TransposedExpert& transposed)
        : hidden_(static_cast<size_t>(shape.hidden)),
          intermediate_(static_cast<size_t>(shape.intermediate)),
          weights_(weights),
          transposed_(transposed),
          inputs_(kRowTile * hidden_),
          gradients_(kRowTile * hidden_),
          results_(kRowTile * hidden_),
          up_part_(kRowTile * hidden_),
          gate_(kRowTile * intermediate_),
          up_(kRowTile * intermediate_),
          inner_(kRowTile * intermediate_),
          inner_gradients_(kRowTile * intermediate_) {}

    void run(const uint16_t* rows, const uint16_t* gradients, size_t num_rows, uint16_t* row_gradients,
             float* products) {
        // A last tile that is not full computes leftovers of the one before, which are not used.
        std::transform(rows, rows + num_rows * hidden_, inputs_.begin(), bfloat16_to_float);
        std::transform(gradients, gradients + num_rows * hidden_, gradients_.begin(), bfloat16_to_float);
        multiply(inputs_.data(), hidden_, weights_.gate, intermediate_, gate_.data());
        multiply(inputs_.data(), hidden_, weights_.up, intermediate_, up_.data());
        multiply(gradients_.data(), hidden_, transposed_.down, intermediate_, inner_gradients_.data());
        for (size_t i = 0; i < gate_.size(); ++i) {
            const float activated = round_to_bfloat16(silu(gate_[i]));
            const float activated_gradient = round_to_bfloat16(inner_gradients_[i] * up_[i]);
            inner_[i] = round_to_bfloat16(activated * up_[i]);
            up_[i] = round_to_bfloat16(inner_gradients_[i] * activated);
            gate_[i] = round_to_bfloat16(activated_gradient * silu_slope(gate_[i]));
        }
        multiply(inner_.data(), intermediate_, weights_.down, hidden_, results_.data());
        for (size_t r = 0; r < num_rows; ++r) {
            products[r] = 0;
            for (size_t i = r * hidden_; i < (r + 1) * hidden_; ++i) {
                products[r] += results_[i] * gradients_[i];
            }
        }
        multiply(gate_.data(), intermediate_, transposed_.gate, hidden_, results_.data());
        multiply(up_.data(), intermediate_, transposed_.up, hidden_, up_part_.data());
        for (size_t i = 0; i < num_rows * hidden_; ++i) {
            row_gradients[i] = float_to_bfloat16(results_[i] + up_part_[i]);
        }
    }

  private:
    size_t hidden_;
    size_t intermediate_;
    const ExpertWeights& weights_;
    const TransposedExpert& transposed_;
    std::vector<float> inputs_;
    std::vector<float> gradients_;  // of the results
    std::vector<float> results_;    // later: what comes through gate of the rows' gradients
    std::vector<float> up_part_;    // what comes through up
    std::vector<float> gate_;       // later: its gradients
    std::vector<float> up_;         // later: its gradients
    std::vector<float> inner_;      // silu(gate) * up
    std::vector<float> inner_gradients_;
};

}  // namespace

TransposedExpert transpose(const LayerShape& shape, const ExpertWeights& weights) {
    const auto hidden = static_cast<size_t>(shape.hidden);
    const auto intermediate = static_cast<size_t>(shape.intermediate);
    return {transposed_matrix(weights.gate, hidden, intermediate), transposed_matrix(weights.up, hidden, intermediate),
            transposed_matrix(weights.down, intermediate, hidden)};
}

void run_expert_backward(const LayerShape& shape, const ExpertWeights& weights, const TransposedExpert& transposed,
                         const uint16_t* rows, const uint16_t* gradients, size_t num_rows, uint16_t* row_gradients,
                         float* products) {
    const auto hidden = static_cast<size_t>(shape.hidden);
    BackwardTile tile(shape, weights, transposed);
    for (size_t first = 0; first < num_rows; first += kRowTile) {
        tile.run(rows + first * hidden, gradients + first * hidden, std::min(kRowTile, num_rows - first),
                 row_gradients + first * hidden, products + first);
    }
}

}  // namespace crossdock::demo
