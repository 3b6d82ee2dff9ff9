// SPDX-License-Identifier: Apache-2.0
#include "combine.h"

#include <cmath>

#include "formats.h"

namespace crossdock::reference {
namespace {

// One row of a token's sum.
struct Term {
    int target;
    RowSource row;
    float weight;
};

std::vector<Term> terms(const Problem& problem, int source, int token, const ActiveRanks& active) {
    std::vector<Term> result;
    std::vector<char> seen(problem.num_ranks, 0);
    const std::vector<char> has_slot =
        problem.expert_major() ? choices_with_slot(problem, source, token) : std::vector<char>();
    for (int k = 0; k < problem.num_topk; ++k) {
        const int target = problem.target_rank(source, token, k);
        if (target < 0 || !is_active(active, target)) continue;
        if (problem.expert_major()) {
            if (has_slot[k]) result.push_back({target, {source, token, k}, problem.weight(source, token, k)});
        } else if (!seen[target]) {
            seen[target] = 1;
            result.push_back({target, {source, token, 0}, 1.0f});
        }
    }
    return result;
}

}  // namespace

std::vector<std::byte> combined_row(const Problem& problem, int source, int token, const ActiveRanks& active) {
    std::vector<float> sums(problem.combine_hidden, 0.0f);
    for (const Term& term : terms(problem, source, token, active)) {
        const std::vector<float> values = decoded(problem.combine_type, expert_row(problem, term.target, term.row));
        for (size_t i = 0; i < sums.size(); ++i)
            sums[i] = problem.expert_major() ? std::fma(term.weight, values[i], sums[i]) : sums[i] + values[i];
    }
    return encoded(problem.combine_type, sums);
}

BoundedRow bounded_row(const Problem& problem, int source, int token, const ActiveRanks& active) {
    BoundedRow result;
    result.sum.resize(problem.combine_hidden);
    result.bound.resize(problem.combine_hidden);
    std::vector<double> magnitudes(problem.combine_hidden);
    for (const Term& term : terms(problem, source, token, active)) {
        const std::vector<float> values = decoded(problem.combine_type, expert_row(problem, term.target, term.row));
        const double weight = term.weight;
        for (size_t i = 0; i < values.size(); ++i) {
            result.sum[i] += weight * values[i];
            magnitudes[i] += std::fabs(weight * values[i]);
        }
        if (problem.combine_recipe == NCCL_EP_COMB_QUANT_NONE) continue;
        const std::vector<double> errors = quantisation_errors(problem.combine_recipe, values);
        for (size_t i = 0; i < values.size(); ++i) {
            const double error = std::fabs(weight) * errors[i];
            result.bound[i] += error;
            magnitudes[i] += error;
        }
    }
    // With u the unit roundoff, S = sum |w x| and K terms: K fp32 operations, each within 2^-24 of its exact result,
    // and one rounding give (u + (K + 1) 2^-24 (1 + u)) S; where senders sum first, a second rounding (crossdock.h). A
    // subnormal result adds half of the smallest step for each rounding.
    const double u = unit_roundoff(problem.combine_type);
    const double fp32 = (problem.num_topk + 1) * 0x1p-24;
    const bool twice = problem.sums == CROSSDOCK_SUMS_SENDER;
    const double relative = twice ? 2 * u + u * u + fp32 * (1 + u) * (1 + u) : u + fp32 * (1 + u);
    const double subnormal = smallest_positive(problem.combine_type) * (twice ? 1 + problem.num_topk : 1);
    for (size_t i = 0; i < magnitudes.size(); ++i) result.bound[i] += relative * magnitudes[i] + subnormal;
    return result;
}

}  // namespace crossdock::reference
