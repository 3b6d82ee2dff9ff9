// SPDX-License-Identifier: Apache-2.0
// High-throughput dispatch, expert-major: publishes each block of an expert's rows once it is in place, for experts
// that start while rows arrive. Where the words are: crossdock/overlap.hpp; contract: crossdock.h,
// crossdockHandleSetOverlap.
//
// The update has counted the rows, so all counts are published at once.
#pragma once

#include "kernels/ht/operation.h"
#include "kernels/overlap.h"

namespace crossdock {
namespace {

class HtRowPublisher {
  public:
    // After earlier kernels have ended.
    CROSSDOCK_DEVICE HtRowPublisher(const Ctx& ctx, const HtPublishingDispatchArgs& args)
        : args_(args), words_(args.published.memory, OverlapLayout{args.published.zones, args.published.blocks}) {
        words_.begin(ctx);
    }

    // Warp `warp` of the `warps` of the grid that do this.
    CROSSDOCK_DEVICE void publish_counts(const Ctx& ctx, uint32_t warp, uint32_t warps) const {
        const uint32_t thread = warp * kLanes + ctx.lane();
        const uint32_t threads = warps * kLanes;
        CROSSDOCK_ROLLED
        for (uint32_t zone = thread; zone < args_.published.zones; zone += threads)
            words_.publish_count(ctx, zone, rows_of(zone));
        words_.clear_next(thread, threads);
    }
    // One warp, which has stored a row to these slots; has_stored: the calling lane did so asynchronously.
    CROSSDOCK_DEVICE void publish(const Ctx& ctx, const uint32_t* slots, uint32_t num, bool has_stored) const {
        if (has_stored) {
            RowStage::wait_stores(ctx);
            ctx.fence_async_copies();
        }
        ctx.warp_sync();
        for_lanes(ctx, num, [&](uint32_t i) {
            const uint32_t zone = zone_of(slots[i]);
            const uint32_t block = (slots[i] - args_.common.tables.zones[zone]) / args_.published.block_rows;
            const uint32_t left = rows_of(zone) - block * args_.published.block_rows;
            const uint32_t rows = left < args_.published.block_rows ? left : args_.published.block_rows;
            words_.add(ctx, zone, block, 1, rows, rows);
        });
        ctx.warp_sync();
    }
    // The whole block, when its warps place no more rows.
    CROSSDOCK_DEVICE void finish(const Ctx& ctx) const {
        ctx.block_sync();
        if (thread_idx(ctx) == 0) words_.finish(ctx, ctx.num_blocks());
    }

  private:
    // That the tensor has room for.
    CROSSDOCK_DEVICE uint32_t rows_of(uint32_t zone) const {
        const HtTables& t = args_.common.tables;
        const uint64_t end = args_.token_rows < args_.common.budget ? args_.token_rows : args_.common.budget;
        const uint64_t room = t.zones[zone] < end ? end - t.zones[zone] : 0;
        return t.expert_rows[zone] < room ? t.expert_rows[zone] : static_cast<uint32_t>(room);
    }
    // The last one that begins there or before; those without rows begin where the next one does.
    CROSSDOCK_DEVICE uint32_t zone_of(uint32_t slot) const {
        const auto* zones = args_.common.tables.zones;
        uint32_t first = 0;
        uint32_t end = args_.published.zones;
        CROSSDOCK_ROLLED
        while (end - first > 1) {
            const uint32_t middle = (first + end) / 2;
            (zones[middle] <= slot ? first : end) = middle;
        }
        return first;
    }

    const HtPublishingDispatchArgs& args_;
    PublishedTurn words_;
};

// Other dispatches publish nothing.
struct HtNoPublisher {
    CROSSDOCK_DEVICE HtNoPublisher(const Ctx&, const HtDispatchArgs&) {}
    CROSSDOCK_DEVICE void publish_counts(const Ctx&, uint32_t, uint32_t) const {}
    CROSSDOCK_DEVICE void publish(const Ctx&, const uint32_t*, uint32_t, bool) const {}
    CROSSDOCK_DEVICE void finish(const Ctx&) const {}
};

template <typename Args>
using PublisherOf = std::conditional_t<kPublishes<Args>, HtRowPublisher, HtNoPublisher>;

}  // namespace
}  // namespace crossdock
