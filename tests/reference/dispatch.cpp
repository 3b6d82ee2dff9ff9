// SPDX-License-Identifier: Apache-2.0
#include "dispatch.h"

#include <utility>

#include "src/core/recipes.h"

namespace crossdock::reference {

std::vector<std::vector<RowSource>> received_rows(const Problem& problem, int rank, const ActiveRanks& active) {
    std::vector<std::vector<RowSource>> blocks(problem.num_blocks());
    for (int source = 0; source < problem.num_ranks; ++source) {
        if (!is_active(active, source)) continue;
        for (int token = 0; token < problem.ranks[source].num_tokens; ++token) {
            for (int k = 0; k < problem.num_topk; ++k) {
                if (problem.target_rank(source, token, k) != rank) continue;
                if (!problem.expert_major()) {
                    blocks[source].push_back({source, token, 0});
                    break;
                }
                auto& rows = blocks[problem.expert(source, token, k) % problem.local_experts()];
                if (rows.size() < static_cast<size_t>(problem.slots())) rows.push_back({source, token, k});
            }
        }
    }
    return blocks;
}

std::vector<char> choices_with_slot(const Problem& problem, int source, int token) {
    std::vector<char> result(problem.num_topk, 0);
    std::vector<int> taken(problem.num_experts, 0);
    for (int earlier = 0; earlier <= source; ++earlier) {
        const int num_tokens = earlier == source ? token + 1 : problem.ranks[earlier].num_tokens;
        for (int t = 0; t < num_tokens; ++t) {
            for (int k = 0; k < problem.num_topk; ++k) {
                if (problem.target_rank(earlier, t, k) < 0) continue;
                const int slot = taken[problem.expert(earlier, t, k)]++;
                if (earlier == source && t == token) result[k] = slot < problem.slots();
            }
        }
    }
    return result;
}

ArrivedRow arrived_row(const Problem& problem, RowSource row) {
    std::vector<std::byte> tokens = token_row(problem, row.source, row.token);
    if (recipe_of(problem.recipe).computes_scales()) return quantised(problem, tokens);
    return {std::move(tokens),
            problem.has_scales() ? scale_row(problem, row.source, row.token) : std::vector<std::byte>()};
}

int last_choice_of(const Problem& problem, RowSource row, int64_t expert) {
    for (int k = problem.num_topk - 1; k >= 0; --k) {
        if (problem.expert(row.source, row.token, k) == expert) return k;
    }
    return -1;
}

std::vector<int> local_experts_of(const Problem& problem, int target, RowSource row) {
    std::vector<int> experts;
    for (int expert = 0; expert < problem.local_experts(); ++expert) {
        if (last_choice_of(problem, row, int64_t{target} * problem.local_experts() + expert) >= 0)
            experts.push_back(expert);
    }
    return experts;
}

Metadata metadata_of(const Problem& problem, int target, RowSource row) {
    const size_t num_ids = problem.is_ht() && problem.expert_major() ? 0 : problem.num_topk;
    Metadata result{std::vector<int64_t>(num_ids, -1), std::vector<float>(num_weights(problem), 0.0f)};
    if (row.is_padding()) return result;
    const int64_t first = int64_t{target} * problem.local_experts();
    const auto shown = [&](int64_t id) { return problem.id_kind == NCCL_EP_EXPERT_ID_GLOBAL ? id : id - first; };
    const auto weight_for = [&](int64_t id) {
        return problem.weight(row.source, row.token, last_choice_of(problem, row, id));
    };
    if (!problem.is_ht()) {
        for (int k = 0; k < problem.num_topk; ++k) {
            result.weights[k] = problem.weight(row.source, row.token, k);
            if (problem.target_rank(row.source, row.token, k) != target) continue;
            result.ids[k] = shown(problem.expert(row.source, row.token, k));
        }
    } else if (problem.expert_major()) {
        result.weights[0] = weight_for(first + row.choice);
    } else {
        size_t at = 0;
        for (const int expert : local_experts_of(problem, target, row)) {
            result.ids[at] = shown(first + expert);
            result.weights[at++] = weight_for(first + expert);
        }
    }
    return result;
}

size_t scale_index(const Problem& problem, size_t row, size_t block) {
    if (!problem.asks_as_v1) return row * problem.num_scales + block;
    const auto slots = static_cast<size_t>(problem.slots());
    return (row / slots * problem.num_scales + block) * slots + row % slots;
}

}  // namespace crossdock::reference
