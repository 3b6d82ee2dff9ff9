// SPDX-License-Identifier: Apache-2.0
#include "combine.h"

#include <algorithm>
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

// How far a value may be from x after the trip through NVFP4, whatever the order of the multiplications. Of a block of
// 16 with the largest magnitude b, the block scale s = e4m3(g b / 6) makes b about 6: the grid of 4-bit floats is 0.5,
// 1 or 2 wide there, in units of s / g. Where s is subnormal or 0 (a block far smaller than its row), its own rounding,
// at most half of e4m3's smallest step, counts too.
double nvfp4_error(double x, double block_max, double g) {
    if (g == 0) return std::fabs(x);
    const double exact_scale = g * block_max / 6;
    const double scale_error = std::max(exact_scale * 0x1p-4, 0x1p-10) * 1.01;
    if (exact_scale + scale_error < 0x1p-9) return std::fabs(x);  // every block scale that may result is 0
    const double largest_scale = exact_scale + scale_error;
    const double smallest_scale = std::max(exact_scale - scale_error, 0.0);
    // Saturation at 6 of a value whose scale was rounded down, and half of the widest step that x can meet.
    const double saturation = std::max(0.0, std::fabs(x) - 6 * smallest_scale / g);
    const double magnitude = smallest_scale > 0 ? std::fabs(x) * g / smallest_scale : 6;
    const double half_step = magnitude < 2 ? 0.25 : magnitude < 4 ? 0.5 : 1.0;
    return (std::max(half_step * largest_scale / g, saturation) + std::fabs(x) * 0x1p-20) * 1.01;
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
        const std::vector<std::byte> row = expert_row(problem, term.target, term.row);
        const std::vector<float> values = decoded(problem.combine_type, row);
        const double weight = term.weight;
        for (size_t i = 0; i < values.size(); ++i) {
            result.sum[i] += weight * values[i];
            magnitudes[i] += std::fabs(weight * values[i]);
        }
        if (problem.combine_recipe != NCCL_EP_COMB_QUANT_NVFP4) continue;
        const double g = nvfp4_global_scale(problem, row);
        for (size_t block = 0; block < values.size(); block += 16) {
            double block_max = 0;
            for (size_t i = block; i < block + 16; ++i) block_max = std::max<double>(block_max, std::fabs(values[i]));
            for (size_t i = block; i < block + 16; ++i) {
                const double error = std::fabs(weight) * nvfp4_error(values[i], block_max, g);
                result.bound[i] += error;
                magnitudes[i] += error;
            }
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

float nvfp4_global_scale(const Problem& problem, const std::vector<std::byte>& row) {
    double amax = 0;
    for (const double value : decoded(problem.combine_type, row)) amax = std::max(amax, std::fabs(value));
    return amax == 0 ? 0.0f : 2688.0f / static_cast<float>(amax);
}

}  // namespace crossdock::reference
