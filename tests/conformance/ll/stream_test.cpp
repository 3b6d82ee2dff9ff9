// SPDX-License-Identifier: Apache-2.0
// Operations of one group follow each other in the order of their issue, also where the caller changes streams and
// waits for nothing between them.
#include <gtest/gtest.h>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

// Two handles on a stream each, in turn: the last results of both are right.
TEST(Streams, OperationsFollowEachOtherAcrossStreams) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem em = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 1);
            const Problem rm = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, 2);
            Group group(context, std::vector{em, rm});
            Layer a(context, group.get(), em), b(context, group.get(), rm);
            for (Layer* layer : {&a, &b}) {
                layer->prepare_dispatch();
                layer->prepare_combine();
            }
            context.barrier();
            for (int step = 0; step < 50; ++step) {
                RANK_OK(context, a.dispatch());
                RANK_OK(context, b.dispatch());
                RANK_OK(context, a.combine());
                RANK_OK(context, b.combine());
            }
            for (Layer* layer : {&a, &b}) {
                context.synchronize(layer->stream());
                layer->check_dispatch();
                layer->check_combine();
            }
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
