// SPDX-License-Identifier: Apache-2.0
// Dispatch, send half: every token is sent once to each rank that hosts one of its experts, into this source's own
// slots there. A slot's number is a count over the source's own earlier tokens, so every block computes it alone.
#pragma once

#include "device/fp8.h"
#include "kernels/ll/dispatch_send_plain.h"
#include "kernels/ll/row_scales.h"

namespace crossdock {
namespace {

template <typename Op>
class DispatchSend {
  public:
    static constexpr KernelSteps kSteps{Step::kDispatchBegin, Step::kDispatchReady, Step::kDispatchHead,
                                        Step::kDispatchEnd};

    CROSSDOCK_DEVICE explicit DispatchSend(const Op& op)
        : op_(op), ctx_(op.ctx), args_(op.args), c_(op.c), shared_(op.args.shared), counter_(op), planner_(op) {}

    CROSSDOCK_DEVICE void init() {
        if (has_role(ctx_, WarpRole::kLoader)) {
            for_lanes(ctx_, c_.warp_layout.num_stages + c_.warp_layout.receive_stages,
                      [&](uint32_t i) { stage_at(i).init(); });
            RowStage::initialised();
            ctx_.warp_sync();
        }
        counter_.clear();
        ctx_.block_sync();
    }

    // Loads the first rows and their routing before the operation is known.
    CROSSDOCK_DEVICE void fetch() {
        const GivenIds given = counter_.load_ids(op_.thread(), tokens_to_count(), 0);
        const TokenRun run = tokens();
        const bool has_tokens = run.begin < run.end;
        const Batch batch = batch_of(run.begin, run.end, 0);
        const GivenChoice choice = has_tokens ? planner_.load_choice(batch, op_.lane()) : GivenChoice{};
        if (has_tokens) load_batch(batch);
        if (has_tokens) load_first_blocks(batch);
        ctx_.mark(Step::kDispatchFetching);
        first_ids_ = counter_.experts_of(given);
        if (has_tokens) planner_.write(batch, choice);
    }

    // After fetch and before the next block barrier: counts earlier tokens and quantises rows.
    CROSSDOCK_DEVICE void prepare() {
        counter_.find_cells();
        const TokenRun run = tokens();
        counter_.count(0, tokens_to_count(), first_ids_);
        if (run.begin < run.end) quantise_batch(batch_of(run.begin, run.end, 0), true);
    }

    template <typename Begin>
    CROSSDOCK_DEVICE bool run(Begin begin) {
        if (!begin()) {
            abandon();
            return false;
        }
        if (ctx_.block_idx() == ctx_.num_blocks() - 1) counter_.announce();
        send_tokens();
        PlainSender<Op>(op_).put_rows();
        return true;
    }

    // The number of this block's tokens, one per stage, if rows stay.
    CROSSDOCK_DEVICE uint32_t num_staged() const {
        const TokenRun run = tokens();
        return planner_.own_rows_stay() ? run.end - run.begin : 0;
    }
    CROSSDOCK_DEVICE RowStage stage_at(uint32_t i) const { return stage_of(ctx_, shared_, i); }
    // Returns false if the token has no row for this rank.
    CROSSDOCK_DEVICE bool find_own_row(uint32_t stage, SendTask& task) const {
        const TokenRun run = tokens();
        const TokenPlan of_token = planner_.plan_of(stage);
        if (*of_token.own_target == kDropped) return false;
        task = planner_.task_of(batch_of(run.begin, run.end, 0), of_token, stage, *of_token.own_target);
        return true;
    }
    CROSSDOCK_DEVICE const TokenPlanner<Op>& planner() const { return planner_; }

  private:
    // Waits for loads that were issued: they must land before the stages' memory is freed.
    CROSSDOCK_DEVICE void abandon() {
        const TokenRun run = tokens();
        if (run.begin == run.end || args_.wire != LlDispatchWire::kBytes || !has_role(ctx_, WarpRole::kLoader)) return;
        const Batch batch = batch_of(run.begin, run.end, 0);
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < batch.num; ++i) stage_at(i).wait_loaded(ctx_, round_);
    }

    // Each sending block sends a contiguous run of tokens. The last block of the grid announces the counts; where there
    // are several, the launch plan leaves it out of the sending ones (core/ll/plan.cpp).
    struct TokenRun {
        uint32_t begin;
        uint32_t end;
    };
    CROSSDOCK_DEVICE TokenRun tokens() const {
        const uint32_t block = op_.block();
        if (block >= c_.send_blocks) return {c_.num_tokens, c_.num_tokens};
        const uint32_t begin = (block >> c_.log2_blocks_per_token) * c_.tokens_per_block;
        const uint32_t end = begin + c_.tokens_per_block;
        return {begin < c_.num_tokens ? begin : c_.num_tokens, end < c_.num_tokens ? end : c_.num_tokens};
    }
    // A block counts the tokens before its own, the last block all tokens.
    CROSSDOCK_DEVICE uint32_t tokens_to_count() const {
        return ctx_.block_idx() == ctx_.num_blocks() - 1 ? c_.num_tokens : tokens().begin;
    }
    CROSSDOCK_DEVICE Batch batch_of(uint32_t first, uint32_t end, uint32_t row_first) const {
        if (args_.kOneBatch) return {first, end - first, 0, args_.row_bytes, true};
        const LlWarpLayout& layout = c_.warp_layout;
        const uint32_t left = args_.row_bytes - row_first;
        const uint32_t chunk = left < layout.chunk_bytes ? left : layout.chunk_bytes;
        return {first, end - first < layout.num_stages ? end - first : layout.num_stages, row_first, chunk,
                chunk == left};
    }

    // Rows into stages.

    CROSSDOCK_DEVICE const std::byte* source_row(uint32_t token) const {
        return args_.tokens + uint64_t{token} * args_.source_row_bytes;
    }
    CROSSDOCK_DEVICE void load_batch(const Batch& batch) const {
        if (args_.wire != LlDispatchWire::kBytes || !has_role(ctx_, WarpRole::kLoader)) return;
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < batch.num; ++i) {
            if (const RowStage::Lead lead{ctx_})
                stage_at(i).load(ctx_, source_row(batch.first + i) + batch.row_first, batch.chunk);
            if (batch.is_last_chunk && args_.scale_bytes > 0) {
                std::byte* scales = stage_at(i).data() + shared_.tail;
                if (is_elastic(args_)) {
                    for_lanes(ctx_, args_.elastic.num_scales, [&](uint32_t s) {
                        reinterpret_cast<uint32_t*>(scales)[s] = *args_.elastic.scales.at(batch.first + i, s);
                    });
                } else {
                    copy_words(ctx_, scales, args_.scales + uint64_t{batch.first + i} * args_.scale_bytes,
                               args_.scale_bytes);
                }
                RowStage::filled();
            }
        }
        RowStage::loaded_for_block(ctx_);
    }
    // is_loaded: the batch's first blocks are loaded (load_first_blocks).
    CROSSDOCK_DEVICE void quantise_batch(const Batch& batch, bool is_loaded) {
        if (args_.wire != LlDispatchWire::kFp8) return;
        const uint32_t blocks = batch.chunk / kFp8Block;
        const uint32_t warps = op_.warps();
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < batch.num; ++i) {
            std::byte* target = stage_at(i).data();
            float* scales = reinterpret_cast<float*>(target + shared_.tail) + batch.row_first / kFp8Block;
            CROSSDOCK_ROLLED
            for (uint32_t first = op_.warp(); first < blocks; first += Fp8Blocks::kMost * warps) {
                if (!is_loaded)
                    blocks_.load(ctx_, source_row(batch.first + i) + 2 * batch.row_first, first, warps, blocks);
                is_loaded = false;
                blocks_.quantise(ctx_, args_.round_scales, target, scales, first, warps, blocks);
            }
        }
        RowStage::filled();
    }
    CROSSDOCK_DEVICE void load_first_blocks(const Batch& batch) {
        const uint32_t blocks = batch.chunk / kFp8Block;
        if (args_.wire == LlDispatchWire::kFp8 && op_.warp() < blocks)
            blocks_.load(ctx_, source_row(batch.first) + 2 * batch.row_first, op_.warp(), op_.warps(), blocks);
    }

    // Rows out of stages.

    CROSSDOCK_DEVICE void send_tokens() {
        const TokenRun run = tokens();
        const LlWarpLayout& layout = c_.warp_layout;
        CROSSDOCK_ROLLED
        for (uint32_t first = run.begin; first < run.end; first += layout.num_stages) {
            CROSSDOCK_ROLLED
            for (uint32_t row_first = 0; row_first < args_.row_bytes; row_first += layout.chunk_bytes, ++round_) {
                const Batch batch = batch_of(first, run.end, row_first);
                if (!args_.kOneBatch && round_ > 0) {
                    load_batch(batch);
                    quantise_batch(batch, false);
                    if (row_first == 0) planner_.write(batch, planner_.load_choice(batch, op_.lane()));
                    ctx_.block_sync();
                }
                if (row_first == 0) planner_.make(batch);
                ctx_.mark(Step::kDispatchPlanned);
                if (op_.own_rows_are_ll128() || planner_.own_rows_stay())
                    ctx_.block_sync();  // all warps read the plans
                if (op_.own_rows_are_ll128()) {
                    send_ll128(batch);
                } else {
                    PlainSender<Op>(op_).send(batch, round_);
                }
                if (batch.first + batch.num == run.end && batch.is_last_chunk) return;
                ctx_.block_sync();
            }
            if (args_.kOneBatch) return;
            const uint32_t next = first + layout.num_stages;
            counter_.count(first, next, counter_.experts_of(counter_.load_ids(first + op_.thread(), next, 0)));
            ctx_.block_sync();
        }
    }

    // LL128 rows: all warps share each row's groups of lines, and the headers.
    CROSSDOCK_DEVICE void send_ll128(const Batch& batch) const {
        const uint64_t tag = ll128_tag(op_.epoch, 0);
        const uint32_t warps = op_.warps();
        const uint32_t part = op_.block() & ((1u << c_.log2_blocks_per_token) - 1);
        uint32_t next = op_.warp();  // this warp's next task among those of the stages from here on
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; part == 0 && i < batch.num; ++i) {
            const TokenPlan of_token = planner_.plan_of(i);
            const uint32_t targets = *of_token.num_targets;
            CROSSDOCK_ROLLED
            for (; next < targets; next += warps) {
                const SendTask task = planner_.task_of(batch, of_token, i, next);
                if (task.row == nullptr) continue;
                if (is_leader(ctx_)) op_.note_written(task.peer, task.slot);
                planner_.send_header(task, 0);
            }
            next -= targets;
        }
        const Ll128Row row(ctx_, bytes_with_scales(args_));
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < batch.num; ++i) {
            const TokenPlan of_token = planner_.plan_of(i);
            if (args_.wire == LlDispatchWire::kBytes) stage_at(i).wait_loaded(ctx_, round_);
            ctx_.mark(Step::kDispatchLoaded);
            const uint32_t targets = *of_token.num_targets;
            CROSSDOCK_ROLLED
            for (uint32_t group = part * warps + op_.warp(); group < row.groups();
                 group += warps << c_.log2_blocks_per_token) {
                Ll128Group lines;
                lines.read(row, group, stage_at(i).data());
                ctx_.warp_sync();
                CROSSDOCK_ROLLED
                for (uint32_t target = 0; target < targets; ++target) {
                    if (std::byte* slot = of_token.rows[target]; slot != nullptr)
                        lines.store(ctx_, row, group, slot + row.offset_in_lines(group), tag);
                }
            }
            ctx_.mark(Step::kDispatchStored);
        }
        if (part == 0 && op_.warp() < batch.num) planner_.keep_choices(batch, op_.warp());
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
    const LlDispatchShared& shared_;
    RoutingCounter<Op> counter_;
    TokenPlanner<Op> planner_;
    TokenIds first_ids_;
    Fp8Blocks blocks_;
    uint32_t round_ = 0;  // loads of each stage
};

}  // namespace
}  // namespace crossdock
