// SPDX-License-Identifier: Apache-2.0
// All routing of a high-throughput handle lies in its memory: another handle over the same memory works with it.
#include <gtest/gtest.h>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

// The first handle routes and runs forward; the second one, which is never updated, runs backward, and forward again.
void relocate(RankContext& context, const Problem& problem, bool first_stays) {
    Group group(context, problem);
    const cudaStream_t stream = context.make_stream();
    const std::unique_ptr<Buffer> memory = make_handle_memory(context, group.get(), problem, stream);
    for (uint64_t step = 0; step < 3; ++step) {
        Problem routed = rerouted(problem, problem.seed + step);
        // The width of the ids is part of what is kept.
        routed.index_type = step % 2 == 0 ? ncclInt32 : ncclInt64;
        auto first =
            std::make_unique<Layer>(context, group.get(), routed, LayerOptions{.handle_memory = memory.get()}, stream);
        first->pass(NCCL_EP_FWD_PASS);
        context.synchronize(stream);
        if (!first_stays) first.reset();
        Layer second(context, group.get(), routed, {.handle_memory = memory.get(), .without_update = true}, stream);
        second.change_data(problem.seed + 100 + step);
        second.pass(NCCL_EP_BWD_PASS);
        second.pass(NCCL_EP_BWD_PASS);
        second.round_trip();
        // And it may be updated like any other.
        first.reset();
        second.route(rerouted(routed, problem.seed + 200 + step));
        second.pass(NCCL_EP_FWD_PASS);
        second.pass(NCCL_EP_BWD_PASS);
        memory->check_guards("the handle's memory");
        // A copy at another address will do.
        const Problem current = second.problem();
        const std::unique_ptr<Buffer> copy = make_handle_memory(context, group.get(), problem, stream);
        copy->write(memory->read());
        Layer third(context, group.get(), current, {.handle_memory = copy.get(), .without_update = true}, stream);
        third.pass(NCCL_EP_BWD_PASS);
    }
}

TEST(HtRelocation, ASecondHandleWorksWithTheRoutingOfTheFirst) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const bool first_stays : {false, true}) {
            const Seeds seeds = seeds_or(40'001, seeds_in(spec.kind, 16));
            for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
                const int num_ranks = ranks_or(1 + static_cast<int>(reference::random_bits(seed, 7) % 4));
                const Problem problem =
                    random_problem(seed, {.algorithm = kHighThroughput, .num_ranks = num_ranks, .most_row_bytes = 512});
                SCOPED_TRACE(problem.describe());
                expect_clean(spec, num_ranks, seed,
                             [=](RankContext& context) { relocate(context, problem, first_stays); });
            }
        }
    });
}

// A persistent second handle follows the updates of the first, without being told.
TEST(HtRelocation, ASecondHandleFollowsUpdatesOfTheFirst) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 5, kHighThroughput);
            Group group(context, problem);
            const std::unique_ptr<Buffer> memory = make_handle_memory(context, group.get(), problem, nullptr);
            Layer first(context, group.get(), problem, {.handle_memory = memory.get()});
            Layer second(context, group.get(), problem, {.handle_memory = memory.get(), .without_update = true});
            for (uint64_t step = 0; step < 3; ++step) {
                const Problem routed = rerouted(problem, 11 + step);
                first.route(routed);
                first.pass(NCCL_EP_FWD_PASS);
                second.refill(routed);
                second.pass(NCCL_EP_BWD_PASS);
            }
        });
    });
}

// What others write into the memory between the last use of a routing and the next update does no harm.
TEST(HtRelocation, MemoryMayBeOverwrittenBetweenSteps) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Problem problem = plain_problem(context.num_ranks(), layout, 5, kHighThroughput);
                Group group(context, problem);
                const std::unique_ptr<Buffer> memory = make_handle_memory(context, group.get(), problem, nullptr);
                Layer layer(context, group.get(), problem, {.handle_memory = memory.get()});
                for (uint64_t step = 0; step < 4; ++step) {
                    layer.pass(NCCL_EP_FWD_PASS);
                    layer.pass(NCCL_EP_BWD_PASS);
                    context.synchronize(layer.stream());
                    memory->write(std::vector<std::byte>(memory->bytes(), std::byte(step == 0 ? 0xFF : 37 * step)));
                    layer.route(rerouted(problem, 31 + step));
                }
            });
        }
    });
}

// A handle that stays, over memory into which the caller copies another routing each step, works with what is there: as
// frameworks do that move their buffers and keep a handle for each address. Numbers of tokens may differ.
TEST(HtRelocation, AHandleFollowsWhatIsCopiedIntoItsMemory) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const bool is_updated_once : {false, true}) {
                expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                    const Problem problem = plain_problem(context.num_ranks(), layout, 5, kHighThroughput);
                    Group group(context, problem);
                    const std::unique_ptr<Buffer> memory = make_handle_memory(context, group.get(), problem, nullptr);
                    const std::unique_ptr<Buffer> place = make_handle_memory(context, group.get(), problem, nullptr);
                    Layer first(context, group.get(), problem, {.handle_memory = memory.get()});
                    Layer second(context, group.get(), problem,
                                 {.handle_memory = place.get(), .without_update = !is_updated_once});
                    for (uint64_t step = 0; step < 5; ++step) {
                        const Problem routed = rerouted(problem, 41 + step);
                        first.route(routed);
                        first.pass(NCCL_EP_FWD_PASS);
                        context.synchronize(first.stream());
                        place->write(memory->read());
                        second.refill(routed);
                        second.pass(NCCL_EP_BWD_PASS);
                        second.pass(NCCL_EP_FWD_PASS);
                    }
                });
            }
        }
    });
}

Problem with_other_layout(const Problem& problem) {
    Problem other = problem;
    other.layout = problem.layout == NCCL_EP_LAYOUT_FLAT ? NCCL_EP_LAYOUT_EXPERT_MAJOR : NCCL_EP_LAYOUT_FLAT;
    return other;
}

void expect_refused(RankContext& context, Layer& layer, const char* word) {
    layer.prepare_dispatch();
    RANK_REFUSED(context, ncclInvalidUsage, word, layer.dispatch());
    layer.prepare_combine();
    RANK_REFUSED(context, ncclInvalidUsage, word, layer.combine());
}

// Routing that a handle of another group or layout has written is refused, whether that handle still lives or not.
TEST(HtRelocation, RoutingOfAnotherGroupOrLayoutIsRefused) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const bool first_stays : {false, true}) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Problem flat = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 5, kHighThroughput);
                const Problem by_expert = with_other_layout(flat);
                const ncclEpGroupConfig_t config = group_config_for(context, std::vector{flat, by_expert});
                Group group(context, context.comm(), config);
                Group other_group(context, context.comm(), config);
                const std::unique_ptr<Buffer> memory = make_handle_memory(context, group.get(), flat, nullptr);
                auto first =
                    std::make_unique<Layer>(context, group.get(), flat, LayerOptions{.handle_memory = memory.get()});
                first->pass(NCCL_EP_FWD_PASS);
                if (!first_stays) first.reset();
                Layer elsewhere(context, other_group.get(), flat,
                                {.handle_memory = memory.get(), .without_update = true});
                expect_refused(context, elsewhere, "another group");
                Layer otherwise(context, group.get(), by_expert,
                                {.handle_memory = memory.get(), .without_update = true});
                expect_refused(context, otherwise, "layout");
                // What they write themselves is theirs, and no longer the first one's.
                elsewhere.route(rerouted(flat, 7));
                elsewhere.pass(NCCL_EP_FWD_PASS);
                if (!first_stays) return;
                expect_refused(context, *first, "another group");
                otherwise.route(rerouted(by_expert, 8));
                otherwise.pass(NCCL_EP_FWD_PASS);
                expect_refused(context, elsewhere, "another group");
                expect_refused(context, *first, "layout");
                first->route(rerouted(flat, 9));
                first->pass(NCCL_EP_FWD_PASS);
            });
        }
    });
}

// Combine relies on the update only, and dispatch on nothing else either: any number of them, in any order.
TEST(HtRelocation, BackwardComesWithoutForward) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Problem problem = plain_problem(context.num_ranks(), layout, 5, kHighThroughput);
                Group group(context, problem);
                Layer layer(context, group.get(), problem);
                layer.prepare_combine();
                RANK_OK(context, layer.combine());
                layer.check_combine();
                for (int i = 0; i < 3; ++i) layer.pass(NCCL_EP_BWD_PASS);
                layer.pass(NCCL_EP_FWD_PASS);
            });
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
