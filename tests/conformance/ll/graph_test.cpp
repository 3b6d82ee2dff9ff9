// SPDX-License-Identifier: Apache-2.0
// Captured operations do at every replay what eager calls do, with the routing that their buffers hold by then.
#include <gtest/gtest.h>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

Problem graph_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed) {
    Problem problem;
    problem.num_ranks = num_ranks;
    problem.num_experts = 4 * num_ranks;
    problem.max_tokens = 16;
    problem.num_topk = 4;
    problem.hidden = problem.combine_hidden = 512;
    problem.layout = layout;
    return rerouted(problem, seed);
}

void on_gpus(const RankProgram& program) {
    on_each_backend({Backend::kCuda, Backend::kCudaProcesses},
                    [&](const BackendSpec& spec) { expect_clean(spec, ranks_or(2), std::nullopt, program); });
}

Graph capture_dispatch(RankContext& context, Layer& layer) {
    return context.capture(layer.stream(), [&] { RANK_OK(context, layer.dispatch()); });
}
Graph capture_combine(RankContext& context, Layer& layer) {
    return context.capture(layer.stream(), [&] { RANK_OK(context, layer.combine()); });
}

void replay(RankContext& context, Layer& layer, Graph dispatch, Graph combine) {
    layer.prepare_dispatch();
    context.launch(dispatch, layer.stream());
    layer.check_dispatch();
    layer.prepare_combine();
    context.launch(combine, layer.stream());
    layer.check_combine();
}

TEST(Graph, ReplaysFollowTheRoutingInTheBuffers) {
    on_gpus([](RankContext& context) {
        for (const ncclEpLayout_t layout : kLlLayouts) {
            const Problem problem = graph_problem(context.num_ranks(), layout, 1);
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            const Graph dispatch = capture_dispatch(context, layer);
            const Graph combine = capture_combine(context, layer);
            for (uint64_t step = 0; step < 30; ++step) {
                layer.refill(rerouted(problem, 100 + step, true));
                replay(context, layer, dispatch, combine);
            }
        }
    });
}

TEST(Graph, SeveralGraphsAlternateWithEagerCalls) {
    on_gpus([](RankContext& context) {
        const Problem em = graph_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 2);
        const Problem rm = graph_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, 3);
        Group group(context, std::vector{em, rm});
        Layer a(context, group.get(), em), b(context, group.get(), rm);
        const Graph dispatch_a = capture_dispatch(context, a), combine_a = capture_combine(context, a);
        const Graph dispatch_b = capture_dispatch(context, b), combine_b = capture_combine(context, b);
        // A handle that is made after a capture leaves the graph alone, also one that needs more room.
        Problem larger = em;
        larger.num_topk = larger.num_experts;
        context.barrier();
        Layer c(context, group.get(), rerouted(larger, 7));
        context.barrier();
        Random random(4);
        for (int step = 0; step < 40; ++step) {
            switch (random.below(4)) {
                case 0:
                    replay(context, a, dispatch_a, combine_a);
                    break;
                case 1:
                    replay(context, b, dispatch_b, combine_b);
                    break;
                case 2:
                    a.round_trip();
                    break;
                default:
                    c.round_trip();
                    break;
            }
        }
    });
}

TEST(Graph, SplitOperationsAreCapturedTogether) {
    on_gpus([](RankContext& context) {
        const Problem problem = graph_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 5);
        Group group(context, problem);
        Layer layer(context, group.get(), problem);
        const Graph dispatch = context.capture(layer.stream(), [&] {
            RANK_OK(context, layer.send_dispatch());
            RANK_OK(context, layer.complete());
        });
        const Graph combine = context.capture(layer.stream(), [&] {
            RANK_OK(context, layer.send_combine());
            RANK_OK(context, layer.complete());
        });
        for (uint64_t step = 0; step < 10; ++step) {
            layer.refill(rerouted(problem, 200 + step, true));
            replay(context, layer, dispatch, combine);
        }
    });
}

// One graph of a whole step, launched many times without a look between: the last one's results are right.
TEST(Graph, ReplaysBackToBackDoNotOvertakeEachOther) {
    on_gpus([](RankContext& context) {
        const Problem problem = graph_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, 6);
        Group group(context, problem);
        Layer layer(context, group.get(), problem);
        layer.prepare_dispatch();
        layer.prepare_combine();
        const Graph step = context.capture(layer.stream(), [&] {
            RANK_OK(context, layer.dispatch());
            RANK_OK(context, layer.combine());
        });
        for (int i = 0; i < 200; ++i) context.launch(step, layer.stream());
        context.synchronize(layer.stream());
        layer.check_dispatch();
        layer.check_combine();
    });
}

}  // namespace
}  // namespace crossdock::testing
