// SPDX-License-Identifier: Apache-2.0
// High throughput: captured updates, dispatches and combines do at every replay what eager calls do, with the routing
// that their buffers hold by then.
#include <gtest/gtest.h>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"
#include "conformance/support/scoped_arena.h"

namespace crossdock::testing {
namespace {

void on_gpus(const RankProgram& program) {
    on_each_backend({Backend::kCuda, Backend::kCudaProcesses},
                    [&](const BackendSpec& spec) { expect_clean(spec, ranks_or(2), std::nullopt, program); });
}

// One graph of update, dispatch and combine.
Graph capture_step(RankContext& context, Layer& layer, ncclEpPassDir_t direction) {
    return context.capture(layer.stream(), [&] {
        RANK_OK(context, layer.update());
        RANK_OK(context, layer.dispatch(direction));
        RANK_OK(context, layer.combine(direction));
    });
}

void replay(RankContext& context, Layer& layer, Graph step, ncclEpPassDir_t direction, const Problem& next) {
    layer.refill(next);
    layer.prepare_update();
    layer.prepare_dispatch();
    layer.prepare_combine();
    context.launch(step, layer.stream());
    layer.check_update();
    layer.check_dispatch(direction);
    layer.check_combine(direction);
}

TEST(HtGraph, ReplaysFollowTheRoutingInTheBuffers) {
    on_gpus([](RankContext& context) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const bool windows : {false, true}) {
                for (const bool drops : {false, true}) {
                    Problem problem = plain_problem(context.num_ranks(), layout, 1, kHighThroughput);
                    problem.drops = drops;
                    if (drops) problem.budget = static_cast<size_t>(problem.max_tokens) + 2;
                    ScopedArena arena(context, kHtWindowBytes);
                    {
                        Group group(context, problem);
                        Layer layer(
                            context, group.get(), problem,
                            {.arena = windows ? arena.get() : nullptr, .windows = kOutputs | kCombineInput | kInputs});
                        const Graph forward = capture_step(context, layer, NCCL_EP_FWD_PASS);
                        const Graph backward = capture_step(context, layer, NCCL_EP_BWD_PASS);
                        for (uint64_t step = 0; step < 12; ++step) {
                            const bool back = step % 3 == 2;
                            replay(context, layer, back ? backward : forward,
                                   back ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS, rerouted(problem, 100 + step, true));
                        }
                        context.barrier();
                    }
                }
            }
        }
    });
}

TEST(HtGraph, SeveralGraphsAlternateWithEagerCalls) {
    on_gpus([](RankContext& context) {
        Problem flat = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 2, kHighThroughput);
        const Problem expert_major =
            plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 3, kHighThroughput);
        flat.budget = expert_major.budget;
        Group group(context, std::vector{flat, expert_major});
        Layer a(context, group.get(), flat), b(context, group.get(), expert_major);
        const Graph step_a = capture_step(context, a, NCCL_EP_FWD_PASS);
        const Graph step_b = capture_step(context, b, NCCL_EP_BWD_PASS);
        // A handle that is made after a capture leaves the graphs alone.
        context.barrier();
        Layer c(context, group.get(), expert_major);
        context.barrier();
        Random random(4);
        for (int step = 0; step < 30; ++step) {
            switch (random.below(4)) {
                case 0:
                    replay(context, a, step_a, NCCL_EP_FWD_PASS, rerouted(flat, random.bits(), true));
                    break;
                case 1:
                    replay(context, b, step_b, NCCL_EP_BWD_PASS, rerouted(expert_major, random.bits(), true));
                    break;
                case 2:
                    a.route(rerouted(flat, random.bits(), true));
                    a.round_trip();
                    break;
                default:
                    c.route(rerouted(expert_major, random.bits()));
                    c.round_trip();
                    break;
            }
        }
    });
}

TEST(HtGraph, ReplaysBackToBackDoNotOvertakeEachOther) {
    on_gpus([](RankContext& context) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            const Problem problem = plain_problem(context.num_ranks(), layout, 6, kHighThroughput);
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            layer.prepare_update();
            layer.prepare_dispatch();
            layer.prepare_combine();
            const Graph step = capture_step(context, layer, NCCL_EP_FWD_PASS);
            for (int i = 0; i < 200; ++i) context.launch(step, layer.stream());
            context.synchronize(layer.stream());
            layer.check_update();
            layer.check_dispatch();
            layer.check_combine();
        }
    });
}

// A handle over memory that another one has routed may be used for the first time in a capture. A replay works with the
// routing that the memory holds by then.
TEST(HtGraph, ARelocatedHandleIsFirstUsedInACapture) {
    on_gpus([](RankContext& context) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            const Problem problem = plain_problem(context.num_ranks(), layout, 8, kHighThroughput);
            Group group(context, problem);
            const std::unique_ptr<Buffer> memory = make_handle_memory(context, group.get(), problem, nullptr);
            const std::unique_ptr<Buffer> place = make_handle_memory(context, group.get(), problem, nullptr);
            Layer first(context, group.get(), problem, {.handle_memory = memory.get()});
            Layer second(context, group.get(), problem, {.handle_memory = place.get(), .without_update = true});
            const Graph backward = context.capture(second.stream(), [&] {
                RANK_OK(context, second.dispatch(NCCL_EP_BWD_PASS));
                RANK_OK(context, second.combine(NCCL_EP_BWD_PASS));
            });
            for (uint64_t step = 0; step < 4; ++step) {
                const Problem routed = rerouted(problem, 51 + step, true);
                first.route(routed);
                first.pass(NCCL_EP_FWD_PASS);
                context.synchronize(first.stream());
                place->write(memory->read());
                context.barrier();
                second.refill(routed);
                second.prepare_dispatch();
                second.prepare_combine();
                context.launch(backward, second.stream());
                second.check_dispatch(NCCL_EP_BWD_PASS);
                second.check_combine(NCCL_EP_BWD_PASS);
            }
            second.pass(NCCL_EP_BWD_PASS);
        }
    });
}

// The rows of an eager dispatch are only known after its update, which a capture cannot wait for. Combine and update
// may be captured, and a backward pass with the routing of before.
TEST(HtGraph, EagerDispatchesAreNotCaptured) {
    on_gpus([](RankContext& context) {
        Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 7, kHighThroughput);
        problem.budget = 0;
        Group group(context, problem);
        Layer layer(context, group.get(), problem);
        layer.round_trip();
        layer.prepare_combine();
        const Graph combine = context.capture(layer.stream(), [&] {
            RANK_REFUSED(context, ncclInvalidUsage, "captur", layer.dispatch());
            RANK_OK(context, layer.combine());
        });
        context.launch(combine, layer.stream());
        layer.check_combine();
        const Graph backward = context.capture(layer.stream(), [&] {
            RANK_OK(context, layer.dispatch(NCCL_EP_BWD_PASS));
            RANK_OK(context, layer.combine());
        });
        for (uint64_t seed = 1; seed < 4; ++seed) {
            layer.change_data(seed);
            layer.prepare_dispatch();
            layer.prepare_combine();
            context.launch(backward, layer.stream());
            layer.check_dispatch(NCCL_EP_BWD_PASS);
            layer.check_combine();
        }
        layer.round_trip();
        RANK_OK(context, layer.update());
        context.capture(layer.stream(), [&] {
            RANK_REFUSED(context, ncclInvalidUsage, "asked for", layer.dispatch(NCCL_EP_BWD_PASS));
            RANK_OK(context, layer.combine());
        });
        layer.round_trip();
    });
}

// Memory that a handle has routed is used by a second one inside a capture, first of all, whether the first handle is
// still there or not.
TEST(HtGraph, RelocatedMemoryIsKnownBeforeACapture) {
    on_gpus([](RankContext& context) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const bool first_stays : {true, false}) {
                const Problem problem = plain_problem(context.num_ranks(), layout, 8, kHighThroughput);
                Group group(context, problem);
                const cudaStream_t stream = context.make_stream();
                const std::unique_ptr<Buffer> memory = make_handle_memory(context, group.get(), problem, stream);
                auto first = std::make_unique<Layer>(context, group.get(), problem,
                                                     LayerOptions{.handle_memory = memory.get()}, stream);
                first->pass(NCCL_EP_FWD_PASS);
                context.synchronize(stream);
                if (!first_stays) first.reset();
                Layer second(context, group.get(), problem, {.handle_memory = memory.get(), .without_update = true},
                             stream);
                const Graph backward = context.capture(second.stream(), [&] {
                    RANK_OK(context, second.dispatch(NCCL_EP_BWD_PASS));
                    RANK_OK(context, second.combine());
                });
                for (uint64_t seed = 1; seed < 4; ++seed) {
                    second.change_data(seed);
                    second.prepare_dispatch();
                    second.prepare_combine();
                    context.launch(backward, second.stream());
                    second.check_dispatch(NCCL_EP_BWD_PASS);
                    second.check_combine();
                }
                second.route(rerouted(problem, 9, true));
                second.round_trip();
                context.barrier();
            }
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
