// SPDX-License-Identifier: Apache-2.0
#include "ht_dispatch.h"

#include <algorithm>

namespace crossdock::reference {
namespace {

bool goes_to_rank(const Problem& problem, int source, int token, int rank) {
    for (int k = 0; k < problem.num_topk; ++k) {
        if (problem.target_rank(source, token, k) == rank) return true;
    }
    return false;
}

HtReceived flat_rows(const Problem& problem, int rank) {
    HtReceived result;
    for (int source = 0; source < problem.num_ranks; ++source) {
        for (int token = 0; token < problem.ranks[source].num_tokens; ++token) {
            if (goes_to_rank(problem, source, token, rank)) result.rows.push_back({source, token, 0});
        }
    }
    result.total = result.rows.size();
    if (problem.budget != 0) result.rows.resize(std::min(result.rows.size(), problem.budget));
    result.counters.assign(problem.local_experts(), 0);
    for (const RowSource& row : result.rows) {
        for (const int expert : local_experts_of(problem, rank, row)) ++result.counters[expert];
    }
    return result;
}

HtReceived expert_major_rows(const Problem& problem, int rank) {
    HtReceived result;
    const size_t budget = problem.budget != 0 ? problem.budget : SIZE_MAX;
    for (int expert = 0; expert < problem.local_experts(); ++expert) {
        const size_t start = result.rows.size();
        for (int source = 0; source < problem.num_ranks; ++source) {
            for (int token = 0; token < problem.ranks[source].num_tokens; ++token) {
                const RowSource row{source, token, expert};
                if (last_choice_of(problem, row, int64_t{rank} * problem.local_experts() + expert) >= 0)
                    result.rows.push_back(row);
            }
        }
        while (problem.alignment > 1 && (result.rows.size() - start) % problem.alignment != 0)
            result.rows.push_back({});
        const size_t end = result.rows.size();
        result.counters.push_back(static_cast<int64_t>(std::min(end, budget) - std::min(start, budget)));
        result.offsets.push_back(static_cast<int64_t>(std::min(start, budget)));
    }
    result.total = result.rows.size();
    result.rows.resize(std::min(result.rows.size(), budget));
    return result;
}

}  // namespace

HtRouting::HtRouting(const Problem& problem) : budget_(problem.budget) {
    for (const RankInput& source : problem.ranks) arrivals_.emplace_back(source.num_tokens);
    for (int rank = 0; rank < problem.num_ranks; ++rank) {
        received_.push_back(problem.expert_major() ? expert_major_rows(problem, rank) : flat_rows(problem, rank));
        const std::vector<RowSource>& rows = received_.back().rows;
        for (size_t i = 0; i < rows.size(); ++i) {
            if (!rows[i].is_padding()) arrivals_[rows[i].source][rows[i].token].push_back({rank, i, rows[i]});
        }
    }
}

bool HtRouting::overflows() const {
    return budget_ != 0 && std::any_of(received_.begin(), received_.end(),
                                       [&](const HtReceived& rank) { return rank.total > budget_; });
}

}  // namespace crossdock::reference
