// SPDX-License-Identifier: Apache-2.0
#include "ht_problem.h"

#include <fmt/format.h>

#include <algorithm>

#include "formats.h"

namespace crossdock::reference {

size_t HtProblem::most_rows() const {
    const size_t tokens = static_cast<size_t>(num_ranks) * static_cast<size_t>(max_tokens);
    if (!expert_major()) return tokens;
    const auto local = static_cast<size_t>(local_experts());
    return tokens * std::min(static_cast<size_t>(num_topk), local) + local * (std::max<size_t>(alignment, 1) - 1);
}

size_t HtProblem::row_limit() const {
    if (budget != 0) return budget;
    const size_t tokens = static_cast<size_t>(num_ranks) * static_cast<size_t>(max_tokens);
    const size_t slack =
        expert_major() ? static_cast<size_t>(local_experts()) * (std::max<size_t>(alignment, 1) - 1) : 0;
    return tokens * static_cast<size_t>(std::max(group_topk, 1)) + slack;
}

std::string HtProblem::describe() const {
    std::string tokens;
    for (const RankInput& rank : ranks) tokens += fmt::format("{}{}", tokens.empty() ? "" : ",", rank.num_tokens);
    const std::string room = budget == 0 ? "eager" : fmt::format("budget {}{}", budget, drops ? " drop" : "");
    return fmt::format(
        "{} R {} E {} M {} K {} B [{}] ids {} {} alignment {} | dispatch {} H {}{} id kind {} | "
        "combine {} H {}{}",
        expert_major() ? "HT expert-major" : "HT flat", num_ranks, num_experts, max_tokens, num_topk, tokens,
        type_name(index_type), room, alignment, type_name(token_type), hidden,
        recipe == Recipe::kForward ? fmt::format(" S {} {}", num_scales, type_name(scale_type)) : "",
        static_cast<int>(id_kind), type_name(combine_type), combine_hidden,
        combine_recipe == NCCL_EP_COMB_QUANT_MXFP8 ? " MXFP8" : "");
}

std::vector<std::byte> expert_row(const HtProblem& problem, int target, const HtRow& row) {
    return expert_row(static_cast<const Problem&>(problem), target, RowSource{row.source, row.token, row.expert});
}

float weight_gradient(const HtProblem& problem, int target, int source, int token, int local_expert) {
    uint64_t bits = random_bits(problem.seed, 0x6AD);
    for (const int part : {target, source, token, local_expert}) bits = random_bits(bits, static_cast<uint64_t>(part));
    // Never 0, so that a value that was lost shows.
    return (static_cast<float>(bits >> 40) + 1.0f) * 0x1p-20f * ((bits & 1) != 0 ? -1.0f : 1.0f);
}

float weight_for(const Problem& problem, int source, int token, int64_t expert) {
    float weight = 0;
    for (int k = 0; k < problem.num_topk; ++k) {
        if (problem.expert(source, token, k) == expert) weight = problem.weight(source, token, k);
    }
    return weight;
}

}  // namespace crossdock::reference
