// SPDX-License-Identifier: Apache-2.0
// High-throughput dispatch between teams: a row is sent once to each team that needs it, to the rail peer there, which
// forwards it to the ranks of its experts like a row of its own team. Both halves work in the order of tokens within
// their channel, like all others.
#pragma once

#include "kernels/ht/elastic_words.h"
#include "kernels/ht/publish.h"
#include "kernels/ht/weights.h"

namespace crossdock {
namespace {

// Sends own rows to the rail peers. warp: among the `warps` of this block that do this, each for some of the teams.
template <typename Args>
CROSSDOCK_DEVICE void cross_rows(const Ctx& ctx, const Args& args, const Operation& operation, uint32_t warp,
                                 uint32_t warps) {
    const HtCommon& c = args.common;
    const uint32_t channel = ctx.block_idx();
    const uint32_t row_bytes = args.row_bytes;
    const Share share = token_share(c, c.rank, channel);
    const GinSender sender(c, operation, args.gin_rows, row_bytes + args.scale_bytes, channel, warp, warps);
    const auto send = [&](uint32_t token, uint32_t team) {
        const SentRow row = crossing_row(c, Crossing::kOut, team, token, share);
        if (!row.exists) return true;
        const GinRing ring = GinRing::of_rows(c, team, channel);
        const bool may_send = is_leader(ctx) && sender.wait_credit(ctx, ring, row.packet);
        if (ctx.warp_broadcast(may_send ? 1u : 0u) == 0) return false;
        std::byte* const packet = ring.outgoing(args.gin_rows, row.packet);
        // A handle that uses another's memory may have fewer tokens.
        if (token < c.num_tokens) {
            copy_row(ctx, args.tokens + uint64_t{token} * row_bytes, row_bytes, 1, [&](uint32_t) { return packet; });
            if constexpr (kIsElastic<Args>) {
                gather_words(ctx, args, token, packet + row_bytes);
            } else if (args.scale_bytes > 0) {
                copy_scales(ctx, args.scales + uint64_t{token} * args.scale_bytes, args.scale_bytes, 1,
                            [&](uint32_t) { return packet + row_bytes; });
            }
        }
        wait_row_copies(ctx);
        if (is_leader(ctx)) {
            sender.send_later(ctx, ring, row.packet);
            count_rows(ctx, c.reach, rail_peer(c, team), 1, 0);
        }
        ctx.warp_sync();
        return true;
    };
    CROSSDOCK_ROLLED
    for (uint32_t token = share.first; token < share.end; ++token) {
        if (!sender.for_teams([&](uint32_t team) { return send(token, team); })) return;
    }
    if (is_leader(ctx)) sender.send_filled(ctx);
}

// Forwards rows of other teams' source ranks to the ranks of this team.
template <typename Args>
class RowForwarder {
  public:
    CROSSDOCK_DEVICE RowForwarder(const Ctx& ctx, const Args& args, const Operation& operation)
        : args_(args), operation_(operation), channel_(ctx.block_idx()) {}

    // warp: among the `warps` of this block that forward.
    CROSSDOCK_DEVICE void run(const Ctx& ctx, uint32_t warp, uint32_t warps) const {
        const HtCommon& c = args_.common;
        const uint32_t end = largest_share(c, channel_, token_share);
        CROSSDOCK_ROLLED
        for (uint32_t at = warp; at < end; at += warps) {
            CROSSDOCK_ROLLED
            for (uint32_t i = 1; i < num_teams(c); ++i) {
                const uint32_t team = (own_team(c) + num_teams(c) - i) % num_teams(c);
                const Share share = token_share(c, rail_peer(c, team), channel_);
                if (at < share.size() && !forward(ctx, team, share.first + at, share)) return;
            }
        }
    }

  private:
    // Returns false if the group has failed.
    CROSSDOCK_DEVICE bool forward(const Ctx& ctx, uint32_t team, uint32_t token, const Share& share) const {
        const HtCommon& c = args_.common;
        const SentRow row = crossing_row(c, Crossing::kIn, team, token, share);
        if (!row.exists) return true;
        const GinRing from = GinRing::of_rows(c, team, channel_);
        const bool is_here = is_leader(ctx) && from.wait_packet(ctx, operation_, args_.gin_rows, row.packet);
        if (ctx.warp_broadcast(is_here ? 1u : 0u) == 0) return false;
        const std::byte* const packet = from.incoming(args_.gin_rows, row.packet);
        CROSSDOCK_ROLLED
        for (uint32_t peer = first_of_team(c); peer < end_of_team(c); ++peer) {
            if (!pass_on(ctx, team, peer, token, share, packet)) return false;
        }
        if (is_leader(ctx)) from.give_credit(ctx, operation_, args_.gin_rows, row.packet);
        ctx.warp_sync();
        return true;
    }

    // To one of the team's ranks, if it needs the row: to its final place or into a packet.
    CROSSDOCK_DEVICE bool pass_on(const Ctx& ctx, uint32_t team, uint32_t peer, uint32_t token, const Share& share,
                                  const std::byte* packet) const {
        const HtCommon& c = args_.common;
        const uint32_t source = rail_peer(c, team);
        const uint32_t route = route_of(c, source, peer);
        const SentRow row = rail_row(c, route, token, share);
        const uint64_t number = uint64_t{c.tables.bases[route]} + row.number;
        if (!row.exists || !travels(c, static_cast<uint32_t>(number))) return true;
        const uint32_t row_bytes = args_.row_bytes;
        if (is_leader(ctx)) count_rows(ctx, c.reach, peer, 1, uint64_t{row_bytes} + args_.scale_bytes);
        if (peer_states(ctx, args_.shared)[peer] == kDirect) {
            if (peer == c.rank) {
                place_own(ctx, source, token, static_cast<uint32_t>(number), packet);
            } else {
                copy(ctx, packet, args_.token_windows.at(peer, number * row_bytes),
                     args_.scale_bytes == 0 ? nullptr : args_.scale_windows.at(peer, number * args_.scale_bytes));
            }
            return true;
        }
        const LsaRing ring = LsaRing::dispatch_to(c, source, peer, channel_);
        const bool may_send = is_leader(ctx) && ring.wait_credit(ctx, operation_, args_.rows, row.packet);
        if (ctx.warp_broadcast(may_send ? 1u : 0u) == 0) return false;
        std::byte* const to = ring.packet(args_.rows, row.packet);
        copy(ctx, packet, to, to + row_bytes);
        if (is_leader(ctx)) ring.release_flag(ctx, operation_, args_.rows, row.packet);
        ctx.warp_sync();
        return true;
    }

    // To its places in this rank's tensors.
    CROSSDOCK_DEVICE void place_own(const Ctx& ctx, uint32_t source, uint32_t token, uint32_t number,
                                    const std::byte* packet) const {
        const HtCommon& c = args_.common;
        uint32_t* const slots = HtPlan::of_warp(ctx, args_.shared, c.topk).slots;
        const uint32_t num =
            list_slots(ctx, c, source, token / kChunkTokens, token % kChunkTokens, number, args_.token_rows, slots);
        ctx.warp_sync();
        copy_row(ctx, packet, args_.row_bytes, num,
                 [&](uint32_t i) { return args_.out_tokens + uint64_t{slots[i]} * args_.row_bytes; });
        if constexpr (kIsElastic<Args>) {
            place_words(ctx, args_, source, token, number, packet + args_.row_bytes, slots, num);
        } else if (args_.scale_bytes > 0) {
            copy_scales(ctx, packet + args_.row_bytes, args_.scale_bytes, num,
                        [&](uint32_t i) { return args_.out_scales + uint64_t{slots[i]} * args_.scale_bytes; });
        }
        wait_row_copies(ctx);
        PublisherOf<Args>(ctx, args_).publish(ctx, slots, num, false);
    }

    CROSSDOCK_DEVICE void copy(const Ctx& ctx, const std::byte* packet, std::byte* row, std::byte* scales) const {
        copy_row(ctx, packet, args_.row_bytes, 1, [&](uint32_t) { return row; });
        if (args_.scale_bytes > 0)
            copy_scales(ctx, packet + args_.row_bytes, args_.scale_bytes, 1, [&](uint32_t) { return scales; });
        wait_row_copies(ctx);
    }

    const Args& args_;
    const Operation& operation_;
    uint32_t channel_;
};

}  // namespace
}  // namespace crossdock
