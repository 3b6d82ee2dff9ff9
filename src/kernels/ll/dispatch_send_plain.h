// SPDX-License-Identifier: Apache-2.0
// Dispatch, send half: plain rows. Their flags follow them; those for GIN peers are stored in the outbox, and put when
// all of them are there.
#pragma once

#include "kernels/ll/row_scales.h"
#include "kernels/ll/token_plans.h"

namespace crossdock {
namespace {

template <typename Op>
class PlainSender {
  public:
    CROSSDOCK_DEVICE explicit PlainSender(const Op& op)
        : op_(op), ctx_(op.ctx), args_(op.args), c_(op.c), shared_(op.args.shared), planner_(op) {}

    // Plain rows: the warp that planned a token sends it and its flags, one lane per target rank. Headers are sent
    // first, while the row is loaded into its stage, so that the flags, which wait for all stores of the warp, do not
    // wait for the headers.
    // round: the load of the stages that is sent.
    CROSSDOCK_DEVICE void send(const Batch& batch, uint32_t round) const {
        const uint32_t own_stage = op_.warp();
        if (own_stage >= batch.num) return;
        const TokenPlan of_token = planner_.plan_of(own_stage);
        const uint32_t targets = *of_token.num_targets;
        const auto for_peers = [&](uint32_t begin, uint32_t step, auto act) {
            CROSSDOCK_ROLLED
            for (uint32_t target = begin; target < targets; target += step) {
                const SendTask task = planner_.task_of(batch, of_token, own_stage, target);
                if (task.row != nullptr) act(task);
            }
        };
        if (batch.row_first == 0) {
            for_peers(0, 1, [&](const SendTask& task) {
                if (is_leader(ctx_)) op_.note_written(task.peer, task.slot);
                if (is_leader(ctx_)) count_rows(ctx_, c_.reach, task.peer, 1, bytes_on_the_way());
                planner_.send_header(task, op_.is_gin_peer(task.peer) ? 0 : args_.direct);
            });
        }
        if (args_.wire == LlDispatchWire::kBytes) stage_at(own_stage).wait_loaded(ctx_, round);
        ctx_.mark(Step::kDispatchLoaded);
        for (RowStage::Turns turns(ctx_, op_.lane() < targets); turns.next();) {
            for_peers(op_.lane(), kLanes, [&](const SendTask& task) { store_chunk(batch, task); });
        }
        if (planner_.own_rows_are_placed()) {
            if (const RowStage::Lead lead{ctx_}) store_own_row(batch, of_token);
        }
        ctx_.warp_sync();
        if (batch.is_last_chunk) {
            planner_.keep_choices(batch, own_stage);  // while the stores are in flight
            planner_.keep_cells(batch, own_stage);
            RowStage::wait_stores(ctx_);
            ctx_.mark(Step::kDispatchLanded);
            for_peers(op_.lane(), kLanes, [&](const SendTask& task) {
                if (op_.is_gin_peer(task.peer)) return ctx_.fence_landed();
                ctx_.store_landed_system(op_.flag(task.peer, task.slot), pack_word(op_.epoch, 0));
            });
            ctx_.warp_sync();
            ctx_.mark(Step::kDispatchFlagged);
        }
        if (!planner_.own_rows_stay()) stage_at(own_stage).wait_reusable(ctx_);
        ctx_.warp_sync();
    }

    // All rows for each GIN peer, with their headers; then counts and the signal. Without rows only the first count is
    // put.
    CROSSDOCK_DEVICE void put_rows() const {
        tell_gin_peers(op_, [&](uint32_t peer) {
            const uint32_t* first_rows = RoutingCounter<Op>(op_).first_rows() + peer;
            const uint32_t rows = first_rows[1] - first_rows[0];
            if (rows > 0) {
                put(ctx_, c_.reach, peer, op_.slot_offset(slot_of(c_, c_.rank, 0)), outbox_row(op_, first_rows[0]),
                    uint64_t{rows} * op_.row_stride());
            }
            const Raise data = raise_to_epoch(op_, Signal::kData, peer);
            if (rows > 0 && c_.expert_major) {
                put_and_raise(ctx_, c_.reach, peer, op_.counts_offset(c_.rank), outbox_counts(c_, peer),
                              c_.offsets.count_stride, data);
            } else {
                put_value_and_raise(ctx_, c_.reach, peer, op_.counts_offset(c_.rank), pack_word(op_.epoch, rows), data);
            }
        });
    }

  private:
    CROSSDOCK_DEVICE RowStage stage_at(uint32_t i) const { return stage_of(ctx_, shared_, i); }
    // Returns which of the peer's outputs may be written directly (DirectPart bits). Known once the peer has entered
    // this operation, so it no longer reads their previous contents. Peers that offer the same parts have them at the
    // same offsets (WindowTerm).
    CROSSDOCK_DEVICE uint32_t wait_direct(uint32_t peer) const {
        if (args_.direct == 0 || peer == c_.rank) return args_.direct;
        if (op_.is_gin_peer(peer)) return 0;
        TaggedWord entry{};
        const bool allows = op_.wait_entry(peer, entry) && op_.is_of(entry);
        return allows && Entry::parts(entry) == args_.direct ? args_.direct : 0;
    }
    CROSSDOCK_DEVICE bool has_scales(const Batch& batch) const { return batch.is_last_chunk && args_.scale_bytes > 0; }

    // One thread, in turn.
    CROSSDOCK_DEVICE void store_chunk(const Batch& batch, const SendTask& task) const {
        const RowStage from = stage_at(task.stage);
        const uint32_t direct = wait_direct(task.peer);
        if ((direct & kDirectTokens) != 0) {
            from.store(ctx_, args_.token_windows.at(task.peer, uint64_t{task.slot} * args_.row_bytes + batch.row_first),
                       0, batch.chunk);
        } else if (has_scales(batch) && direct == 0 && batch.chunk == shared_.tail) {
            from.store(ctx_, task.row + batch.row_first, 0,
                       batch.chunk + scale_area(args_));  // one piece, as in the stage
        } else {
            from.store(ctx_, task.row + batch.row_first, 0, batch.chunk);
        }
        if (has_scales(batch) && (direct & kDirectScales) != 0) {
            from.store(ctx_, args_.scale_windows.at(task.peer, uint64_t{task.slot} * args_.scale_bytes), shared_.tail,
                       args_.scale_bytes);
        } else if (has_scales(batch) && (direct != 0 || batch.chunk != shared_.tail)) {
            from.store(ctx_, task.row + args_.row_bytes, shared_.tail, scale_area(args_));
        }
        RowStage::end_group(ctx_);
        ctx_.mark(Step::kDispatchStored);
    }
    // The leader.
    CROSSDOCK_DEVICE void store_own_row(const Batch& batch, const TokenPlan& of_token) const {
        if (*of_token.own_target == kDropped) return;
        const SendTask task = planner_.task_of(batch, of_token, op_.warp(), *of_token.own_target);
        stage_at(task.stage).store(ctx_, args_.out_tokens + uint64_t{task.slot} * args_.row_bytes, 0, args_.row_bytes);
        RowStage::end_group(ctx_);
    }
    // Row, scales, header.
    CROSSDOCK_DEVICE uint64_t bytes_on_the_way() const {
        return uint64_t{bytes_with_scales(args_)} + c_.offsets.header_stride;
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
    const LlDispatchShared& shared_;
    TokenPlanner<Op> planner_;
};

}  // namespace
}  // namespace crossdock
