// SPDX-License-Identifier: Apache-2.0
#include "conformance/ht/random_problem.h"

#include <algorithm>

#include "reference/formats.h"

namespace crossdock::testing {

using reference::Recipe;
using reference::type_bytes;

namespace {

void choose_types(HtProblem& problem, const HtLimits& limits, Random& random) {
    problem.token_type =
        random.pick({ncclBfloat16, ncclBfloat16, ncclFloat16, ncclFloat32, ncclUint8, ncclInt8, ncclFloat8e4m3});
    const size_t most_units = limits.most_row_bytes / 16;
    const size_t units = random_row_units(most_units, random);
    if (random.chance(35)) {
        problem.recipe = Recipe::kForward;
        problem.token_type = random.pick(
            {ncclBfloat16, ncclFloat16, ncclFloat32, ncclFloat8e4m3, ncclFloat8e5m2, ncclFloat4x2, ncclUint8});
        problem.scale_type =
            random.pick({ncclFloat32, ncclFloat16, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclUint8});
        problem.num_scales = 16 * static_cast<size_t>(random.between(1, 5)) / type_bytes(problem.scale_type);
    }
    problem.hidden = units * 16 / type_bytes(problem.token_type);
    problem.combine_type = random.pick({ncclBfloat16, ncclBfloat16, ncclFloat16, ncclFloat32});
    const size_t combine_bytes = random.chance(60) ? problem.token_row_bytes() : 16 * (1 + random.bits() % most_units);
    problem.combine_hidden = combine_bytes / type_bytes(problem.combine_type);
    if (limits.mxfp8 && problem.expert_major() && random.chance(30)) {
        problem.combine_recipe = NCCL_EP_COMB_QUANT_MXFP8;
        problem.combine_type = ncclBfloat16;
        problem.combine_hidden = std::max<size_t>(1, combine_bytes / 64) * 32;
    }
    problem.values = random.chance(30) ? reference::Values::kWide : reference::Values::kModerate;
}

}  // namespace

HtProblem random_ht_problem(uint64_t seed, const HtLimits& limits) {
    Random random(seed);
    HtProblem problem{random_shape(seed, limits.num_ranks, limits.local_experts, NCCL_EP_LAYOUT_FLAT, random)};
    const int local_experts = problem.local_experts();
    choose_types(problem, limits, random);

    const size_t widest =
        std::max({problem.received_row_bytes() + problem.scale_row_bytes(), problem.combine_row_bytes(), size_t{16}});
    const size_t fitting = std::max<size_t>(2, limits.most_receive_bytes / widest);
    problem.alignment = random.pick<size_t>({0, 1, 1, 2, 4, 16, 128});
    while (problem.alignment > 1 && problem.alignment * static_cast<size_t>(local_experts) > fitting / 2)
        problem.alignment /= 2;
    const size_t rows_a_token =
        static_cast<size_t>(problem.num_ranks) *
        static_cast<size_t>(problem.expert_major() ? std::min(local_experts, problem.num_topk) : 1);
    const size_t tokens = std::clamp<size_t>(fitting / rows_a_token, 1, static_cast<size_t>(limits.most_tokens));
    problem.max_tokens = random.between(1, static_cast<int>(tokens));
    choose_budget(problem, limits.room, random.bits());
    return rerouted(problem, seed);
}

void choose_budget(HtProblem& problem, Room room, uint64_t seed) {
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

HtProblem rerouted(const HtProblem& problem, uint64_t seed, bool keep_counts) {
    HtProblem result = problem;
    static_cast<Problem&>(result) = rerouted(static_cast<const Problem&>(problem), seed, keep_counts);
    return result;
}

HtOptions random_ht_options(uint64_t seed, WindowArena* arena) {
    Random random(seed ^ 0x5EED);
    HtOptions options;
    options.create_in_one_call = random.chance(30);
    options.own_handle_memory = !options.create_in_one_call && random.chance(40);
    options.in_place = random.chance(30);
    options.null_configs = random.chance(50);
    options.ask_counters = random.chance(70);
    options.ask_offsets = random.chance(70);
    options.ask_total = random.chance(70);
    options.counter_type = random.pick({ncclInt32, ncclInt64});
    options.dispatch_counters = random.chance(30);
    options.extra_rows = static_cast<size_t>(random.pick({0, 0, 0, 1, 7}));
    options.extra_metadata_rows = static_cast<size_t>(random.pick({0, 0, 0, 1, 7}));
    options.exact_combine_rows = random.chance(40);
    if (arena == nullptr) return options;
    options.arena = arena;
    options.naming = random.pick({Naming::kWindowOnly, Naming::kWindowAndData});
    options.output_windows = random.chance(70);
    options.combine_windows = random.chance(70);
    options.other_windows = random.chance(30);
    return options;
}

HtProblem plain_ht_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed) {
    HtProblem problem{plain_problem(num_ranks, layout, seed)};
    problem.alignment = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? 4 : 1;
    problem.budget = problem.most_rows();
    return problem;
}

}  // namespace crossdock::testing
