// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/random_problem.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>

#include "reference/formats.h"
#include "src/core/layouts.h"

namespace crossdock::testing {

using reference::RankInput;
using reference::type_bytes;

namespace {

std::vector<ncclEpLayout_t> layouts_in(ncclEpAlgorithm_t mode) {
    std::vector<ncclEpLayout_t> layouts;
    for (const Layout& layout : kLayouts) {
        if (layout.is_in(mode)) layouts.push_back(layout.value);
    }
    return layouts;
}

// How the tokens of a step choose their experts.
enum class Routing { kUniform, kZipf, kOneExpert, kNobody, kOneRank };

int64_t draw_expert(Routing routing, const Problem& problem, int favourite, Random& random) {
    switch (routing) {
        case Routing::kUniform:
            return random.below(problem.num_experts);
        case Routing::kZipf: {
            // Inverse of a continuous power law: a few experts get most.
            const double skewed = std::pow(problem.num_experts, random.unit()) - 1;
            return std::min<int64_t>(static_cast<int64_t>(skewed), problem.num_experts - 1);
        }
        case Routing::kOneExpert:
            return favourite;
        case Routing::kNobody:
            return -1;
        case Routing::kOneRank: {
            const int first = favourite / problem.local_experts() * problem.local_experts();
            return first + random.below(problem.local_experts());
        }
    }
    return -1;
}

void fill_routing(Problem& problem, Random& random, bool keep_counts) {
    const auto routing = random.pick({Routing::kUniform, Routing::kUniform, Routing::kUniform, Routing::kZipf,
                                      Routing::kZipf, Routing::kOneExpert, Routing::kNobody, Routing::kOneRank});
    const int favourite = random.below(problem.num_experts);
    const int dropped_percent = random.pick({0, 0, 10, 50});
    const bool distinct = random.chance(50) && routing == Routing::kUniform && problem.num_topk <= problem.num_experts;
    problem.ranks.resize(problem.num_ranks);
    for (RankInput& rank : problem.ranks) {
        if (!keep_counts) {
            rank.num_tokens = random.chance(15)   ? 0
                              : random.chance(40) ? problem.max_tokens
                                                  : random.between(0, problem.max_tokens);
        }
        rank.ids.assign(static_cast<size_t>(rank.num_tokens) * problem.num_topk, -1);
        rank.weights.resize(rank.ids.size());
        for (size_t i = 0; i < rank.ids.size(); ++i) {
            const size_t row_start = i / problem.num_topk * problem.num_topk;
            do {
                rank.ids[i] = draw_expert(routing, problem, favourite, random);
            } while (distinct && std::find(&rank.ids[row_start], &rank.ids[i], rank.ids[i]) != &rank.ids[i]);
            rank.weights[i] = static_cast<float>(random.unit() * 1.5 - 0.25);
        }
        for (int64_t& id : rank.ids) {
            if (!random.chance(dropped_percent)) continue;
            // Ids past the last expert are dropped like negative ones; both widths of integer have them.
            id = random.pick<int64_t>({-1, -1, -7, INT32_MIN, problem.num_experts, problem.num_experts + 5, INT32_MAX});
        }
    }
}

// Experts, K and ids.
void choose_shape(Problem& problem, const ProblemLimits& limits, Random& random) {
    // The first one, which is expert-major, in half of the problems.
    const std::vector<ncclEpLayout_t>& layouts = layouts_of(problem.algorithm);
    problem.layout = layouts[random.chance(50) ? 0 : 1 + problem.seed % (layouts.size() - 1)];
    // One expert per rank, a number that is no power of two, many.
    const int any_number = random.pick({1, 1, 2, 3, 4, 5, 7, 8, 16, 33, 70});
    problem.num_experts = (limits.local_experts > 0 ? limits.local_experts : any_number) * problem.num_ranks;
    problem.num_topk = std::min(problem.num_experts, random.pick({1, 2, 2, 3, 4, 6, 8, 8, 9, 17, 32, 64}));
    problem.index_type = random.pick({ncclInt32, ncclInt64});
    problem.id_kind = random.pick({NCCL_EP_EXPERT_ID_AUTO, NCCL_EP_EXPERT_ID_LOCAL, NCCL_EP_EXPERT_ID_GLOBAL});
}

// In units of 16 bytes: mostly few, some rows at the limit.
size_t random_row_units(size_t most_units, Random& random) {
    if (random.chance(10)) return most_units;
    return 1 + static_cast<size_t>(std::pow(static_cast<double>(most_units), random.unit())) % most_units;
}

void choose_ll_recipe(Problem& problem, Random& random) {
    const int kind = random.below(10);
    if (kind < 5) return;
    if (kind < 7) {
        problem.recipe = NCCL_EP_DISP_QUANT_FWD;
    } else if (kind == 9 && problem.expert_major()) {
        problem.recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
        problem.asks_as_v1 = true;
    } else {
        const std::vector<DispatchRecipe> recipes = quantising_dispatches();
        problem.recipe = recipes[problem.seed % recipes.size()].value;
    }
}

void choose_dispatch(Problem& problem, const ProblemLimits& limits, Random& random) {
    if (!problem.is_ht() && limits.scales) choose_ll_recipe(problem, random);
    problem.token_type =
        random.pick({ncclBfloat16, ncclBfloat16, ncclFloat16, ncclFloat32, ncclUint8, ncclInt8, ncclFloat8e4m3});
    const size_t units = random_row_units(limits.most_row_bytes / 16, random);
    if (problem.is_ht() && random.chance(35)) problem.recipe = NCCL_EP_DISP_QUANT_FWD;
    if (problem.recipe == NCCL_EP_DISP_QUANT_FWD) {
        problem.token_type =
            problem.is_ht()
                ? random.pick(
                      {ncclBfloat16, ncclFloat16, ncclFloat32, ncclFloat8e4m3, ncclFloat8e5m2, ncclFloat4x2, ncclUint8})
                : random.pick({ncclBfloat16, ncclFloat32, ncclFloat8e4m3, ncclFloat8e5m2, ncclFloat4x2, ncclUint8});
        problem.scale_type =
            random.pick({ncclFloat32, ncclFloat16, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclUint8});
        problem.num_scales = 16 * static_cast<size_t>(random.between(1, 5)) / type_bytes(problem.scale_type);
    }
    problem.hidden = units * 16 / type_bytes(problem.token_type);
    if (const DispatchRecipe& recipe = recipe_of(problem.recipe); recipe.computes_scales()) {
        problem.token_type = recipe.token_type;
        const size_t block = recipe.scale_block;
        problem.hidden = std::max<size_t>(1, units * 16 / (2 * block)) * block;
        problem.scale_type = recipe.scale_type;
        problem.num_scales = problem.hidden / block;
        problem.round_scales = random.chance(50);
    }
}

void choose_combine(Problem& problem, const ProblemLimits& limits, Random& random) {
    problem.combine_type = random.pick({ncclBfloat16, ncclBfloat16, ncclFloat16, ncclFloat32});
    const size_t combine_bytes = random.chance(60) ? std::max<size_t>(16, problem.token_row_bytes())
                                                   : 16 * (1 + random.bits() % (limits.most_row_bytes / 16));
    problem.combine_hidden = combine_bytes / type_bytes(problem.combine_type);
    const std::vector<CombineRecipe> recipes = quantising_combines(problem.algorithm, problem.expert_major());
    if (limits.quantised_combines && !recipes.empty() && random.chance(problem.is_ht() ? 30 : 15)) {
        const CombineRecipe& recipe = recipes[problem.seed % recipes.size()];
        problem.combine_recipe = recipe.value;
        problem.combine_type = ncclBfloat16;
        const size_t multiple = recipe.row_multiple;
        problem.combine_hidden = std::max<size_t>(1, combine_bytes / (2 * multiple)) * multiple;
    }
    problem.values = random.chance(30) ? reference::Values::kWide : reference::Values::kModerate;
    const bool may_sum_at_sender =
        !problem.is_ht() && problem.expert_major() && problem.combine_recipe == NCCL_EP_COMB_QUANT_NONE;
    if (may_sum_at_sender && random.chance(25)) problem.sums = CROSSDOCK_SUMS_SENDER;
}

// Zones' alignment and the number of tokens, so that the receive tensor keeps within its limit.
void choose_numbers(Problem& problem, const ProblemLimits& limits, Random& random) {
    const auto local_experts = static_cast<size_t>(problem.local_experts());
    const size_t widest =
        std::max({problem.received_row_bytes() + problem.scale_row_bytes(), problem.combine_row_bytes(), size_t{16}});
    const size_t fitting = std::max<size_t>(2, limits.most_receive_bytes / widest);
    if (problem.is_ht()) problem.alignment = random.pick<size_t>({0, 1, 1, 2, 4, 16, 128});
    while (problem.alignment > 1 && problem.alignment * local_experts > fitting / 2) problem.alignment /= 2;
    const size_t rows_of_rank = !problem.expert_major() ? 1
                                : problem.is_ht()       ? std::min(local_experts, static_cast<size_t>(problem.num_topk))
                                                        : local_experts;
    const size_t rows_a_token = static_cast<size_t>(problem.num_ranks) * rows_of_rank;
    const size_t tokens = std::clamp<size_t>(fitting / rows_a_token, 1, static_cast<size_t>(limits.most_tokens));
    problem.max_tokens = random.between(1, static_cast<int>(tokens));
}

}  // namespace

const std::vector<ncclEpLayout_t> kLlLayouts = layouts_in(kLowLatency);
const std::vector<ncclEpLayout_t> kHtLayouts = layouts_in(kHighThroughput);

std::vector<DispatchRecipe> quantising_dispatches() {
    std::vector<DispatchRecipe> recipes;
    std::ranges::copy_if(kDispatchRecipes, std::back_inserter(recipes), &DispatchRecipe::computes_scales);
    return recipes;
}

std::vector<CombineRecipe> quantising_combines(ncclEpAlgorithm_t mode, bool is_expert_major) {
    std::vector<CombineRecipe> recipes;
    std::ranges::copy_if(kCombineRecipes, std::back_inserter(recipes), [=](const CombineRecipe& recipe) {
        return recipe.is_in(mode) && recipe.quantises() && (is_expert_major || !recipe.needs_expert_major);
    });
    return recipes;
}

bool can_be_invariant(const Problem& problem) {
    return problem.expert_major() && problem.sums == CROSSDOCK_SUMS_EXACT &&
           (!problem.is_ht() || problem.combine_recipe == NCCL_EP_COMB_QUANT_NONE);
}

Problem random_problem(uint64_t seed, const ProblemLimits& limits) {
    Random random(seed);
    Problem problem{.algorithm = limits.algorithm, .seed = seed, .num_ranks = limits.num_ranks};
    choose_shape(problem, limits, random);
    choose_dispatch(problem, limits, random);
    choose_combine(problem, limits, random);
    choose_numbers(problem, limits, random);
    problem.invariant =
        limits.invariant_groups && can_be_invariant(problem) && reference::random_bits(seed, 9) % 3 == 0;
    if (problem.is_ht()) {
        choose_budget(problem, limits.room, random.bits());
        return rerouted(problem, seed);
    }
    fill_routing(problem, random, false);
    return problem;
}

void choose_budget(Problem& problem, Room room, uint64_t seed) {
    Random random(seed);
    if (room == Room::kAny) room = random.pick({Room::kEnough, Room::kDropping, Room::kEager});
    const size_t least = static_cast<size_t>(problem.max_tokens);
    const size_t most = std::max(problem.most_rows(), least);
    problem.drops = room == Room::kDropping;
    problem.budget = 0;
    if (room == Room::kEnough) problem.budget = most + static_cast<size_t>(random.pick({0, 0, 1, 5}));
    if (room == Room::kDropping) problem.budget = least + random.bits() % (most - least + 1);
    const bool needs_topk = room == Room::kEager && problem.expert_major();
    problem.group_topk = needs_topk || random.chance(30) ? random.between(problem.num_topk, problem.num_experts) : 0;
}

Problem rerouted(const Problem& problem, uint64_t seed, bool keep_counts) {
    Random random(seed);
    Problem result = problem;
    result.seed = seed;
    fill_routing(result, random, keep_counts);
    return result;
}

void set_mode(Problem& problem, ncclEpAlgorithm_t algorithm) {
    problem.algorithm = algorithm;
    if (!problem.is_ht()) return;
    problem.alignment = problem.expert_major() ? 4 : 1;
    problem.budget = problem.most_rows();
}

Problem plain_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed, ncclEpAlgorithm_t algorithm) {
    Problem problem;
    problem.num_ranks = num_ranks;
    problem.num_experts = 3 * num_ranks;
    problem.max_tokens = 9;
    problem.num_topk = 3;
    problem.hidden = problem.combine_hidden = 128;
    problem.layout = layout;
    set_mode(problem, algorithm);
    return rerouted(problem, seed);
}

}  // namespace crossdock::testing
