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

// What the experts give each token, summed with its weights.
struct DenseSums {
    std::vector<double> sum;        // [tokens][hidden]
    std::vector<double> magnitude;  // the sum of the terms' magnitudes
};

DenseSums sum_densely(const LayerShape& shape, const RankTokens& tokens, RankReport& report) {
    const auto hidden = static_cast<size_t>(shape.hidden);
    DenseSums sums{std::vector<double>(tokens.rows.size()), std::vector<double>(tokens.rows.size())};
    std::vector<size_t> choices;  // token * topk + k, for the expert at hand
    std::vector<uint16_t> rows;
    for (int expert = 0; expert < shape.num_experts; ++expert) {
        choices.clear();
        rows.clear();
        for (size_t choice = 0; choice < tokens.experts.size(); ++choice) {
            if (tokens.experts[choice] == expert) {
                const auto row =
                    tokens.rows.begin() + static_cast<ptrdiff_t>(choice / static_cast<size_t>(shape.topk) * hidden);
                choices.push_back(choice);
                rows.insert(rows.end(), row, row + shape.hidden);
            }
        }
        if (!choices.empty()) {
            run_expert(shape, make_expert(shape, expert), rows.data(), choices.size(), rows.data());
        }
        for (size_t i = 0; i < choices.size(); ++i) {
            const size_t token = choices[i] / static_cast<size_t>(shape.topk);
            const double weight = tokens.weights[choices[i]];
            for (size_t column = 0; column < hidden; ++column) {
                const double term = weight * bfloat16_to_float(rows[i * hidden + column]);
                sums.sum[token * hidden + column] += term;
                sums.magnitude[token * hidden + column] += std::fabs(term);
            }
        }
        report.experts_checked.store(expert + 1);
    }
    return sums;
}

}  // namespace

void compare_with_reference(const LayerShape& shape, const RankTokens& tokens, RankReport& report) {
    const DenseSums sums = sum_densely(shape, tokens, report);
    for (size_t i = 0; i < tokens.outputs.size(); ++i) {
        const double error = std::fabs(bfloat16_to_float(tokens.outputs[i]) - sums.sum[i]);
        const double bound = error_bound(shape.topk, sums.sum[i], sums.magnitude[i]);
        ++report.num_values;
        report.num_nonzero += sums.sum[i] != 0;
        // Written so that a NaN counts as too large.
        report.num_above_bound += !(error <= bound);
        if (!(error <= report.largest_error)) {
            report.largest_error = error;
            report.bound_of_largest = bound;
        }
        if (bound > 0 && !(error / bound <= report.largest_part)) {
            report.largest_part = error / bound;
        }
    }
}

}  // namespace crossdock::demo
