// SPDX-License-Identifier: Apache-2.0
// The receive budget at its edges: fixed, eager, dropping, and too small.
#include <gtest/gtest.h>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

// Rank `target` receives `count` rows (before padding), which come from all ranks in turn; every rank has all its
// tokens. The second choice of every other token is another local expert of the same rank.
Problem aimed_problem(int num_ranks, ncclEpLayout_t layout, int target, int count) {
    Problem problem = plain_problem(num_ranks, layout, 1, kHighThroughput);
    problem.num_topk = 2;
    problem.hidden = problem.combine_hidden = 16;
    problem.ranks.assign(num_ranks, {});
    const int64_t first = int64_t{target} * problem.local_experts();
    int left = count;
    for (reference::RankInput& rank : problem.ranks) {
        rank.num_tokens = problem.max_tokens;
        rank.ids.assign(static_cast<size_t>(rank.num_tokens) * 2, -1);
        rank.weights.assign(rank.ids.size(), 0.5f);
    }
    for (int token = 0; token < problem.max_tokens; ++token) {
        for (reference::RankInput& rank : problem.ranks) {
            int64_t* ids = &rank.ids[static_cast<size_t>(token) * 2];
            const bool twice = token % 2 == 1 && (!problem.expert_major() || left >= 2);
            if (left > 0) {
                ids[0] = first + token % problem.local_experts();
                if (twice) ids[1] = first + (token + 1) % problem.local_experts();
                left -= twice && problem.expert_major() ? 2 : 1;
            } else {
                ids[1] = (first + problem.local_experts()) % problem.num_experts;  // the next rank gets the rest
            }
        }
    }
    return problem;
}

void leave_others_empty(Problem& problem, int target) {
    for (reference::RankInput& rank : problem.ranks) {
        for (int64_t& id : rank.ids) {
            if (id / problem.local_experts() != target) id = -1;
        }
    }
}

// The total of rank `target` before dropping.
size_t total_of(const Problem& problem, int target) { return HtRouting(problem).received(target).total; }

TEST(HtBudget, RowsUpToTheBudgetArrive) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const int last = context.num_ranks() - 1;
                for (const int count : {10, 11, 12, 13}) {
                    Problem problem = aimed_problem(context.num_ranks(), layout, last, count);
                    // One row less than the budget, and as many.
                    for (const size_t spare : {1, 0}) {
                        size_t most = 0;
                        for (int rank = 0; rank <= last; ++rank) most = std::max(most, total_of(problem, rank));
                        problem.budget = most + spare;
                        Group group(context, problem);
                        Layer layer(context, group.get(), problem, {.extra_rows = 3, .extra_metadata_rows = 2});
                        layer.round_trip();
                    }
                }
            });
        }
    });
}

TEST(HtBudget, WhatDoesNotFitIsDroppedInOrder) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Problem base = aimed_problem(context.num_ranks(), layout, 0, 15);
                // Every budget from the smallest one to one that has room for everything.
                for (size_t budget = 9; budget < total_of(base, 0) + 3; ++budget) {
                    Problem problem = base;
                    problem.drops = true;
                    problem.budget = budget;
                    Group group(context, problem);
                    Layer layer(context, group.get(), problem, {.extra_rows = 3, .extra_metadata_rows = 2});
                    layer.round_trip();
                    layer.route(rerouted(problem, budget));
                    layer.round_trip();
                    layer.route(problem);
                    layer.round_trip();
                }
            });
        }
    });
}

// More tokens come than the budget has rows, and the last ones go to the first zone: every row that is counted holds
// its own token and weight, however many tokens come before it, and its sum returns. The data path that the environment
// asks for makes no difference.
TEST(HtBudget, EveryCountedRowHasArrived) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const char* const path : {"", "NCCL_EP_HT_EM_LOCAL_DUP", "NCCL_EP_HT_EM_NVLINK_DUP"}) {
            if (*path != '\0') setenv(path, "1", 1);
            for (const size_t alignment : {1, 4}) {
                expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                    Problem problem =
                        plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 1, kHighThroughput);
                    problem.num_topk = 2;
                    problem.alignment = alignment;
                    problem.ranks.assign(context.num_ranks(), {});
                    const int tokens = context.num_ranks() * problem.max_tokens;
                    const int late = tokens - 3;
                    for (int rank = 0; rank < context.num_ranks(); ++rank) {
                        reference::RankInput& own = problem.ranks[rank];
                        own.num_tokens = problem.max_tokens;
                        for (int token = 0; token < problem.max_tokens; ++token) {
                            const bool is_late = rank * problem.max_tokens + token >= late;
                            own.ids.insert(own.ids.end(), {is_late ? 0 : 1, -1});
                            own.weights.insert(own.weights.end(), {0.25f + static_cast<float>(token), 0.5f});
                        }
                    }
                    problem.drops = true;
                    problem.budget = static_cast<size_t>(std::max(problem.max_tokens, tokens - 5));
                    Group group(context, problem);
                    Layer layer(context, group.get(), problem, {.extra_rows = 3, .extra_metadata_rows = 2});
                    layer.round_trip();
                });
            }
            if (*path != '\0') unsetenv(path);
        }
    });
}

// One zone's padding alone exceeds the budget.
TEST(HtBudget, AlignmentsMayExceedTheBudget) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            for (const size_t alignment : {16, 64, 4096}) {
                Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 2, kHighThroughput);
                problem.alignment = alignment;
                problem.budget = 15;
                problem.drops = true;
                Group group(context, problem);
                Layer layer(context, group.get(), problem, {.extra_rows = 1, .extra_metadata_rows = 1});
                layer.round_trip();
                layer.route(rerouted(problem, alignment));
                layer.round_trip();
            }
        });
    });
}

// Nothing is left for some expert, some token, or some rank.
TEST(HtBudget, RandomRoutingsAreDroppedInOrder) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        const Seeds seeds = seeds_or(30'001, seeds_in(spec.kind, 40));
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
            const int num_ranks = ranks_or(1 + static_cast<int>(reference::random_bits(seed, 7) % 4));
            const Problem problem = random_problem(
                seed,
                {.algorithm = kHighThroughput, .num_ranks = num_ranks, .most_row_bytes = 256, .room = Room::kDropping});
            SCOPED_TRACE(problem.describe());
            expect_clean(spec, num_ranks, seed, [=](RankContext& context) {
                Group group(context, problem);
                Layer layer(context, group.get(), problem, {.extra_rows = 1, .extra_metadata_rows = 1});
                for (uint64_t step = 0; step < 4; ++step) {
                    layer.round_trip();
                    layer.route(rerouted(problem, seed * 10 + step));
                }
                layer.round_trip();
            });
        }
    });
}

// Receive tensors are sized after each update: exactly, with room to spare, and empty where nothing comes.
TEST(HtBudget, EagerTensorsHaveTheRowsThatCome) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const size_t spare : {0, 1, 6}) {
                expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                    Problem problem = plain_problem(context.num_ranks(), layout, 1, kHighThroughput);
                    problem.budget = 0;
                    problem.group_topk = problem.num_topk;
                    Group group(context, problem);
                    Layer layer(context, group.get(), problem, {.extra_rows = spare, .extra_metadata_rows = spare});
                    for (int count = 0; count < 9; ++count) {
                        // Only the first rank receives anything, then only the last one.
                        for (const int target : {0, context.num_ranks() - 1}) {
                            Problem next = problem;
                            next.ranks = aimed_problem(context.num_ranks(), layout, target, count).ranks;
                            for (reference::RankInput& rank : next.ranks) {
                                std::vector<int64_t> ids;
                                for (size_t i = 0; i < rank.ids.size(); i += 2) {
                                    const bool aimed = rank.ids[i] >= 0;
                                    ids.push_back(rank.ids[i]);
                                    ids.push_back(aimed ? rank.ids[i + 1] : -1);
                                    ids.push_back(-1);
                                }
                                rank.ids = ids;
                                rank.weights.assign(ids.size(), 0.25f);
                            }
                            layer.route(next);
                            layer.round_trip();
                        }
                    }
                });
            }
        }
    });
}

// Without DROP: every rank is told, with total and budget; nothing is written out of bounds; the group stays failed,
// and can be destroyed.
TEST(HtBudget, TooManyRowsFailTheGroup) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const ncclEpOverflowPolicy_t policy : {NCCL_EP_OVERFLOW_AUTO, NCCL_EP_OVERFLOW_TRAP}) {
                expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                    const int target = context.num_ranks() - 1;
                    Problem problem = aimed_problem(context.num_ranks(), layout, target, 12);
                    Problem fitting = aimed_problem(context.num_ranks(), layout, target, 2);
                    for (Problem* one : {&problem, &fitting}) leave_others_empty(*one, target);
                    const size_t total = total_of(problem, target);
                    fitting.budget = problem.budget = total - 1;
                    ncclEpGroupConfig_t config = group_config_for(context, problem);
                    config.overflow_policy = policy;
                    Group group(context, context.comm(), config);
                    Layer layer(context, group.get(), fitting);
                    layer.round_trip();
                    layer.refill(problem);
                    layer.prepare_update();
                    layer.prepare_dispatch();
                    layer.prepare_combine();
                    const ncclResult_t updated = layer.update();
                    context.synchronize(layer.stream());
                    RANK_CHECK(context, updated != ncclSuccess || context.is_gpu(), "the update of {} rows succeeded",
                               total);
                    for (int call = 0; call < 4; ++call) {
                        ncclEpGetVersion(nullptr);
                        const ncclResult_t result = call == 0   ? layer.dispatch()
                                                    : call == 1 ? layer.combine()
                                                    : call == 2 ? layer.update()
                                                                : layer.dispatch(NCCL_EP_BWD_PASS);
                        const std::string message = crossdockGetLastError();
                        RANK_CHECK(context, result != ncclSuccess, "call {} after an overflow succeeded", call);
                        for (const size_t number : {total, total - 1}) {
                            RANK_CHECK(context, message.find(std::to_string(number)) != std::string::npos,
                                       "call {}: \"{}\" does not say {}", call, message, number);
                        }
                    }
                    layer.check_nothing_was_written();
                });
            }
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
