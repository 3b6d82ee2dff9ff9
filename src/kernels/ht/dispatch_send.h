// SPDX-License-Identifier: Apache-2.0
// High-throughput dispatch, send half: a warp takes a token, loads its row once, and stores it to every rank that hosts
// one of its experts: directly to its slots if those are this rank's own or the receiver's tensors are in windows, else
// into a packet of the receiver's ring.
//
// In all four halves a warp works in the order of tokens within its channel, and waits only for earlier tokens. So some
// warp can always continue, however small the rings are.
#pragma once

#include "device/row_copy.h"
#include "kernels/ht/elastic_words.h"
#include "kernels/ht/flags.h"
#include "kernels/ht/publish.h"

namespace crossdock {
namespace {

// One step of a warp: sends a part of a token's row to some peers, one lane per peer. The last part includes the row's
// scales.
struct SendStep {
    uint32_t token;
    uint32_t base;   // the first of the peers
    uint32_t first;  // byte of the row

    CROSSDOCK_DEVICE uint32_t bytes(const HtDispatchArgs& args) const {
        const uint32_t left = args.row_bytes - first;
        return left < args.warp_layout.chunk_bytes ? left : args.warp_layout.chunk_bytes;
    }
    CROSSDOCK_DEVICE bool is_last(const HtDispatchArgs& args) const {
        return first + args.warp_layout.chunk_bytes >= args.row_bytes;
    }
};

// The places of a row at a lane's peer: some slots from an address on. This rank's own slots are in the warp's plan,
// peers have only slot 0.
struct Target {
    uint32_t num_slots;
    bool is_direct;
    bool is_own;
    uint32_t number;  // among all rows that the peer receives
    uint32_t packet;
    std::byte* rows;
    std::byte* scales;
};

template <typename Args>
class RowSender {
  public:
    CROSSDOCK_DEVICE RowSender(const Ctx& ctx, const Args& args, const Operation& operation)
        : args_(args),
          operation_(operation),
          channel_(ctx.block_idx()),
          share_(Share::of(args.common.tables.routing->num_tokens, channel_, args.common.channels)),
          claims_(are_all_direct(ctx, args.common, args.shared)),
          slots_(HtPlan::of_warp(ctx, args.shared, args.common.topk).slots),
          flag_(args.warp_layout, args.shared, ctx.warp_idx()),
          publisher_(ctx, args) {
        // A handle that uses another's memory may have fewer tokens.
        const uint32_t routed = args.common.tables.routing->num_tokens;
        end_ = routed < args.common.num_tokens ? routed : args.common.num_tokens;
        if (!claims_ && share_.end < end_) end_ = share_.end;
        if (claims_ && args.common.windows_are_inputs) end_ = 0;  // receivers read all rows
    }

    // With a second stage, a row is loaded while the previous one is sent.
    CROSSDOCK_DEVICE void run(const Ctx& ctx) {
        const bool prefetches = args_.warp_layout.producer_stages > 1;
        SendStep step{claims_ ? claim_next(ctx, args_.common, operation_) : share_.first + ctx.warp_idx(), 0, 0};
        if (claims_) claimed_ = ask_next(ctx, args_.common, operation_);
        if (prefetches) load(ctx, step, 0);
        Target target = target_of(ctx, step);
        CROSSDOCK_ROLLED
        for (uint32_t round = 0; step.token < end_; ++round) {
            ctx.enter(Phase::kDispatchStage);
            const SendStep next = next_step(ctx, step);
            load(ctx, prefetches ? next : step, prefetches ? round + 1 : round);
            if (claims_ && next.token != step.token) claimed_ = ask_next(ctx, args_.common, operation_);
            ctx.enter(Phase::kDispatchTarget);
            raise(ctx);
            if (step.first == 0) wait_credit(ctx, step, target);
            const RowStage from = stage(ctx, round);
            ctx.enter(Phase::kDispatchLoad);
            from.wait_loaded(ctx, round / args_.warp_layout.producer_stages);
            ctx.enter(Phase::kDispatchStore);
            for (RowStage::Turns turns(ctx, target.num_slots > 0); turns.next();) {
                CROSSDOCK_ROLLED
                for (uint32_t i = 0; i < target.num_slots; ++i) {
                    const uint64_t slot = target.is_own ? slots_[i] : 0;
                    from.store(ctx, target.rows + slot * args_.row_bytes + step.first, 0, step.bytes(args_),
                               !target.is_direct);
                    const bool with_scales = args_.scale_bytes > 0 && !(kIsElastic<Args> && target.is_own);
                    if (with_scales && step.is_last(args_))
                        from.store(ctx, target.scales + slot * args_.scale_bytes, step.bytes(args_), args_.scale_bytes);
                }
            }
            RowStage::end_group(ctx);
            if constexpr (kIsElastic<Args>) {
                if (step.is_last(args_)) place_own_words(ctx, step, target, from.data() + step.bytes(args_));
            }
            if (step.is_last(args_)) {
                if (target.num_slots > 0 && !target.is_direct) flag_.set(peer_of(ctx, step), target.packet);
                publish_own(ctx, target);
            }
            // While the stores go on: a look-up is a chain of loads.
            if (next.first == 0) target = target_of(ctx, next);
            step = next;
        }
        ctx.enter(Phase::kDispatchEnd);
        raise(ctx);
        flag_.end(ctx);
        // The block announces rows that were stored directly, once all its warps have come here.
        RowStage::wait_stores(ctx);
        ctx.fence_landed();
    }

  private:
    CROSSDOCK_DEVICE RowStage stage(const Ctx& ctx, uint32_t round) const {
        return stage_of_warp(ctx, args_.warp_layout, args_.shared, round % args_.warp_layout.producer_stages);
    }
    CROSSDOCK_DEVICE SendStep next_step(const Ctx& ctx, const SendStep& step) const {
        if (!step.is_last(args_)) return {step.token, step.base, step.first + args_.warp_layout.chunk_bytes};
        if (step.base + kLanes < team_size(args_.common)) return {step.token, step.base + kLanes, 0};
        return {claims_ ? ctx.warp_broadcast(claimed_) : step.token + args_.warp_layout.producers, 0, 0};
    }
    CROSSDOCK_DEVICE void load(const Ctx& ctx, const SendStep& step, uint32_t round) const {
        if (step.token >= end_) return;
        const RowStage to = stage(ctx, round);
        to.wait_reusable(ctx, args_.warp_layout.producer_stages > 2 ? 1 : 0);
        ctx.warp_sync();
        if constexpr (kIsElastic<Args>) {
            if (const RowStage::Lead lead{ctx})
                to.load(ctx, args_.tokens + uint64_t{step.token} * args_.row_bytes + step.first, step.bytes(args_));
            if (!step.is_last(args_)) return;
            gather_words(ctx, args_, step.token, to.data() + step.bytes(args_));
            RowStage::filled();
            return ctx.warp_sync();
        }
        bool with_scales = args_.scale_bytes > 0 && step.is_last(args_);
        const std::byte* scales = with_scales ? args_.scales + uint64_t{step.token} * args_.scale_bytes : nullptr;
        if (!RowStage::takes(scales)) {
            copy_scales(ctx, scales, args_.scale_bytes, 1, [&](uint32_t) { return to.data() + step.bytes(args_); });
            to.filled();
            ctx.warp_sync();
            with_scales = false;
        }
        const RowStage::Lead lead(ctx);
        if (!lead) return;
        to.load(ctx, args_.tokens + uint64_t{step.token} * args_.row_bytes + step.first, step.bytes(args_), scales,
                with_scales ? args_.scale_bytes : 0);
    }
    // Before the warp waits for anyone: other ranks may need these rows to continue.
    CROSSDOCK_DEVICE void raise(const Ctx& ctx) { flag_.raise_all(ctx, args_.common, operation_, args_.rows); }

    // Elastic: if one of the lanes' peers is this rank.
    CROSSDOCK_DEVICE void place_own_words(const Ctx& ctx, const SendStep& step, const Target& target,
                                          const std::byte* words) const {
        const uint32_t lanes = ctx.warp_ballot(target.is_own);
        if (lanes == 0) return;
        const uint32_t own = lowest_one(lanes);
        ctx.warp_sync();
        place_words(ctx, args_, args_.common.rank, step.token, ctx.warp_broadcast_from(own, target.number), words,
                    slots_, ctx.warp_broadcast_from(own, target.num_slots));
    }

    // The same of a dispatch that publishes rows.
    CROSSDOCK_DEVICE void publish_own(const Ctx& ctx, const Target& target) const {
        if constexpr (!kPublishes<Args>) return;
        const bool has_own = target.is_own && target.num_slots > 0;
        const uint32_t lanes = ctx.warp_ballot(has_own);
        if (lanes == 0) return;
        publisher_.publish(ctx, slots_, ctx.warp_broadcast_from(lowest_one(lanes), target.num_slots), has_own);
    }

    // If one of the lanes' peers is this rank: the row's places here.
    CROSSDOCK_DEVICE void list_own_slots(const Ctx& ctx, const SendStep& step, Target& target) const {
        const uint32_t lanes = ctx.warp_ballot(target.is_own);
        if (lanes == 0) return;
        ctx.warp_sync();  // the places before have been read
        const uint32_t num =
            list_slots(ctx, args_.common, args_.common.rank, step.token / kChunkTokens, step.token % kChunkTokens,
                       ctx.warp_broadcast_from(lowest_one(lanes), target.number), args_.token_rows, slots_);
        ctx.warp_sync();
        if (target.is_own) target.num_slots = num;
    }

    // The lane's peer, of those of this team.
    CROSSDOCK_DEVICE uint32_t peer_of(const Ctx& ctx, const SendStep& step) const {
        return first_of_team(args_.common) + step.base + ctx.lane();
    }

    // Where a token's row goes. Waits for nobody.
    CROSSDOCK_DEVICE Target target_of(const Ctx& ctx, const SendStep& step) {
        if (step.token >= end_) return {};
        Target target = target_of_lane(ctx, step);
        list_own_slots(ctx, step, target);
        return target;
    }
    CROSSDOCK_DEVICE Target target_of_lane(const Ctx& ctx, const SendStep& step) {
        const HtCommon& c = args_.common;
        const uint32_t peer = peer_of(ctx, step);
        Target target{};
        if (peer >= end_of_team(c)) return target;
        const uint32_t state = peer_states(ctx, args_.shared)[peer];
        if (state == kAbsent || state == kReadable) return target;
        const SentRow sent = sent_row(c, peer, step.token, share_);
        const uint32_t number = c.tables.bases[peer] + sent.number;
        if (!sent.exists || !travels(c, number)) return target;
        count_rows(ctx, c.reach, peer, 1, uint64_t{args_.row_bytes} + args_.scale_bytes);
        target.is_direct = state == kDirect;
        target.is_own = target.is_direct && peer == c.rank;
        target.packet = sent.packet;
        target.number = number;
        if (target.is_own) {
            target.rows = args_.out_tokens;
            target.scales = args_.out_scales;
            return target;
        }
        target.num_slots = 1;
        if (target.is_direct) {
            target.rows = args_.token_windows.at(peer, uint64_t{number} * args_.row_bytes);
            if (args_.scale_bytes > 0)
                target.scales = args_.scale_windows.at(peer, uint64_t{number} * args_.scale_bytes);
            return target;
        }
        target.rows = LsaRing::dispatch_to(c, c.rank, peer, channel_).packet(args_.rows, sent.packet);
        target.scales = target.rows + args_.row_bytes;
        return target;
    }

    // Until the packet that the row goes into is free, if it goes into one. Without its receiver it goes nowhere.
    CROSSDOCK_DEVICE void wait_credit(const Ctx& ctx, const SendStep& step, Target& target) const {
        if (target.num_slots == 0 || target.is_direct) return;
        const LsaRing ring = LsaRing::dispatch_to(args_.common, args_.common.rank, peer_of(ctx, step), channel_);
        if (!ring.wait_credit(ctx, operation_, args_.rows, target.packet)) target.num_slots = 0;
    }

    const Args& args_;
    const Operation& operation_;
    uint32_t channel_;
    Share share_;           // of the own tokens
    bool claims_;           // warps claim tokens one by one when they are free
    uint32_t claimed_ = 0;  // the token after the next, claimed in advance; known to the leader
    uint32_t* slots_;
    uint32_t end_;
    PendingFlag flag_;
    PublisherOf<Args> publisher_;
};

}  // namespace
}  // namespace crossdock
