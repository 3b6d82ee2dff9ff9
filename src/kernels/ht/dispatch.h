// SPDX-License-Identifier: Apache-2.0
// High-throughput dispatch: one kernel; some warps of each block send, some receive, some exchange weights. Contract:
// nccl_ep.h, ncclEpDispatch; protocol: docs/protocol.md.
#pragma once

#include "kernels/ht/dispatch_cross.h"
#include "kernels/ht/dispatch_receive.h"
#include "kernels/ht/windows.h"

namespace crossdock {
namespace {

template <typename Args>
CROSSDOCK_DEVICE void ht_dispatch(const Ctx& ctx, const Args& args) {
    const HtCommon& c = args.common;
    init_stages(ctx, args.warp_layout, args.shared);
    HtNote::init_all(ctx, args.warp_layout, args.shared);
    GinRing::init_states(ctx, c);
    ctx.wait_for_previous_kernels();
    ctx.enter(Phase::kDispatchBegin);
    const Operation operation = begin_operation(ctx, c, [] {});
    // The experts' kernel, once all blocks are here: it cannot take their SMs.
    if (kPublishes<Args> && thread_idx(ctx) == 0) ctx.let_next_kernel_start();
    // Own rows pass a ring only where bulk stores cannot write their scales.
    const bool own_is_direct =
        kIsElastic<Args> || c.windows_are_inputs || args.scale_bytes == 0 || RowStage::takes(args.out_scales);
    uint32_t* const states = peer_states(ctx, args.shared);
    if (!wait_all_entered(ctx, c, operation, states, own_is_direct, [](uint32_t, uint64_t) {})) return;
    const HtWarpLayout& warp_layout = args.warp_layout;
    const uint32_t warp = ctx.warp_idx();
    if (warp < warp_layout.producers) {
        RowSender<Args>(ctx, args, operation).run(ctx);
    } else if (warp < warp_layout.producers + warp_layout.consumers) {
        ctx.enter(Phase::kDispatchReceive);
        RowReceiver<Args>(ctx, args, operation, warp - warp_layout.producers, warp_layout.consumers).run(ctx);
    } else if (warp_layout.is_announcer(warp)) {
        announce_packets(ctx, c, warp_layout, args.shared, operation, args.rows);
    } else if (kHasGinPeers && warp >= warp_layout.warps() - warp_layout.forwarders) {
        RowForwarder<Args>(ctx, args, operation)
            .run(ctx, warp - (warp_layout.warps() - warp_layout.forwarders), warp_layout.forwarders);
    } else if (kHasGinPeers && warp >= warp_layout.warps() - warp_layout.forwarders - warp_layout.crossers) {
        cross_rows(ctx, args, operation, warp - (warp_layout.warps() - warp_layout.forwarders - warp_layout.crossers),
                   warp_layout.crossers);
    } else {
        ctx.enter(Phase::kDispatchWeights);
        const uint32_t weight_warp = warp - warp_layout.producers - warp_layout.consumers;
        const uint32_t blocks = ctx.num_blocks();
        const uint32_t warp_of_all = weight_warp * blocks + ctx.block_idx();
        if constexpr (kIsElastic<Args>) {
            write_rest(ctx, args, warp_of_all, warp_layout.weight_warps * blocks);
        } else {
            PublisherOf<Args>(ctx, args).publish_counts(ctx, warp_of_all, warp_layout.weight_warps * blocks);
            fill_gaps(ctx, args, warp_of_all, warp_layout.weight_warps * blocks);
            if (args.with_weights) exchange_weights(ctx, args, operation, weight_warp, warp_layout.weight_warps);
        }
    }
    ctx.enter(Phase::kDispatchEnd);
    if constexpr (kIsElastic<Args>) {
        const ElasticDispatchArgs& elastic = args.elastic;
        return expect_room(ctx, c, elastic.rows, elastic.sources == nullptr ? UINT32_MAX : elastic.source_rows);
    }
    PublisherOf<Args>(ctx, args).finish(ctx);
    if (ctx.block_idx() == 0) write_counters(ctx, c, args.counters, c.tables.routing->total);
    if (c.has_windows && !c.windows_are_inputs) exchange_done(ctx, c, operation, states);
    if ((c.scope.masking != 0 || c.windows_are_inputs) && is_last_block(ctx, c)) {
        if (c.windows_are_inputs) wait_until_all_have_read(ctx, c, operation, states);
        ctx.block_sync();  // a wait may have masked a rank: all warps clear the same rows
        if (c.scope.masking != 0) clear_lost_rows(ctx, args);
    }
}

}  // namespace
}  // namespace crossdock
