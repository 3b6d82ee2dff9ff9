// SPDX-License-Identifier: Apache-2.0
// High-throughput combine: a pipeline of a block's warps that computes the block's sums. The first warp, the planner,
// finds the summands. The second, the loader, fetches them into stages, one after the other. Summers add up the
// summands of each sum, each warp its own bytes, and leave the sum in the stage of the last summand. Senders take turns
// to store it at its target.
//
// Expert-major, a sum is a row that returns to its source rank, and its summands lie in this rank's tensor. A single
// summand is not changed, unless rows are quantised: its source rank adds it to 0 like all others. Flat, a sum is one
// of this rank's own tokens, and its summands lie in windows.
#pragma once

#include "device/block_barrier.h"
#include "kernels/ht/combine_rows.h"
#include "kernels/ht/combine_send.h"

namespace crossdock {
namespace {

// The head of a stage. Sums pass through stages in parts, each of some summands, which take the stages in turn. Part n
// is described in the head of stage n (in turn, too): a part takes at least one stage, so by the time the loader has a
// stage for part n, the part described there before has been sent.
struct SumStageHead {
    std::byte of_row_stage[32];
    BlockBarrierMemory loaded;  // the summand has been loaded
    BlockBarrierMemory free;    // summers have added it, or, for the last summand, a sender has sent the sum
    BlockBarrierMemory summed;  // the part has been summed
    PlannedRow row;             // of the part, with one slot per summand
    uint32_t last_stage;        // of its summands
};
static_assert(sizeof(SumStageHead) <= kStageHeadBytes);

// The heads of the two batches that planner and loader use in turn.
struct SumPlanHead {
    BlockBarrierMemory planned;
    BlockBarrierMemory used;  // its rows have been loaded
    uint32_t num_rows;        // 0: there are no more
};
static_assert(2 * sizeof(SumPlanHead) <= kSumPlanHeadBytes);

// Takes the stages of a block in turn.
class StageTurn {
  public:
    CROSSDOCK_DEVICE StageTurn(const Ctx& ctx, const HtCombineArgs& args)
        : first_(args.shared.stages.in(ctx.shared_memory())),
          stage_bytes_(args.shared.stage_bytes),
          end_(args.warp_layout.shared_stages * args.shared.stage_bytes) {}

    CROSSDOCK_DEVICE SumStageHead& head() const { return *reinterpret_cast<SumStageHead*>(first_ + at_); }
    CROSSDOCK_DEVICE SumStageHead& head_at(uint32_t at) const { return *reinterpret_cast<SumStageHead*>(first_ + at); }
    CROSSDOCK_DEVICE RowStage stage_at(uint32_t at) const { return RowStage(first_ + at); }
    CROSSDOCK_DEVICE std::byte* data() const { return first_ + at_ + kStageHeadBytes; }

    CROSSDOCK_DEVICE uint32_t at() const { return at_; }        // bytes from the first stage
    CROSSDOCK_DEVICE uint32_t round() const { return round_; }  // how often the stage has been taken before
    // The offset of the stage `turns` turns later; fewer than there are stages.
    CROSSDOCK_DEVICE uint32_t at_after(uint32_t turns) const {
        const uint32_t at = at_ + turns * stage_bytes_;
        return at < end_ ? at : at - end_;
    }
    // By at most as many turns as there are stages.
    CROSSDOCK_DEVICE void advance(uint32_t turns = 1) {
        at_ += turns * stage_bytes_;
        if (at_ < end_) return;
        at_ -= end_;
        ++round_;
    }

  private:
    std::byte* first_;
    uint32_t stage_bytes_;
    uint32_t end_;
    uint32_t at_ = 0;
    uint32_t round_ = 0;
};

template <DType kDType, HtWire kWire, typename Args>
class SumPipeline {
  public:
    // Followed by a block barrier.
    CROSSDOCK_DEVICE static void init(const Ctx& ctx, const Args& args) {
        StageTurn turn(ctx, args);
        CROSSDOCK_ROLLED
        for (; thread_idx(ctx) == 0 && turn.round() == 0; turn.advance()) {
            turn.stage_at(turn.at()).init();
            BlockBarrier(turn.head().loaded).init(BlockBarrier::kArrivalsOfLoad);
            BlockBarrier(turn.head().free).init(args.warp_layout.summers);
            BlockBarrier(turn.head().summed).init(args.warp_layout.summers);
        }
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; thread_idx(ctx) == 0 && i < 2; ++i) {
            BlockBarrier(plan_head(ctx, args, i).planned).init(kLanes);
            BlockBarrier(plan_head(ctx, args, i).used).init(1);
        }
        RowStage::initialised();
    }

    CROSSDOCK_DEVICE SumPipeline(const Ctx& ctx, const Args& args, const Operation& operation)
        : args_(args),
          operation_(operation),
          is_local_(!kHasGinPeers && !args.common.expert_major),
          own_(own_tokens(ctx, args)),
          num_parts_((args.row_bytes + args.warp_layout.chunk_bytes - 1) / args.warp_layout.chunk_bytes),
          part_(ctx, args),
          summand_(ctx, args) {}

    // warp: among the block's producers.
    CROSSDOCK_DEVICE void run(const Ctx& ctx, uint32_t warp) {
        const uint32_t summers = args_.warp_layout.summers;
        if (warp == 0) return plan_all(ctx);
        if (warp == 1) return load_all(ctx);
        const uint32_t num_rows = is_local_ ? own_.size() : num_returned_rows(ctx, args_);
        if (warp < 2 + summers) {
            sum_all(ctx, num_rows, (warp - 2) * args_.warp_layout.summed_bytes);
        } else {
            send_all(ctx, num_rows, warp - 2 - summers, args_.warp_layout.senders);
        }
    }

  private:
    CROSSDOCK_DEVICE uint32_t part_bytes(uint32_t i) const {
        const uint32_t left = args_.row_bytes - i * args_.warp_layout.chunk_bytes;
        return left < args_.warp_layout.chunk_bytes ? left : args_.warp_layout.chunk_bytes;
    }

    CROSSDOCK_DEVICE static SumPlanHead& plan_head(const Ctx& ctx, const HtCombineArgs& args, uint32_t n) {
        return reinterpret_cast<SumPlanHead*>(args.shared.plan_heads.in(ctx.shared_memory()))[n % 2];
    }
    CROSSDOCK_DEVICE HtBatch batch(const Ctx& ctx, uint32_t n) const {
        return HtBatch::of(ctx, args_.shared, args_.common.topk, n % 2);
    }

    // The addresses of the summands of a batch's first row, of its second, ...
    CROSSDOCK_DEVICE const std::byte** summands_of_plan(const Ctx& ctx, uint32_t n) const {
        const uint32_t topk = args_.common.topk;
        return args_.shared.plan_summands.in(ctx.shared_memory()) + n % 2 * planned_rows(topk) * topk;
    }

    // This rank's tokens that this block sums. A handle that uses another's memory may have fewer.
    CROSSDOCK_DEVICE static Share own_tokens(const Ctx& ctx, const HtCombineArgs& args) {
        const HtCommon& c = args.common;
        Share own = token_share(c, c.rank, ctx.block_idx());
        if (own.end > c.num_tokens) own.end = c.num_tokens > own.first ? c.num_tokens : own.first;
        return own;
    }

    // One warp, one lane per token. Returns the number of rows.
    CROSSDOCK_DEVICE uint32_t plan_own(const Ctx& ctx, uint32_t n) const {
        const HtCommon& c = args_.common;
        const uint32_t most = planned_rows(c.topk) < kLanes ? planned_rows(c.topk) : kLanes;
        const uint32_t first = own_.first + n * most;
        const uint32_t left = first < own_.end ? own_.end - first : 0;
        const uint32_t num = left < most ? left : most;
        const uint32_t lane = ctx.lane();
        if (lane >= num) return num;
        const Share share = token_share(c, c.rank, ctx.block_idx());
        PlannedRow row{};
        row.number = first + lane;
        const std::byte** const summands = summands_of_plan(ctx, n) + lane * c.topk;
        CROSSDOCK_ROLLED
        for (uint32_t peer = first_of_team(c); peer < end_of_team(c); ++peer) {
            const std::byte* summand = nullptr;
            if (peer_states(ctx, args_.shared)[peer] != kAbsent)
                find_lsa_row(ctx, args_, operation_, c.rank, peer, sent_row(c, peer, row.number, share), summand);
            if (summand != nullptr) summands[row.num_slots++] = summand;
        }
        batch(ctx, n).rows[lane] = row;
        return num;
    }

    // The same for rows that return to their source ranks.
    CROSSDOCK_DEVICE uint32_t plan_returned(const Ctx& ctx, RowBatches<kPlacesOfSum<Args>>& rows, uint32_t n) const {
        const HtBatch to = batch(ctx, n);
        const uint32_t topk = args_.common.topk;
        const uint32_t num = rows.look_up(ctx, to);
        const std::byte** const summands = summands_of_plan(ctx, n);
        CROSSDOCK_ROLLED
        for (uint32_t at = ctx.lane(); at < num * topk; at += kLanes) {
            if (at % topk < to.rows[at / topk].num_slots)
                summands[at] = args_.tokens + uint64_t{to.slots[at]} * args_.row_bytes;
        }
        return num;
    }

    CROSSDOCK_DEVICE void plan_all(const Ctx& ctx) const {
        RowBatches<kPlacesOfSum<Args>> rows(ctx, args_.common, args_.shared, {0, 1, false, false, args_.token_rows});
        uint32_t num = 1;
        CROSSDOCK_ROLLED
        for (uint32_t n = 0; num > 0; ++n) {
            SumPlanHead& head = plan_head(ctx, args_, n);
            ctx.enter(Phase::kCombineStage);
            BlockBarrier(head.used).wait_for_turn(ctx, n / 2);
            ctx.enter(Phase::kCombineSlot);
            num = is_local_ ? plan_own(ctx, n) : plan_returned(ctx, rows, n);
            if (is_leader(ctx)) head.num_rows = num;
            BlockBarrier(head.planned).arrive(ctx);  // every lane, for its own writes
        }
    }

    // One warp. It limits a block's speed if nothing else does, so its loop is short, and its lanes load a part's
    // summands together.
    CROSSDOCK_DEVICE void load_all(const Ctx& ctx) {
        if (is_local_) ctx.fence_async_copies();  // ordinary loads have seen that peers' rows may be read
        CROSSDOCK_ROLLED
        for (uint32_t n = 0;; ++n) {
            SumPlanHead& head = plan_head(ctx, args_, n);
            ctx.enter(Phase::kCombineSlot);
            BlockBarrier(head.planned).wait(ctx, n / 2);
            ctx.enter(Phase::kCombineStage);
            const PlannedRow* const rows = batch(ctx, n).rows;
            const std::byte* const* const summands = summands_of_plan(ctx, n);
            const uint32_t num = head.num_rows;
            CROSSDOCK_ROLLED
            for (uint32_t row = 0; row < num; ++row) {
                CROSSDOCK_ROLLED
                for (uint32_t i = 0; i < num_parts_; ++i, part_.advance())
                    load(ctx, rows[row], summands + row * args_.common.topk, i);
            }
            if (num == 0) break;
            ctx.warp_sync();
            if (is_leader(ctx)) BlockBarrier(head.used).arrive(ctx);
        }
    }

    CROSSDOCK_DEVICE void load(const Ctx& ctx, const PlannedRow& row, const std::byte* const* summands, uint32_t i) {
        const uint32_t num = row.num_slots;
        const uint32_t first = i * args_.warp_layout.chunk_bytes;
        const uint32_t bytes = part_bytes(i);
        const uint32_t lane = ctx.lane();
        uint32_t done = 0;
        do {
            const uint32_t left = num > 0 ? num - done : 1;  // a sum of nothing takes a stage, too
            uint32_t loads = left < args_.warp_layout.shared_stages ? left : args_.warp_layout.shared_stages;
            if (loads > kLanes) loads = kLanes;
            for (RowStage::Turns turns(ctx, lane < loads); turns.next();) {
                if (lane < loads) {
                    StageTurn own = summand_;
                    own.advance(lane);
                    BlockBarrier(own.head().free).wait_for_turn(ctx, own.round());
                    if (lane == 0 && done == 0) {
                        part_.head().row = row;
                        part_.head().last_stage = last_stage(num);
                    }
                    const BlockBarrier loaded(own.head().loaded);
                    if (num > 0) {
                        loaded.arrive_with_load(ctx, own.data(), summands[done + lane] + first, bytes);
                    } else {
                        loaded.arrive(ctx, BlockBarrier::kArrivalsOfLoad);
                    }
                }
            }
            ctx.warp_sync();  // a lane that ran ahead would mistake one phase for another
            summand_.advance(loads);
            done += loads;
        } while (done < num);
    }

    // The last stage of a part whose first summand takes the next stage.
    CROSSDOCK_DEVICE uint32_t last_stage(uint32_t summands) const {
        uint32_t turns = summands > 1 ? summands - 1 : 0;
        CROSSDOCK_ROLLED
        for (; turns >= args_.warp_layout.shared_stages; turns -= args_.warp_layout.shared_stages) {
        }
        return summand_.at_after(turns);
    }

    CROSSDOCK_DEVICE void sum_all(const Ctx& ctx, uint32_t num_rows, uint32_t first) {
        CROSSDOCK_ROLLED
        for (uint32_t row = 0; row < num_rows; ++row) {
            CROSSDOCK_ROLLED
            for (uint32_t i = 0; i < num_parts_; ++i, part_.advance(), summand_.advance()) {
                const uint32_t left = first < part_bytes(i) ? part_bytes(i) - first : 0;
                sum(ctx, first, left < args_.warp_layout.summed_bytes ? left : args_.warp_layout.summed_bytes);
            }
        }
    }

    // Bytes [first, first + bytes) of a part. Summands are added in pairs: to wait for a stage, to load from it and to
    // free it takes a warp longer than to add.
    CROSSDOCK_DEVICE void sum(const Ctx& ctx, uint32_t first, uint32_t bytes) {
        wait_loaded(ctx);
        const uint32_t summands = part_.head().row.num_slots;
        if (summands != 1 || is_local_ || is_quantised(kWire)) {
            PartSum<kDType> result;
            uint32_t left = summands;
            CROSSDOCK_ROLLED
            for (; left > 2; left -= 2) {
                const StageTurn before = add_pair(ctx, result, first, bytes);
                if (is_leader(ctx)) {
                    BlockBarrier(before.head().free).arrive(ctx);
                    BlockBarrier(summand_.head().free).arrive(ctx);
                }
                summand_.advance();
                wait_loaded(ctx);
            }
            if (left == 2) {
                const StageTurn before = add_pair(ctx, result, first, bytes);
                if (is_leader(ctx)) BlockBarrier(before.head().free).arrive(ctx);
            } else if (left == 1) {
                result.add(ctx, {summand_.data() + first}, bytes);
            }
            store_share<kWire>(ctx, result, summand_.data() + first, bytes);
            summand_.stage_at(summand_.at()).filled();
        }
        ctx.warp_sync();
        if (is_leader(ctx)) BlockBarrier(part_.head().summed).arrive(ctx);
    }

    // The next summand, which has been loaded, and the one after it, where summand_ then is. Returns the first one's
    // stage. All lanes have loaded their values when it ends: the next copies into the stages need no fence.
    CROSSDOCK_DEVICE StageTurn add_pair(const Ctx& ctx, PartSum<kDType>& result, uint32_t first, uint32_t bytes) {
        const StageTurn before = summand_;
        summand_.advance();
        wait_loaded(ctx);
        result.add(ctx, {before.data() + first, summand_.data() + first}, bytes);
        ctx.warp_sync();
        return before;
    }

    CROSSDOCK_DEVICE void wait_loaded(const Ctx& ctx) {
        ctx.enter(Phase::kCombineStage);
        BlockBarrier(summand_.head().loaded).wait(ctx, summand_.round());
        ctx.enter(Phase::kCombineSum);
    }

    // Before a sender waits it raises its pending flag: other ranks may need these rows to continue.
    CROSSDOCK_DEVICE void send_all(const Ctx& ctx, uint32_t num_rows, uint32_t sender, uint32_t senders) {
        Returns returns(args_, operation_, sender);
        part_.advance(sender * num_parts_);
        CROSSDOCK_ROLLED
        for (uint32_t n = sender; n < num_rows; n += senders, part_.advance((senders - 1) * num_parts_)) {
            PlannedRow row{};
            bool may_send = false;
            CROSSDOCK_ROLLED
            for (uint32_t i = 0; i < num_parts_; ++i, part_.advance()) {
                ctx.enter(Phase::kCombineStage);
                const BlockBarrier summed(part_.head().summed);
                if (is_leader(ctx) && !summed.is_over(ctx, part_.round())) returns.raise(ctx);
                summed.wait(ctx, part_.round());
                row = part_.head().row;
                const uint32_t last_stage = part_.head().last_stage;
                ctx.warp_sync();  // all lanes have read what the loader may overwrite from now on
                if (i == 0) may_send = is_local_ || returns.wait_for_slot(ctx, row);
                ctx.enter(Phase::kCombineStore);
                if (const RowStage::Lead lead{ctx}) {
                    const RowStage from = part_.stage_at(last_stage);
                    std::byte* const to = is_local_ ? args_.out_tokens + uint64_t{row.number} * args_.row_bytes
                                                    : returns.packet_of(ctx, row);
                    if (may_send)
                        send_shares<kWire>(ctx, from, to + i * args_.wire_part, part_bytes(i),
                                           args_.warp_layout.summed_bytes, !is_local_);
                    RowStage::end_group(ctx);
                    from.wait_reusable(ctx);
                    BlockBarrier(part_.head_at(last_stage).free).arrive(ctx, args_.warp_layout.summers);
                    if (i == 0) returns.raise(ctx, 1);
                }
                ctx.warp_sync();
            }
            if constexpr (kIsElastic<Args>) {
                if (may_send) return_words(ctx, args_, row, returns.packet_of(ctx, row) + words_begin<kWire>(args_));
            }
            if (may_send && !is_local_) returns.add(ctx, row);
        }
        returns.end(ctx);
        RowStage::wait_stores(ctx);
    }

    const Args& args_;
    const Operation& operation_;
    bool is_local_;
    Share own_;
    uint32_t num_parts_;
    StageTurn part_;
    StageTurn summand_;
};

}  // namespace
}  // namespace crossdock
