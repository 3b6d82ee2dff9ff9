// SPDX-License-Identifier: Apache-2.0
// The backward pass of an expert against finite differences of the same expert without any rounding: both passes of the
// demo use that code, so the demo itself cannot see what is wrong in it.
#include <cmath>
#include <cstdio>

#include "demo/layer.h"
#include "tools/common/bfloat16.h"

namespace crossdock::demo {
namespace {

using tools::bfloat16_to_float;

constexpr size_t kNumRows = 5;  // a full tile and one that is not
// What some ten roundings to bf16 on the way leave, with room.
constexpr double kTolerance = 0.02;

// The product of a row's result and the result's gradient.
double loss(const LayerShape& shape, const ExpertWeights& weights, const std::vector<double>& row,
            const uint16_t* gradient) {
    const auto hidden = static_cast<size_t>(shape.hidden);
    const auto intermediate = static_cast<size_t>(shape.intermediate);
    double sum = 0;
    for (size_t j = 0; j < intermediate; ++j) {
        double gate = 0;
        double up = 0;
        double down = 0;
        for (size_t i = 0; i < hidden; ++i) {
            gate += row[i] * weights.gate[i * intermediate + j];
            up += row[i] * weights.up[i * intermediate + j];
            down += static_cast<double>(bfloat16_to_float(gradient[i])) * weights.down[j * hidden + i];
        }
        sum += gate / (1 + std::exp(-gate)) * up * down;
    }
    return sum;
}

int check() {
    LayerShape shape;
    shape.hidden = 64;
    shape.intermediate = 32;
    const auto hidden = static_cast<size_t>(shape.hidden);
    const ExpertWeights weights = make_expert(shape, 1);
    std::vector<uint16_t> rows(kNumRows * hidden);
    std::vector<uint16_t> gradients(rows.size());
    std::vector<uint16_t> row_gradients(rows.size());
    std::vector<float> products(kNumRows);
    for (size_t r = 0; r < kNumRows; ++r) {
        embed(shape, static_cast<uint32_t>(r) + 3, static_cast<int64_t>(r), &rows[r * hidden]);
        draw_gradient(shape, r, &gradients[r * hidden]);
    }
    run_expert_backward(shape, weights, transpose(shape, weights), rows.data(), gradients.data(), kNumRows,
                        row_gradients.data(), products.data());

    double error = 0;
    double size = 0;
    double product_error = 0;
    double product_size = 0;
    for (size_t r = 0; r < kNumRows; ++r) {
        std::vector<double> row;
        for (size_t i = 0; i < hidden; ++i) {
            row.push_back(bfloat16_to_float(rows[r * hidden + i]));
        }
        const auto loss_at = [&](size_t index, double step) {
            std::vector<double> moved = row;
            moved[index] += step;
            return loss(shape, weights, moved, &gradients[r * hidden]);
        };
        product_error += std::pow(products[r] - loss_at(0, 0), 2);
        product_size += std::pow(loss_at(0, 0), 2);
        for (size_t i = 0; i < hidden; ++i) {
            constexpr double kStep = 1e-5;
            const double slope = (loss_at(i, kStep) - loss_at(i, -kStep)) / (2 * kStep);
            error += std::pow(bfloat16_to_float(row_gradients[r * hidden + i]) - slope, 2);
            size += slope * slope;
        }
    }
    const double part = std::sqrt(error / size);
    const double product_part = std::sqrt(product_error / product_size);
    std::printf("gradients of rows off by %.4f, products by %.4f of their size; %.2f is allowed\n", part, product_part,
                kTolerance);
    return part < kTolerance && product_part < kTolerance ? 0 : 1;
}

}  // namespace
}  // namespace crossdock::demo

int main() { return crossdock::demo::check(); }
