// SPDX-License-Identifier: Apache-2.0
// High throughput with masks: ranks come back between two updates, masks are set by hand, bad calls are refused.
#include <gtest/gtest.h>

#include <cstddef>

#include "conformance/ht/mask_support.h"

namespace crossdock::testing {
namespace {

constexpr uint64_t kLongNs = 60'000'000'000;

// The last rank misses operations from `missed` on. It is masked by the others, which go on, and comes back with
// ncclEpMaskClean; every second time it joins late: it has then done what it missed, alone.
void miss_and_come_back(RankContext& context, ncclEpLayout_t layout, int missed) {
    const int absent = context.num_ranks() - 1;
    const bool present = context.rank() != absent;
    const Problem problem = mask_problem(context.num_ranks(), layout, 3);
    const OwnedGroup group = mask_group(context, problem, short_timeout_ns(context));
    DegradedLayer layer(context, group.get(), problem);
    layer.step();
    for (int round = 0; round < (context.is_simulated() ? 4 : 2); ++round) {
        const bool joins_late = round % 2 == 1;
        for (int phase = 0; phase < (present ? kMaskPhases : missed); ++phase) layer.run(phase);
        if (present) {
            RANK_CHECK(context, query_mask(context, group.get()) == all_but(context.num_ranks(), {absent}),
                       "the wrong ranks are masked");
            RANK_CHECK(context, async_error(context, group.get()) == 1, "no asynchronous error");
            check_diagnosis(context, group.get(), absent);
        }
        context.barrier();
        for (int phase = missed; phase < kMaskPhases && !present && joins_late; ++phase) layer.run(phase);
        context.barrier();
        RANK_OK(context, ncclEpMaskClean(group.get(), layer.layer().stream()));
        RANK_CHECK(context, query_mask(context, group.get()) == ActiveRanks(context.num_ranks(), 1),
                   "a rank is still masked");
        if (present)
            RANK_CHECK(context, async_error(context, group.get()) == 1, "the asynchronous error went with the masks");
        RANK_OK(context, ncclEpErrorClear(group.get()));
        layer.layer().prepare_dispatch();
        layer.layer().prepare_combine();
        RANK_REFUSED(context, ncclInvalidUsage, "ncclEpUpdateHandle", layer.layer().dispatch());
        RANK_REFUSED(context, ncclInvalidUsage, "ncclEpMaskClean", layer.layer().combine());
        layer.layer().check_nothing_was_written();
        layer.route(mask_problem(context.num_ranks(), layout, static_cast<uint64_t>(round) + 10));
        layer.step();
        layer.step();
        RANK_CHECK(context, async_error(context, group.get()) == 0, "a step of healthy ranks timed out");
        RANK_CHECK(context, query_mask(context, group.get()) == ActiveRanks(context.num_ranks(), 1),
                   "a rank is masked again");
    }
}

TEST(HtMask, ARankThatMissedOperationsOrWasLateComesBack) {
    on_each_backend_as_one_team(kEveryBackend, [](const BackendSpec& spec) {
        for (int missed = 0; missed < kMaskPhases; ++missed) {
            for (const ncclEpLayout_t layout : kHtLayouts) {
                // Where real time goes by, each phase in one layout.
                if (spec.kind != Backend::kSimulation && layout != kHtLayouts[missed % 2]) continue;
                expect_clean(spec, ranks_or(3), std::nullopt,
                             [=](RankContext& context) { miss_and_come_back(context, layout, missed); });
            }
        }
    });
}

// A handle over another's memory does not use a routing from before the masks were cleaned.
TEST(HtMask, RelocatedRoutingsGetStaleToo) {
    on_each_backend_as_one_team(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = mask_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 7);
            const OwnedGroup group = mask_group(context, problem, kLongNs);
            const auto memory = make_handle_memory(context, group.get(), problem, context.make_stream());
            LayerOptions options;
            options.handle_memory = memory.get();
            Layer first(context, group.get(), problem, options);
            context.synchronize(first.stream());
            options.without_update = true;
            Layer second(context, group.get(), problem, options);
            second.round_trip();
            RANK_OK(context, ncclEpMaskClean(group.get(), first.stream()));
            Layer third(context, group.get(), problem, options);
            RANK_REFUSED(context, ncclInvalidUsage, "ncclEpMaskClean", second.dispatch());
            RANK_REFUSED(context, ncclInvalidUsage, "ncclEpMaskClean", third.dispatch());
            first.route(problem);
            context.synchronize(first.stream());
            first.round_trip();
            Layer(context, group.get(), problem, options).round_trip();
        });
    });
}

// Masks set by hand: nobody waits, nothing is an error, what goes to masked ranks is counted, and setting the masks
// back brings everybody back.
TEST(HtMask, MasksAreSetByHandAndTakenBack) {
    on_each_backend_as_one_team(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                const int num_ranks = context.num_ranks();
                const Problem problem = mask_problem(num_ranks, layout, 4);
                const OwnedGroup group = mask_group(context, problem, kLongNs);
                DegradedLayer layer(context, group.get(), problem);
                const cudaStream_t stream = layer.layer().stream();
                // The others leave rank 0 out, and it leaves out all others.
                ActiveRanks active = all_but(num_ranks, {0});
                if (context.rank() == 0) {
                    for (int& entry : active) entry = 1 - entry;
                }
                for (int round = 0; round < 3; ++round) {
                    // Any value but 0 means active, the own entry does not matter, and the array may be reused at once.
                    std::vector<int> values = active;
                    for (int& value : values) value *= 5;
                    if (round == 1) values[static_cast<size_t>(context.rank())] = 0;
                    RANK_OK(context, ncclEpMaskUpdate(group.get(), values.data(), stream));
                    std::fill(values.begin(), values.end(), 3);
                    context.synchronize(stream);
                    RANK_CHECK(context, query_mask(context, group.get()) == active, "the mask is another one");
                    context.barrier();
                    layer.route(mask_problem(num_ranks, layout, static_cast<uint64_t>(round)));
                    layer.step();
                    RANK_CHECK(context, query_mask(context, group.get()) == active, "a step changed the mask");
                    RANK_OK(context, ncclEpMaskUpdate(group.get(), ActiveRanks(num_ranks, 1).data(), stream));
                    context.synchronize(stream);
                    context.barrier();
                    layer.step();
                    RANK_CHECK(context, async_error(context, group.get()) == 0, "somebody timed out");
                }
            });
        }
    });
}

TEST(HtMask, CleaningWorksBeforeAnyHandle) {
    on_each_backend_as_one_team(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = mask_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 5);
            const OwnedGroup group = mask_group(context, problem, kLongNs);
            RANK_OK(context, ncclEpMaskClean(group.get(), context.make_stream()));
            RANK_OK(context, ncclEpMaskClean(group.get(), context.make_stream()));
            Layer(context, group.get(), problem).round_trip();
        });
    });
}

// Where nobody is lost, masks change nothing.
TEST(HtMask, HealthyGroupsBringTheSame) {
    on_each_backend_as_one_team(kEveryBackend, [](const BackendSpec& spec) {
        const Seeds seeds = seeds_or(400'001, seeds_in(spec.kind, 12));
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
            const int num_ranks = ranks_or(1 + static_cast<int>(seed % 4));
            expect_clean(spec, num_ranks, seed, [=](RankContext& context) {
                const Problem problem = random_problem(seed, {.algorithm = kHighThroughput,
                                                              .num_ranks = num_ranks,
                                                              .most_row_bytes = 1024,
                                                              .quantised_combines = true});
                const OwnedGroup group = mask_group(context, problem, kLongNs);
                Layer layer(context, group.get(), problem);
                layer.round_trip();
                layer.route(rerouted(problem, seed));
                layer.round_trip();
                RANK_CHECK(context, async_error(context, group.get()) == 0, "somebody timed out");
            });
        }
    });
}

TEST(HtMask, GroupsAreRefused) {
    on_each_backend_as_one_team(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = mask_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 6);
            const ncclEpGroupConfig_t good = group_config_for(context, problem);
            const auto marker = reinterpret_cast<ncclEpGroup_t>(0x77);
            const auto refused = [&](ncclResult_t code, const char* word, const ncclEpGroupConfig_t* config,
                                     const crossdockGroupOptions_t* options) {
                ncclEpGroup_t group = marker;
                RANK_REFUSED(context, code, word, crossdockCreateGroup(&group, context.comm(), config, options));
                RANK_CHECK(context, group == marker, "a refused call wrote the group");
            };
            crossdockGroupOptions_t options = CROSSDOCK_GROUP_OPTIONS_INIT;
            RANK_REFUSED(context, ncclInvalidArgument, "group",
                         crossdockCreateGroup(nullptr, context.comm(), &good, &options));
            refused(ncclInvalidArgument, "config", nullptr, &options);
            options.size = offsetof(crossdockGroupOptions_t, lsa_team_size) - 1;
            refused(ncclInvalidArgument, "options->size", &good, &options);
            options = CROSSDOCK_GROUP_OPTIONS_INIT;
            options.magic ^= 1;
            refused(ncclInvalidArgument, "options->magic", &good, &options);
            options = CROSSDOCK_GROUP_OPTIONS_INIT;
            for (const int value : {2, -1}) {
                options.ht_masks = value;
                refused(ncclInvalidArgument, "ht_masks", &good, &options);
            }
            options.ht_masks = 1;
            ncclEpGroupConfig_t low_latency = good;
            low_latency.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
            refused(ncclInvalidUsage, "enable_mask", &low_latency, &options);
            if (context.num_ranks() > 1) {
                options.ht_masks = context.rank() == 0 ? 1 : 0;
                refused(ncclInvalidUsage, "ht_masks", &good, &options);
            }
            // Without options, and with none set: a group without masks.
            options.ht_masks = 0;
            for (const crossdockGroupOptions_t* given : {static_cast<const crossdockGroupOptions_t*>(nullptr),
                                                         static_cast<const crossdockGroupOptions_t*>(&options)}) {
                ncclEpGroup_t group = nullptr;
                RANK_OK(context, crossdockCreateGroup(&group, context.comm(), &good, given));
                const OwnedGroup owner(group);
                Layer(context, group, problem).round_trip();
                RANK_REFUSED(context, ncclInvalidUsage, "ht_masks", ncclEpMaskClean(group, nullptr));
            }
        });
    });
}

TEST(HtMask, BadCallsAreRefused) {
    on_each_backend_as_one_team(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = mask_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 6);
            const OwnedGroup group = mask_group(context, problem, kLongNs);
            const cudaStream_t stream = context.make_stream();
            Buffer count(context, stream, sizeof(uint64_t));
            count.poison();
            const auto pointer = reinterpret_cast<uint64_t*>(count.data());
            int error = 33;
            RANK_REFUSED(context, ncclInvalidArgument, "mask", ncclEpMaskQuery(group.get(), nullptr, stream));
            RANK_REFUSED(context, ncclInvalidArgument, "mask", ncclEpMaskUpdate(group.get(), nullptr, stream));
            RANK_REFUSED(context, ncclInvalidArgument, "error", ncclEpGetAsyncError(group.get(), nullptr));
            RANK_OK(context, ncclEpGetAsyncError(group.get(), &error));
            RANK_CHECK(context, error == 0, "an error without a cause");
            RANK_REFUSED(context, ncclInvalidArgument, "handle",
                         crossdockHandleDroppedTokens(nullptr, pointer, stream));
            LayerOptions options;
            options.without_update = true;
            Layer layer(context, group.get(), problem, options);
            RANK_REFUSED(context, ncclInvalidUsage, "ncclEpUpdateHandle",
                         crossdockHandleDroppedTokens(layer.handle(), pointer, stream));
            layer.route(problem);
            RANK_REFUSED(context, ncclInvalidArgument, "count",
                         crossdockHandleDroppedTokens(layer.handle(), nullptr, stream));
            const Problem low_latency = busy_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 6);
            Group other(context, low_latency);
            Layer ll(context, other.get(), low_latency);
            RANK_REFUSED(context, ncclInvalidUsage, "LL", crossdockHandleDroppedTokens(ll.handle(), pointer, stream));
            count.check(std::vector<std::byte>(sizeof(uint64_t), kPoison), 8, "the count of refused calls");
            layer.round_trip();
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
