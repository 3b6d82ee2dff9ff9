// SPDX-License-Identifier: Apache-2.0
#include "ht_combine.h"

#include <algorithm>
#include <cmath>

#include "formats.h"

namespace crossdock::reference {
namespace {

using Bytes = std::vector<std::byte>;

void add(const Bytes& row, ncclDataType_t type, std::vector<float>& sums) {
    const std::vector<float> values = decoded(type, row);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += values[i];
}

// The sum of one rank's rows as it crosses.
void add_returned(const Problem& problem, const std::vector<float>& sums_of_rank, std::vector<float>& sums) {
    const Bytes row = encoded(problem.combine_type, sums_of_rank);
    if (problem.combine_recipe != NCCL_EP_COMB_QUANT_MXFP8) return add(row, problem.combine_type, sums);
    const Mxfp8Row quantised = through_mxfp8(decoded(problem.combine_type, row));
    for (size_t i = 0; i < sums.size(); ++i)
        sums[i] = std::fma(quantised.elements[i], quantised.scales[i / 32], sums[i]);
}

// How far MXFP8 takes a row from `row`, whose elements may already be a little off (ht_combine.h).
void add_mxfp8_errors(const std::vector<double>& row, std::vector<double>& errors) {
    for (size_t block = 0; block < row.size(); block += 32) {
        double largest = 0;
        for (size_t i = block; i < block + 32; ++i) largest = std::max(largest, std::fabs(row[i]));
        for (size_t i = block; i < block + 32; ++i)
            errors[i] += 1.01 * std::max({std::fabs(row[i]) * 0x1p-4, largest * 0x1p-17, 0x1p-137});
    }
}

// The rows that are left of a token, in the order of its choices.
std::vector<HtArrival> by_choice(const Problem& problem, const HtRouting& routing, int source, int token) {
    std::vector<HtArrival> left = routing.arrivals(source, token);
    std::vector<HtArrival> ordered;
    for (int k = 0; k < problem.num_topk; ++k) {
        const int target = problem.target_rank(source, token, k);
        if (target < 0) continue;
        const auto expert = static_cast<int>(problem.expert(source, token, k) % problem.local_experts());
        const auto found = std::ranges::find_if(left, [=](const HtArrival& arrival) {
            return arrival.target == target && arrival.source.choice == expert;
        });
        if (found == left.end()) continue;
        ordered.push_back(*found);
        left.erase(found);
    }
    return ordered;
}

}  // namespace

Bytes combined_row(const Problem& problem, const HtRouting& routing, int source, int token, int lsa_team_size) {
    const ncclDataType_t type = problem.combine_type;
    const std::vector<HtArrival>& arrivals = routing.arrivals(source, token);
    const auto team_of = [&](int rank) { return lsa_team_size == 0 ? 0 : rank / lsa_team_size; };
    std::vector<float> sums(problem.combine_hidden, 0.0f);
    if (problem.invariant) {
        for (const HtArrival& arrival : by_choice(problem, routing, source, token))
            add(expert_row(problem, arrival.target, arrival.source), type, sums);
        return encoded(type, sums);
    }
    for (size_t i = 0; i < arrivals.size();) {
        const int team = team_of(arrivals[i].target);
        const bool is_in_other_team = team != team_of(source);
        std::vector<float> sums_of_team(problem.combine_hidden, 0.0f);
        while (i < arrivals.size() && team_of(arrivals[i].target) == team) {
            const int target = arrivals[i].target;
            std::vector<float> sums_of_rank(problem.combine_hidden, 0.0f);
            for (; i < arrivals.size() && arrivals[i].target == target; ++i)
                add(expert_row(problem, target, arrivals[i].source), type, sums_of_rank);
            add_returned(problem, sums_of_rank, is_in_other_team ? sums_of_team : sums);
        }
        if (is_in_other_team) add(encoded(type, sums_of_team), type, sums);
    }
    return encoded(type, sums);
}

BoundedRow bounded_row(const Problem& problem, const HtRouting& routing, int source, int token, int lsa_team_size) {
    BoundedRow result;
    result.sum.resize(problem.combine_hidden);
    result.bound.resize(problem.combine_hidden);
    const ncclDataType_t type = problem.combine_type;
    const std::vector<HtArrival>& arrivals = routing.arrivals(source, token);
    std::vector<double> errors(problem.combine_hidden);  // of MXFP8
    for (size_t n = 0; n < arrivals.size();) {
        const int target = arrivals[n].target;
        std::vector<double> sum_of_rank(problem.combine_hidden);
        for (; n < arrivals.size() && arrivals[n].target == target; ++n) {
            const std::vector<float> values = decoded(type, expert_row(problem, target, arrivals[n].source));
            for (size_t i = 0; i < result.sum.size(); ++i) {
                sum_of_rank[i] += values[i];
                result.bound[i] += std::fabs(values[i]);  // S, the sum of magnitudes
            }
        }
        for (size_t i = 0; i < result.sum.size(); ++i) result.sum[i] += sum_of_rank[i];
        if (problem.combine_recipe == NCCL_EP_COMB_QUANT_MXFP8) add_mxfp8_errors(sum_of_rank, errors);
    }
    // With n terms and the unit roundoff u: one rounding in the FLAT layout, one more in the expert-major one and one
    // more between teams, n fp32 additions, each within 2^-24 of its exact result (combine.cpp derives it). Subnormal
    // results add half of the smallest step for each rounding.
    const double u = unit_roundoff(type);
    const double fp32 = (static_cast<double>(arrivals.size()) + 1) * 0x1p-24;
    const int more_roundings = problem.invariant ? 0 : (problem.expert_major() ? 1 : 0) + (lsa_team_size != 0 ? 1 : 0);
    const double growth = std::pow(1 + u, 1 + more_roundings);
    const double relative = growth - 1 + fp32 * growth;
    const double subnormal = smallest_positive(type) * static_cast<double>(1 + more_roundings * arrivals.size());
    for (size_t i = 0; i < result.bound.size(); ++i)
        result.bound[i] = (result.bound[i] + errors[i]) * relative + errors[i] + subnormal;
    return result;
}

float weight_gradient(const Problem& problem, int target, int source, int token, int local_expert) {
    uint64_t bits = random_bits(problem.seed, 0x6AD);
    for (const int part : {target, source, token, local_expert}) bits = random_bits(bits, static_cast<uint64_t>(part));
    // Never 0, so that a value that was lost shows.
    return (static_cast<float>(bits >> 40) + 1.0f) * 0x1p-20f * ((bits & 1) != 0 ? -1.0f : 1.0f);
}

std::vector<float> combined_weights(const Problem& problem, const HtRouting& routing, int source, int token) {
    std::vector<float> result(problem.num_topk, 0.0f);
    for (int k = 0; k < problem.num_topk; ++k) {
        const int target = problem.target_rank(source, token, k);
        if (target < 0) continue;
        const auto expert = static_cast<int>(problem.expert(source, token, k) % problem.local_experts());
        for (const HtArrival& arrival : routing.arrivals(source, token)) {
            if (arrival.target != target || (problem.expert_major() && arrival.source.choice != expert)) continue;
            result[k] = weight_gradient(problem, target, source, token, expert);
        }
    }
    return result;
}

}  // namespace crossdock::reference
