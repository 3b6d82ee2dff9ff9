// SPDX-License-Identifier: Apache-2.0
// Dispatch, receive half: every row is placed at its expert (expert-major) or its source (rank-major) as soon as it has
// arrived, in the order (source rank, token, k). At the end: the kernel.
#pragma once

#include "kernels/ll/dispatch_receive_plain.h"
#include "kernels/ll/overlap.h"
#include "kernels/ll/received_counts.h"

namespace crossdock {
namespace {

template <typename Op>
class DispatchReceive {
  public:
    using Send = DispatchSend<Op>;
    CROSSDOCK_DEVICE DispatchReceive(const Op& op, const Send& send)
        : op_(op),
          send_(send),
          ctx_(op.ctx),
          args_(op.args),
          c_(op.c),
          headers_(op),
          scales_(op),
          publisher_(op),
          plain_(op, send) {}

    CROSSDOCK_DEVICE void fetch() {}
    CROSSDOCK_DEVICE void look_ahead() {}

    CROSSDOCK_DEVICE void run(const WorkShare& share, bool) {
        const ReceivedCounts counts(op_, send_);
        const Announced announced = counts.announced_here();
        const uint32_t first_choice = plain_.first_choice_of_own_row(share);
        counts.gather(announced, share);
        if (block_head(ctx_).is_refused != 0) return ctx_.note_unread_slots_allowed();
        counts.place_rows(announced, share);
        counts.publish(announced, share);
        if (publishes_rows(args_)) begin_to_publish(announced, share);
        ctx_.mark(Step::kDispatchCounts);

        RowsRead rows;
        const auto add = [&](const RowsRead& more) {
            rows.expected += more.expected;
            rows.read += more.read;
        };
        add(plain_.place_own_row(announced, share, first_choice));
        const bool has_ll128 = !kHasGinPeers && announced.ll128[c_.arena.num_ranks] > 0;
        const bool has_plain = announced.plain_before[c_.arena.num_ranks] > 0;
        // If this rank's own form is known, sources with another number of tokens may still send the other one.
        if (!kHasGinPeers && c_.kForm != LlForm::kPlain) {
            add(receive_ll128_rows(announced, share));
        } else if (has_ll128) {
            add(receive_other_form(ctx_, args_, op_, announced, share));
        }
        if (c_.kForm != LlForm::kLl128) {
            add(plain_.receive(announced, share, publisher_));
        } else if (has_plain) {
            add(receive_other_form(ctx_, args_, op_, announced, share));
        }
        if (is_leader(ctx_)) ctx_.note_operation_read(c_.rank, op_.epoch, rows.expected, rows.read);
        ctx_.warp_sync();
        if (publishes_rows(args_)) publisher_.finish(share);
    }

  private:
    // The stages begin with load 0 again: kernels that know their own form have not used them for the other form and,
    // without masks, receive once.
    CROSSDOCK_DEVICE_RARE static RowsRead receive_other_form(const Ctx& ctx, decltype(Op::args) args,
                                                             Operation operation, Announced announced,
                                                             WorkShare share) {
        const Op op(ctx, args, operation);
        const Send send(op);
        DispatchReceive receive(op, send);
        if (publishes_rows(args)) receive.publisher_.begin();
        return op.c.kForm == LlForm::kLl128 ? receive.plain_.receive(announced, share, receive.publisher_)
                                            : receive.receive_ll128_rows(announced, share);
    }

    CROSSDOCK_DEVICE void begin_to_publish(const Announced& announced, const WorkShare& share) {
        publisher_.begin();
        publisher_.clear_next(share);
        if (share.block != 0) return;
        CROSSDOCK_ROLLED
        for (uint32_t zone = share.thread(ctx_); zone < c_.overlap.zones; zone += share.threads())
            publisher_.publish_count(zone, rows_of_zones(c_, announced)[zone]);
    }

    // LL128 rows, of the sources in turn. Consecutive runs are in different blocks, so that all blocks finish together
    // even with few rows.
    CROSSDOCK_DEVICE RowsRead receive_ll128_rows(const Announced& announced, const WorkShare& share) const {
        RowsRead rows;
        const Placement placement = placement_of_warp(op_);
        const Ll128Row shape(ctx_, bytes_with_scales(args_));
        const uint32_t num_rows = announced.ll128[c_.arena.num_ranks] * c_.arena.num_ranks;
        const Ll128Parts parts = Ll128Parts::of(shape, num_rows, share.step());
        CROSSDOCK_ROLLED
        for (uint32_t i = share.first(ctx_); i < num_rows * parts.num; i += share.step()) {
            const uint32_t number = i / parts.num;
            const uint32_t index = number / c_.arena.num_ranks;
            const ArrivingRow row{number - index * c_.arena.num_ranks, index};
            if (index >= announced.ll128[row.source]) continue;
            const Ll128Run run = parts.run(i % parts.num);
            const bool came = receive_ll128(announced, row, shape, run, placement);
            rows.expected += run.begin == 0 ? 1 : 0;
            rows.read += run.begin == 0 && came ? 1 : 0;
        }
        return rows;
    }

    // One warp places its run of a row.
    CROSSDOCK_DEVICE bool receive_ll128(const Announced& announced, const ArrivingRow& row, const Ll128Row& shape,
                                        const Ll128Run& run, const Placement& placement) const {
        constexpr uint32_t kGroupsAtOnce = 4;
        const uint32_t slot = slot_of(c_, row.source, row.i);
        const std::byte* lines = op_.row(c_.rank, slot);
        const bool is_first = run.begin == 0;
        CROSSDOCK_ROLLED
        for (uint32_t first = run.begin; first < run.end; first += kGroupsAtOnce) {
            const uint32_t num = run.end - first < kGroupsAtOnce ? run.end - first : kGroupsAtOnce;
            Ll128Wait<kGroupsAtOnce> wait;
            wait.missing = (1u << num) - 1;
            const bool needs_header = first == run.begin && (c_.expert_major || is_first);
            Header header;
            const bool came = wait_as_warp(
                ctx_, c_.scope, op_, WaitStep::kRow,
                [&] {
                    if (needs_header) header = headers_.load(row.source, slot, 0);
                    wait.look(
                        ctx_, shape, op_.epoch,
                        [&](uint32_t i, Ll128Group& group) {
                            group.load(ctx_, shape, first + i, lines + shape.offset_in_lines(first + i));
                        },
                        [&](uint32_t i) { return first + i; });
                    const bool has_all = wait.missing == 0 && (!needs_header || headers_.has_come(header));
                    return has_all ? kNoRank : row.source;
                },
                [&] {
                    return wait.missing != 0 ? epoch_in_ll128(ctx_, lines, first + wait.first_missing())
                                             : headers_.epoch_in(header);
                });
            const auto read_more = [&](uint32_t base, Header& more) { return headers_.wait(row, base, more, [] {}); };
            if (!came ||
                (needs_header && !read_header(op_, headers_, announced, row, header, is_first, placement, read_more)))
                return false;
            if (first == run.begin && !needs_header) {
                headers_.place_by_rank(announced, row, placement);
                ctx_.warp_sync();
            }
            ctx_.mark(Step::kDispatchArrived);
            const Ll128Copies<kGroupsAtOnce> copies(shape, first, num, args_.row_bytes);
            const auto write = [&]<uint32_t kNum>() {
                const uint32_t num_places = *placement.num;
                CROSSDOCK_ROLLED
                for (uint32_t i = 0; i < num_places; ++i) {
                    std::byte* copy = args_.out_tokens + uint64_t{placement.rows[i]} * args_.row_bytes;
                    copies.template write<kNum>(wait.groups, copy);
                }
            };
            num == 1 ? write.template operator()<1>() : write.template operator()<kGroupsAtOnce>();
            scales_.place_of_lines(placement, shape, first, num, wait.groups);
        }
        if (is_leader(ctx_) && is_first) op_.note_read(slot);
        ctx_.warp_sync();
        if (publishes_rows(args_))
            publisher_.publish(placement, run.begin, run.end, shape.groups(), rows_of_zones(c_, announced));
        ctx_.mark(Step::kDispatchPlaced);
        return true;
    }

    const Op& op_;
    const Send& send_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
    HeaderReader<Op> headers_;
    ScalePlacer<Op> scales_;
    RowPublisher<Op> publisher_;
    PlainReceiver<Op> plain_;
};

// The kernel: both halves or one of them. Contract: nccl_ep.h, ncclEpDispatch; protocol: docs/protocol.md.
CROSSDOCK_DEVICE void ll_dispatch(const Ctx& ctx, const auto& args) {
    LlOperation op(ctx, args);
    DispatchSend send(op);
    DispatchReceive receive(op, send);
    const uint32_t direct = args.common.expert_major ? 0 : args.direct;  // a constant in kernels that know their layout
    run_operation(op, direct, send, receive);
}

}  // namespace
}  // namespace crossdock
