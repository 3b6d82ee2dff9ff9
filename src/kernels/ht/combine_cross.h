// SPDX-License-Identifier: Apache-2.0
// High-throughput combine between teams: the rows that a team's ranks have for a token of another team are summed by
// the source rank's rail peer there, in ascending order of ranks, and one row returns to the source rank. Rows of
// choices (HtWire::kChoices) return one by one, in one packet, in the same order.
#pragma once

#include "device/row_copy.h"
#include "device/sum_rows.h"
#include "kernels/ht/combine_rows.h"

namespace crossdock {
namespace {

template <DType kDType, HtWire kWire, typename Args>
class RowGatherer {
  public:
    // warp: among the `warps` of this block that gather, each for some of the teams.
    CROSSDOCK_DEVICE RowGatherer(const Ctx& ctx, const Args& args, const Operation& operation, uint32_t warp,
                                 uint32_t warps)
        : args_(args),
          operation_(operation),
          channel_(ctx.block_idx()),
          plan_(HtPlan::of_warp(ctx, args.shared, args.common.topk)),
          sender_(args.common, operation, args.gin_rows, args.wire_bytes, channel_, warp, warps) {}

    CROSSDOCK_DEVICE void run(const Ctx& ctx) const {
        const HtCommon& c = args_.common;
        const uint32_t end = largest_share(c, channel_, token_share);
        CROSSDOCK_ROLLED
        for (uint32_t at = 0; at < end; ++at) {
            const bool may_continue = sender_.for_teams([&](uint32_t team) {
                const Share share = token_share(c, rail_peer(c, team), channel_);
                return at >= share.size() || gather(ctx, team, share.first + at, share);
            });
            if (!may_continue) return;
        }
        if (is_leader(ctx)) sender_.send_filled(ctx);
    }

  private:
    // Returns false if the group has failed.
    CROSSDOCK_DEVICE bool gather(const Ctx& ctx, uint32_t team, uint32_t token, const Share& share) const {
        const HtCommon& c = args_.common;
        const SentRow sum = crossing_row(c, Crossing::kIn, team, token, share);
        if (!sum.exists) return true;
        uint32_t num = 0;
        if (!find_rows(ctx, team, token, share, num)) return false;  // an incomplete sum must not be sent
        const GinRing ring = GinRing::of_rows(c, team, channel_);
        const bool may_send = is_leader(ctx) && sender_.wait_credit(ctx, ring, sum.packet);
        if (ctx.warp_broadcast(may_send ? 1u : 0u) == 0) return false;
        const uint32_t source = rail_peer(c, team);
        uint32_t rows = 1;
        if constexpr (kWire == HtWire::kChoices) {
            rows = gather_choices(ctx, num, ring.outgoing(args_.gin_rows, sum.packet) + rows_begin<kWire>(args_));
            if (rows == 0) return false;
        } else {
            sum_rows<kDType>(ctx, PointerSummands{plan_.rows, num}, 0, args_.row_bytes / dtype_bytes(kDType),
                             ring.outgoing(args_.gin_rows, sum.packet));
        }
        if constexpr (kIsElastic<Args>)
            merge_words(ctx, source, token, num, ring.outgoing(args_.gin_rows, sum.packet) + words_begin<kWire>(args_));
        ctx.warp_sync();
        if (is_leader(ctx)) {
            if constexpr (kWire == HtWire::kChoices) {  // packets of different sizes
                const uint32_t bytes = rows_begin<kWire>(args_) + rows * args_.row_bytes;
                ring.send(ctx, operation_, args_.gin_rows, sum.packet, bytes);
            } else {
                sender_.send_later(ctx, ring, sum.packet);
            }
            count_rows(ctx, c.reach, source, rows, 0);
        }
        CROSSDOCK_ROLLED
        for (uint32_t i = ctx.lane(); i < num; i += kLanes) {
            const uint32_t peer = plan_.origins[i];
            if (peer_states(ctx, args_.shared)[peer] != kEntered) continue;
            LsaRing::combine_from(c, source, peer, channel_).give_credit(ctx, operation_, args_.rows, plan_.slots[i]);
        }
        ctx.warp_sync();
        return true;
    }

    // Copies the rows of the plan's packets one behind the other. Returns their number, or 0 if a rank has told what
    // cannot be: then the group has failed.
    CROSSDOCK_DEVICE uint32_t gather_choices(const Ctx& ctx, uint32_t num, std::byte* to) const {
        const HtCommon& c = args_.common;
        const uint32_t most = rows_of_token(c.topk, c.arena.experts_per_rank * team_size(c));
        uint32_t rows = 0;
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < num; ++i) {
            const uint32_t last = ctx.warp_broadcast(is_leader(ctx) ? *last_row_of(args_, plan_.rows[i]) : 0u);
            const uint32_t of_rank = rows_of_token(c.topk, c.arena.experts_per_rank);
            const uint32_t fits = most - rows < of_rank ? most - rows : of_rank;
            if (last >= fits) {
                if (is_leader(ctx)) {
                    refuse_number(ctx, c, operation_, PeerNumber::kExpertsOfToken, plan_.origins[i], fits,
                                  uint64_t{last} + 1);
                }
                return 0;
            }
            CROSSDOCK_ROLLED
            for (uint32_t row = 0; row <= last; ++row, ++rows) {
                copy_row(ctx, plan_.rows[i] + rows_begin<kWire>(args_) + row * args_.row_bytes, args_.row_bytes, 1,
                         [&](uint32_t) { return to + rows * args_.row_bytes; });
            }
        }
        wait_row_copies(ctx);
        return rows;
    }

    // Elastic. The weights that came with the plan's rows: each column is of one rank, and 0 for the others.
    CROSSDOCK_DEVICE void merge_words(const Ctx& ctx, uint32_t source, uint32_t token, uint32_t num,
                                      std::byte* to) const {
        for_lanes(ctx, args_.weight_bytes == 0 ? 0 : args_.common.topk, [&](uint32_t column) {
            uint32_t word = 0;
            CROSSDOCK_ROLLED
            for (uint32_t i = 0; i < num; ++i) {
                word |= word_of_lsa_row<kWire>(ctx, args_, source, token, plan_.origins[i], plan_.rows[i], column);
            }
            reinterpret_cast<uint32_t*>(to)[column] = word;
        });
    }

    // Writes the rows of this team's ranks for the token into the plan, and their number. Returns false if one does not
    // arrive.
    CROSSDOCK_DEVICE bool find_rows(const Ctx& ctx, uint32_t team, uint32_t token, const Share& share,
                                    uint32_t& num) const {
        const HtCommon& c = args_.common;
        const uint32_t source = rail_peer(c, team);
        bool are_here = true;
        CROSSDOCK_ROLLED
        for (uint32_t base = first_of_team(c); base < end_of_team(c); base += kLanes) {
            const uint32_t peer = base + ctx.lane();
            const std::byte* row = nullptr;
            SentRow sent{false, 0, 0};
            if (peer < end_of_team(c)) {
                sent = rail_row(c, route_of(c, source, peer), token, share);
                are_here = has_lsa_row(ctx, args_, operation_, source, peer, sent);
            }
            if (!ctx.warp_all(are_here) && is_leader(ctx)) sender_.send_filled(ctx);
            ctx.warp_sync();
            if (peer < end_of_team(c)) are_here = find_lsa_row(ctx, args_, operation_, source, peer, sent, row);
            num += note_rows(ctx, plan_, num, row, peer, sent.packet);
            if (!ctx.warp_all(are_here)) return false;
        }
        ctx.warp_sync();
        return true;
    }

    const Args& args_;
    const Operation& operation_;
    uint32_t channel_;
    HtPlan plan_;
    GinSender sender_;
};

}  // namespace
}  // namespace crossdock
