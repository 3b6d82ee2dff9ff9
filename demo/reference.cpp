// SPDX-License-Identifier: Apache-2.0
#include "demo/reference.h"

#include <cmath>

#include "demo/layer.h"
#include "tools/common/bfloat16.h"

namespace crossdock::demo {
namespace {

using tools::bfloat16_to_float;
using tools::kBfloat16Roundoff;

double error_bound(int topk, double sum, double magnitude) {
    const double steps = topk * 0x1p-24;
    const double growth = steps / (1 - steps);
    return kBfloat16Roundoff * std::fabs(sum) + ((1 + kBfloat16Roundoff) * growth + topk * 0x1p-53) * magnitude;
}

double staged_error_bound(int topk, int roundings, double magnitude) {
    const double steps = (topk + 1) * 0x1p-24;
    const double growth = steps / (1 - steps);
    const double rounding = std::pow(1 + kBfloat16Roundoff, roundings);
    return (rounding * (1 + growth) - 1 + topk * 0x1p-53) * magnitude;
}

// What the experts give each token, summed with its weights.
struct DenseSums {
    std::vector<double> sum;        // [tokens][hidden]
    std::vector<double> magnitude;  // the sum of the terms' magnitudes

    explicit DenseSums(size_t size) : sum(size), magnitude(size) {}

    void add(size_t first, double weight, const uint16_t* row, size_t count) {
        for (size_t i = 0; i < count; ++i) {
            const double term = weight * bfloat16_to_float(row[i]);
            sum[first + i] += term;
            magnitude[first + i] += std::fabs(term);
        }
    }
};

// token * topk + k of all that chose the expert.
std::vector<size_t> choices_of(const RankTokens& tokens, int expert) {
    std::vector<size_t> choices;
    for (size_t choice = 0; choice < tokens.experts.size(); ++choice) {
        if (tokens.experts[choice] == expert) {
            choices.push_back(choice);
        }
    }
    return choices;
}

void gather_rows(const std::vector<uint16_t>& source, const std::vector<size_t>& choices, const LayerShape& shape,
                 std::vector<uint16_t>& rows) {
    rows.clear();
    for (size_t choice : choices) {
        const auto row = source.begin() + static_cast<ptrdiff_t>(choice / static_cast<size_t>(shape.topk)) *
                                              static_cast<ptrdiff_t>(shape.hidden);
        rows.insert(rows.end(), row, row + shape.hidden);
    }
}

DenseSums sum_densely(const LayerShape& shape, const RankTokens& tokens, RankReport& report) {
    const auto hidden = static_cast<size_t>(shape.hidden);
    DenseSums sums(tokens.rows.size());
    std::vector<uint16_t> rows;
    for (int expert = 0; expert < shape.num_experts; ++expert) {
        const std::vector<size_t> choices = choices_of(tokens, expert);
        gather_rows(tokens.rows, choices, shape, rows);
        if (!choices.empty()) {
            run_expert(shape, make_expert(shape, expert), rows.data(), choices.size(), rows.data());
        }
        for (size_t i = 0; i < choices.size(); ++i) {
            const size_t token = choices[i] / static_cast<size_t>(shape.topk);
            sums.add(token * hidden, tokens.weights[choices[i]], &rows[i * hidden], hidden);
        }
        report.experts_checked.store(expert + 1);
    }
    return sums;
}

}  // namespace

void compare_with_reference(const LayerShape& shape, const RankTokens& tokens, RankReport& report) {
    const DenseSums sums = sum_densely(shape, tokens, report);
    for (size_t i = 0; i < tokens.outputs.size(); ++i) {
        report.outputs.add(bfloat16_to_float(tokens.outputs[i]), sums.sum[i],
                           error_bound(shape.topk, sums.sum[i], sums.magnitude[i]));
    }
}

void compare_backward_with_reference(const LayerShape& shape, bool has_several_nodes, const RankTokens& tokens,
                                     RankReport& report) {
    const int roundings = has_several_nodes ? 4 : 3;
    const auto hidden = static_cast<size_t>(shape.hidden);
    const auto topk = static_cast<size_t>(shape.topk);
    DenseSums outputs(tokens.rows.size());
    DenseSums token_gradients(tokens.rows.size());
    std::vector<uint16_t> rows;
    std::vector<uint16_t> gradients;
    std::vector<uint16_t> row_gradients;
    std::vector<float> products;
    for (int expert = 0; expert < shape.num_experts; ++expert) {
        const std::vector<size_t> choices = choices_of(tokens, expert);
        if (!choices.empty()) {
            const ExpertWeights weights = make_expert(shape, expert);
            gather_rows(tokens.rows, choices, shape, rows);
            gather_rows(tokens.gradients, choices, shape, gradients);
            row_gradients.resize(rows.size());
            products.resize(choices.size());
            run_expert_backward(shape, weights, transpose(shape, weights), rows.data(), gradients.data(),
                                choices.size(), row_gradients.data(), products.data());
            run_expert(shape, weights, rows.data(), choices.size(), rows.data());
        }
        for (size_t i = 0; i < choices.size(); ++i) {
            const size_t token = choices[i] / topk;
            const double weight = tokens.weights[choices[i]];
            outputs.add(token * hidden, weight, &rows[i * hidden], hidden);
            token_gradients.add(token * hidden, weight, &row_gradients[i * hidden], hidden);
            report.weight_gradients.add(tokens.weight_gradients[choices[i]], products[i], 0);
        }
        report.experts_checked.store(expert + 1);
    }
    for (size_t i = 0; i < tokens.outputs.size(); ++i) {
        report.outputs.add(bfloat16_to_float(tokens.outputs[i]), outputs.sum[i],
                           staged_error_bound(shape.topk, roundings, outputs.magnitude[i]));
        report.token_gradients.add(bfloat16_to_float(tokens.token_gradients[i]), token_gradients.sum[i],
                                   staged_error_bound(shape.topk, roundings, token_gradients.magnitude[i]));
    }
}

}  // namespace crossdock::demo
