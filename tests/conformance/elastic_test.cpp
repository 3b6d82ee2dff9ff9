// SPDX-License-Identifier: Apache-2.0
// Elastic operations of both modes: what is written and what is added up, against plain loops, bit for bit.
#include <chrono>

#include "conformance/support/bad_call.h"
#include "conformance/support/elastic.h"
#include "conformance/support/fault_support.h"
#include "conformance/support/modes.h"

namespace crossdock::testing {
namespace {

ElasticShape shape_of(ncclEpAlgorithm_t mode, uint64_t seed, int most_ranks) {
    const int ranks = 1 + static_cast<int>(reference::random_bits(seed, 7) % static_cast<uint64_t>(most_ranks));
    return random_elastic_shape(mode, seed, ranks_or(ranks));
}

TEST_BOTH_MODES(Elastic, RandomOperationsMatchPlainLoops) {
    on_each_elastic_backend(mode, kEveryBackend, [=](const BackendSpec& spec) {
        const Seeds seeds = seeds_or(1, seeds_in(spec.kind, 100));
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
            const ElasticShape shape = shape_of(mode, seed, 8);
            SCOPED_TRACE(shape.describe());
            expect_clean(spec, shape.num_ranks, seed, random_elastic_operations(shape, 12));
        }
    });
}

// Results do not depend on the schedule.
TEST_BOTH_MODES(Elastic, EverySeedGivesTheSameBits) {
    on_each_elastic_backend(mode, {Backend::kSimulation}, [=](const BackendSpec& spec) {
        const ElasticShape shape = shape_of(mode, 3, 4);
        const RunReport first = expect_clean(spec, shape.num_ranks, 1, random_elastic_operations(shape, 12));
        for (uint64_t seed = 2; seed <= 10; ++seed) {
            EXPECT_EQ(expect_clean(spec, shape.num_ranks, seed, random_elastic_operations(shape, 12)).digests,
                      first.digests);
        }
    });
}

// Flags before data, and senders without credit, show within so many seeds.
TEST_BOTH_MODES(Elastic, APlantedFaultIsCaught) {
    on_each_elastic_backend(mode, {Backend::kSimulation}, [=](const BackendSpec& backend) {
        for (const cpu::Fault fault : {cpu::Fault::kSkipStoreWait, cpu::Fault::kReuseSlot}) {
            SCOPED_TRACE(static_cast<int>(fault));
            expect_fault_is_caught(backend, 200, "", [=](BackendSpec spec) {
                spec.fault = fault;
                const ElasticShape shape = random_elastic_shape(mode, spec.simulation.seed, ranks_or(3));
                return run_ranks(spec, shape.num_ranks, random_elastic_operations(shape, 12));
            });
        }
    });
}

// If a rank writes garbage into the others' memory, calls still end, and write only their outputs.
TEST_BOTH_MODES(Elastic, SurvivesGarbage) {
    on_each_elastic_backend(mode, {Backend::kSimulation}, [=](const BackendSpec& backend) {
        const Seeds seeds = seeds_or(1, 200);
        uint64_t clean = 0;
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
            const ElasticShape shape = shape_of(mode, seed, 4);
            clean += survives_garbage(backend, shape.num_ranks, seed, random_elastic_operations(shape, 10)) ? 1 : 0;
        }
        EXPECT_TRUE(clean < seeds.count || seeds.count < 50) << "no rank saw garbage";
    });
}

// A handle, and a handle's dispatch, that the tests below begin with: every token goes to two experts of each rank.
std::vector<std::vector<int64_t>> to_everybody(const ElasticShape& shape) {
    std::vector<int64_t> ids;
    for (int token = 0; token < shape.max_tokens; ++token) {
        for (int k = 0; k < shape.topk; ++k) ids.push_back(k * shape.local_experts / 2);
    }
    return std::vector<std::vector<int64_t>>(static_cast<size_t>(shape.num_ranks), ids);
}

ElasticShape shape_to_everybody(ncclEpAlgorithm_t mode, int num_ranks) {
    return {.mode = mode,
            .seed = 5,
            .num_ranks = num_ranks,
            .local_experts = 4,
            .topk = 2 * num_ranks,
            .max_tokens = 5,
            .most_granules = 8,
            .most_scales = 8,
            .alignment = 2};
}

// Whose combines differ; an invariant group combines no rows by rank.
struct Combined {
    bool by_expert, invariant;
};
constexpr Combined kEveryCombine[] = {{false, false}, {true, false}, {true, true}};

// Killed at any step: the others end, and say who it was.
TEST_BOTH_MODES(Elastic, ARankKilledAtAnyStepIsNamed) {
    on_each_elastic_backend(mode, {Backend::kSimulation}, [=](const BackendSpec& backend) {
        constexpr int kDead = 1;
        const int num_ranks = lsa_team_for(4) == 0 ? 3 : 4;
        for (const Combined combined : kEveryCombine) {
            LostRanks lost_ranks;
            const RankProgram program = [&](RankContext& context) {
                ElasticShape shape = shape_to_everybody(mode, num_ranks);
                shape.peers_may_die = true;
                const bool dead = context.rank() == kDead;
                const ncclEpGroupConfig_t config = elastic_config(context, shape, 1'000'000);
                ncclEpGroup_t made = nullptr;
                shape.invariant = combined.invariant;
                if (create_group(context, &made, context.comm(), &config, shape.invariant) != ncclSuccess) return;
                const OwnedGroup group(made);
                ElasticHandle handle(context, group.get(), shape, combined.by_expert, 9);
                handle.route(to_everybody(shape));
                for (uint64_t step = 0; step < 4; ++step) {
                    std::optional<ElasticDispatchCall> dispatch;
                    std::optional<ElasticCombineCall> combine;
                    ncclResult_t result = handle.update();
                    if (result == ncclSuccess) result = dispatch.emplace(context, handle, step).run();
                    if (result == ncclSuccess) result = combine.emplace(context, handle, step).run();
                    if (result == ncclSuccess && !dead) {
                        dispatch->check();
                        combine->check();
                    }
                    if (result == ncclSuccess) continue;
                    RANK_CHECK(context, dead || result == ncclRemoteError, "{}: {}", result_name(result),
                               crossdockGetLastError());
                    if (!dead) lost_ranks.note(context.rank(), diagnosed_peer(context, group.get()));
                    return;
                }
            };
            const auto look = [&](std::vector<std::string>& failures) {
                const std::string complaint = is_ht(mode) ? lost_ranks.complaint_about_names(num_ranks, kDead, false)
                                                          : lost_ranks.complaint(num_ranks, kDead, false);
                if (!complaint.empty()) failures.push_back(complaint);
                lost_ranks.clear();
            };
            harm_at_many_steps(backend, Harm::kKill, num_ranks, kDead, seeds_or(0, 200), program, look);
        }
    });
}

// What one rank passes otherwise, and how high throughput calls it.
struct ElasticDifference {
    bool is_combine;
    ElasticForm common, odd;
    const char* words;
};
const ElasticDifference kElasticDifferences[] = {
    {false, {.weights = true}, {.weights = false}, "whether topk_weights travel is "},
    {false, {.scales = 3}, {.scales = 4}, "the scales of a row is "},
    {false, {.scales = 3}, {.scales = 0}, "the scales of a row is "},
    {false, {.granules = 4}, {.granules = 5}, "the bytes of a row is "},
    {false, {.type = ncclFloat16}, {.type = ncclBfloat16}, "the datatype of the tokens is "},
    {false, {.tag = 16}, {.tag = 1023}, "the tag (crossdockHandleSetTag) is "},
    {true, {.tag = 0}, {.tag = 15}, "the tag (crossdockHandleSetTag) is "},
    {true, {.weights = true}, {.weights = false}, "whether topk_weights travel is "},
    {true, {.granules = 4}, {.granules = 5}, "the bytes of a row is "},
    {true, {.type = ncclFloat16}, {.type = ncclBfloat16}, "the datatype of the tokens is "},
};

// Where the tokens go whose ranks differ: a rank learns of it also from peers that it neither sends to nor hears of.
enum class Routes { kToEverybody, kNowhereOnOneRank, kToThemselves };

std::vector<std::vector<int64_t>> ids_of(Routes routes, const ElasticShape& shape) {
    std::vector<std::vector<int64_t>> ids = to_everybody(shape);
    if (routes == Routes::kNowhereOnOneRank) std::fill(ids.back().begin(), ids.back().end(), -1);
    if (routes == Routes::kToThemselves) {
        for (size_t rank = 0; rank < ids.size(); ++rank) {
            for (int64_t& id : ids[rank]) {
                id = static_cast<int64_t>(rank) * shape.local_experts + id % shape.local_experts;
            }
        }
    }
    return ids;
}

constexpr std::pair<Routes, Combined> kRoutesAndCombines[] = {
    {Routes::kToEverybody, {false, false}},     {Routes::kToEverybody, {true, false}},
    {Routes::kToEverybody, {true, true}},       {Routes::kNowhereOnOneRank, {false, false}},
    {Routes::kNowhereOnOneRank, {true, false}}, {Routes::kToThemselves, {false, false}},
    {Routes::kToThemselves, {true, false}}};

// Every rank learns at once what differs.
TEST_BOTH_MODES(Elastic, RanksThatDifferLearnIt) {
    on_each_elastic_backend(mode, kEveryBackend, [=](const BackendSpec& spec) {
        for (const ElasticDifference& difference : kElasticDifferences) {
            for (const auto& [each_routes, each_combined] : kRoutesAndCombines) {
                const Routes routes = each_routes;  // clang 14 captures no structured bindings
                const Combined combined = each_combined;
                expect_clean(spec, ranks_or(4), std::nullopt, [&](RankContext& context) {
                    const ElasticShape shape = shape_to_everybody(mode, context.num_ranks());
                    Group group(context, context.comm(), elastic_config(context, shape), combined.invariant);
                    ElasticHandle handle(context, group.get(), shape, combined.by_expert, 3);
                    handle.route(ids_of(routes, shape));
                    RANK_OK(context, handle.update());
                    handle.dispatch(0);
                    context.barrier();
                    const bool is_odd = context.rank() == 1;
                    const ElasticForm& form = is_odd ? difference.odd : difference.common;
                    const auto begin = std::chrono::steady_clock::now();
                    std::optional<ElasticDispatchCall> dispatch;
                    std::optional<ElasticCombineCall> combine;
                    const auto run = [&] { return difference.is_combine ? combine->run() : dispatch->run(); };
                    difference.is_combine ? void(combine.emplace(context, handle, 1, form))
                                          : void(dispatch.emplace(context, handle, 1, form));
                    // GPUs that need nothing of each other in a combine of LL, and enter it in the same microsecond,
                    // see neither's entry. So there the odd one is last. HT waits for every entry.
                    const bool in_turn = context.is_gpu() && mode == kLowLatency && difference.is_combine &&
                                         routes == Routes::kToThemselves;
                    if (in_turn && is_odd) context.barrier();
                    run();
                    context.synchronize(handle.stream());
                    if (in_turn && !is_odd) context.barrier();
                    if (difference.is_combine) {
                        // Who came first, and needs nothing of those that differ, learns it in its next operation.
                        ElasticDispatchCall(context, handle, 2).run();
                        context.synchronize(handle.stream());
                    }
                    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
                    RANK_CHECK(context, elapsed.count() < 30, "the error took {} s", elapsed.count());
                    const ncclResult_t result = run();
                    const std::string message = crossdockGetLastError();
                    RANK_CHECK(context, result == ncclInvalidUsage, "{}: \"{}\"", result_name(result), message);
                    RANK_CHECK(context, message.find("on rank 1") != std::string::npos, "\"{}\"", message);
                    RANK_CHECK(context, message.find(difference.words) != std::string::npos, "\"{}\" lacks \"{}\"",
                               message, difference.words);
                    context.barrier();
                });
            }
        }
    });
}

// Ranks that call different groups, or handles with different memory, wait for each other. Once a wait has expired,
// each learns where the other one is and what differs.
TEST_BOTH_MODES(Elastic, RanksInDifferentGroupsLearnIt) {
    enum class Apart { kExperts, kLayout, kMemory };
    on_each_backend_as_one_team(kEveryBackend, [=](const BackendSpec& spec) {
        for (const Apart apart : {Apart::kExperts, Apart::kLayout, Apart::kMemory}) {
            if (apart == Apart::kMemory && is_ht(mode)) continue;
            expect_clean(spec, ranks_or(3), std::nullopt, [&](RankContext& context) {
                constexpr uint64_t kTimeoutNs = 2'000'000'000;
                ElasticShape shape = shape_to_everybody(mode, context.num_ranks()), other = shape;
                if (apart == Apart::kExperts) other.local_experts *= 2;
                if (apart == Apart::kMemory) shape.topk /= 2;
                Group group(context, context.comm(), elastic_config(context, shape, kTimeoutNs));
                Group second(context, context.comm(), elastic_config(context, other, kTimeoutNs));
                ncclEpGroup_t const others = apart == Apart::kMemory ? group.get() : second.get();
                ElasticHandle usual(context, group.get(), shape, false, 3);
                ElasticHandle odd(context, others, other, apart == Apart::kLayout, 4);
                for (ElasticHandle* handle : {&usual, &odd}) {
                    handle->route(to_everybody(handle->shape()));
                    RANK_OK(context, handle->update());
                    handle->dispatch(0);
                }
                context.barrier();
                const bool is_odd = context.rank() == 1;
                ElasticHandle& handle = is_odd ? odd : usual;
                ElasticDispatchCall dispatch(context, handle, 1);
                const auto run = [&] { return is_ht(mode) ? handle.update() : dispatch.run(); };
                run();
                context.synchronize(handle.stream());
                const ncclResult_t result = run();
                const std::string message = crossdockGetLastError();
                RANK_CHECK(context, result == ncclRemoteError, "{}: \"{}\"", result_name(result), message);
                const auto words = [&](const char* name, const auto& value, const auto& odd_value) {
                    return is_odd ? fmt::format("{} is {} on rank 1, {} on rank ", name, odd_value, value)
                                  : fmt::format("{} is {} on rank {}, {} on rank 1", name, value, context.rank(),
                                                odd_value);
                };
                const std::string expected =
                    apart == Apart::kExperts  ? words("num_experts", shape.num_experts(), other.num_experts())
                    : apart == Apart::kLayout ? words("the layout", is_ht(mode) ? "flat" : "rank-major", "expert-major")
                                              : words("top_k", shape.topk, other.topk);
                for (const std::string& word :
                     {std::string("has entered"), std::string(is_ht(mode) ? "HT update" : "LL elastic dispatch"),
                      std::string(apart == Apart::kMemory ? "with other memory of the group" : "of another group"),
                      expected})
                    RANK_CHECK(context, message.find(word) != std::string::npos, "\"{}\" lacks \"{}\"", message, word);
                context.barrier();
            });
        }
    });
}

// Outputs with fewer rows than come fail the group, and nothing is written behind them.
TEST_BOTH_MODES(Elastic, RowsWithoutRoomFailTheGroup) {
    on_each_elastic_backend(mode, kEveryBackend, [=](const BackendSpec& spec) {
        for (const bool by_expert : {false, true}) {
            for (const bool of_sources : {false, true}) {
                // A rank that knows the number of rows refuses the call, and its peers would wait for it.
                const int num_ranks = of_sources ? ranks_or(4) : 1;
                expect_clean(spec, num_ranks, std::nullopt, [&](RankContext& context) {
                    const ElasticShape shape = shape_to_everybody(mode, context.num_ranks());
                    Group group(context, context.comm(), elastic_config(context, shape));
                    ElasticHandle handle(context, group.get(), shape, by_expert, 3);
                    handle.route(to_everybody(shape));
                    RANK_OK(context, handle.update());
                    ElasticDispatchCall call(context, handle, 1, {.scales = 2, .weights = true});
                    const auto arrivals = handle.arrivals()[static_cast<size_t>(context.rank())];
                    const size_t tokens = arrivals.tokens.size(), rows = static_cast<size_t>(arrivals.num_rows);
                    const size_t line = static_cast<size_t>(shape.topk) + 2;
                    Buffer sources(context, handle.stream(), 4 * (tokens - 1) * line);
                    Tensor short_sources(ncclInt32, {tokens - 1, line}, sources);
                    crossdockElasticDispatch_t& arguments = call.arguments();
                    if (of_sources) {
                        arguments.sources = short_sources;
                    } else {
                        call.shrink(rows - 1);
                    }
                    const ncclResult_t first = call.run();
                    if (first == ncclInvalidArgument) {
                        const std::string message = crossdockGetLastError();
                        RANK_CHECK(context, !of_sources && message.find("received ones") != std::string::npos, "{}",
                                   message);
                        return;
                    }
                    context.synchronize(handle.stream());
                    RANK_REFUSED(context, ncclInvalidUsage, "rows came to rank", call.run());
                    if (!of_sources) call.check_untouched_from(rows - 1);
                });
            }
        }
    });
}

// With a budget and the policy to drop, outputs need no more rows than that, and the group goes on.
TEST(HtElastic, RowsBeyondTheBudgetAreDropped) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const Combined combined : kEveryCombine) {
            expect_clean(spec, ranks_or(4), std::nullopt, [=](RankContext& context) {
                ElasticShape shape = shape_to_everybody(kHighThroughput, context.num_ranks());
                shape.budget = shape.max_tokens;
                shape.invariant = combined.invariant;
                const size_t budget = static_cast<size_t>(shape.max_tokens);
                ncclEpGroupConfig_t config = elastic_config(context, shape);
                config.max_recv_tokens_per_rank = static_cast<unsigned>(budget);
                config.overflow_policy = NCCL_EP_OVERFLOW_DROP;
                Group group(context, context.comm(), config, shape.invariant);
                ElasticHandle handle(context, group.get(), shape, combined.by_expert, 3);
                handle.route(to_everybody(shape));
                RANK_OK(context, handle.update());
                for (uint64_t step = 0; step < 3; ++step) {
                    ElasticDispatchCall call(context, handle, step, {.weights = true});
                    call.shrink(budget);
                    RANK_OK(context, call.run());
                    context.synchronize(handle.stream());
                    call.check_untouched_from(budget);
                    ElasticCombineCall combine(context, handle, step, {.weights = true});
                    RANK_OK(context, combine.run());
                    context.synchronize(handle.stream());
                    combine.check();
                }
            });
        }
    });
}

// Captured operations do at every replay what eager ones do.
TEST_BOTH_MODES(Elastic, GraphsReplay) {
    on_each_backend({Backend::kCuda, Backend::kCudaProcesses}, [=](const BackendSpec& spec) {
        for (const Combined combined : kEveryCombine) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                ElasticShape shape = shape_to_everybody(mode, context.num_ranks());
                shape.invariant = combined.invariant;
                Group group(context, context.comm(), elastic_config(context, shape), shape.invariant);
                ElasticHandle handle(context, group.get(), shape, combined.by_expert, 3);
                handle.route(to_everybody(shape));
                RANK_OK(context, handle.update());
                ElasticDispatchCall dispatch(context, handle, 1);
                dispatch.arguments().statistics = nullptr;  // which every replay adds to
                RANK_OK(context, dispatch.run());
                ElasticCombineCall combine(context, handle, 2);
                RANK_OK(context, combine.run());
                const Graph step = context.capture(handle.stream(), [&] {
                    RANK_OK(context, handle.update());
                    RANK_OK(context, dispatch.run());
                    RANK_OK(context, combine.run());
                });
                for (int replay = 0; replay < 5; ++replay) {
                    context.launch(step, handle.stream());
                    context.synchronize(handle.stream());
                    dispatch.check();
                    combine.check();
                }
            });
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
