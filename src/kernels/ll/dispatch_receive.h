// SPDX-License-Identifier: Apache-2.0
// Dispatch, receive half: every row is placed at its expert (expert-major) or its source (rank-major) as soon as it has
// arrived, in the order (source rank, token, k). At the end: the kernel.
#pragma once

#include "device/row_copy.h"
#include "kernels/ll/elastic_header.h"
#include "kernels/ll/overlap.h"

namespace crossdock {
namespace {

// The rows announced for this warp, and those that arrived.
struct RowsRead {
    uint64_t expected = 0;
    uint64_t read = 0;
};

template <typename Op>
class DispatchReceive {
  public:
    using Send = DispatchSend<Op>;
    CROSSDOCK_DEVICE DispatchReceive(const Op& op, const Send& send)
        : op_(op), send_(send), ctx_(op.ctx), args_(op.args), c_(op.c), headers_(op), publisher_(op) {}

    CROSSDOCK_DEVICE void fetch() {}
    CROSSDOCK_DEVICE void look_ahead() {}

    CROSSDOCK_DEVICE void run(const WorkShare& share, bool) {
        const ReceivedCounts counts(op_, send_);
        const Announced announced = counts.announced_here();
        const uint32_t first_choice = first_choice_of_own_row(share);
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
        add(place_own_row(announced, share, first_choice));
        const bool has_ll128 = !kHasGinPeers && announced.ll128[c_.arena.num_ranks] > 0;
        const bool has_plain = announced.plain_before[c_.arena.num_ranks] > 0;
        // If this rank's own form is known, sources with another number of tokens may still send the other one.
        if (!kHasGinPeers && c_.kForm != LlForm::kPlain) {
            add(receive_ll128_rows(announced, share));
        } else if (has_ll128) {
            add(receive_other_form(ctx_, args_, op_, announced, share));
        }
        if (c_.kForm != LlForm::kLl128) {
            add(receive_plain_rows(announced, share));
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
        return op.c.kForm == LlForm::kLl128 ? receive.receive_plain_rows(announced, share)
                                            : receive.receive_ll128_rows(announced, share);
    }

    CROSSDOCK_DEVICE void begin_to_publish(const Announced& announced, const WorkShare& share) {
        publisher_.begin();
        publisher_.clear_other_half(share);
        if (share.block != 0) return;
        CROSSDOCK_ROLLED
        for (uint32_t zone = share.thread(ctx_); zone < c_.overlap.zones; zone += share.threads())
            publisher_.publish_count(zone, rows_of_zones(announced)[zone]);
    }
    CROSSDOCK_DEVICE const uint32_t* rows_of_zones(const Announced& announced) const {
        return c_.expert_major ? announced.expert_rows : announced.rows;
    }

    CROSSDOCK_DEVICE Placement placement_of_warp() const {
        std::byte* placements = args_.shared.placements.in(ctx_.shared_memory());
        return view_of<Placement>(placements + view_bytes<Placement>(c_.topk) * op_.warp(), c_.topk);
    }

    // As HeaderReader::read.
    template <typename ReadMore>
    CROSSDOCK_DEVICE bool read_header(const Announced& announced, const ArrivingRow& row, const Header& header,
                                      bool writes, const Placement& placement, ReadMore read_more) const {
        if (is_elastic(args_))
            return read_elastic_header(op_, headers_, announced, row, header, writes, placement, read_more);
        return headers_.read(announced, row, header, writes, placement, read_more);
    }

    // Scales.

    // Places 8 or 16 bytes of a row's scales, from their byte `first` on.
    CROSSDOCK_DEVICE void place_scale_part(const Placement& placement, uint32_t first, uint32_t bytes,
                                           const Bytes16& part) const {
        const uint32_t scales = args_.scale_bytes / 4;
        const uint32_t step = args_.transposed_scales ? c_.offsets.num_slots : 1;
        const uint32_t left = first / 4 < scales ? scales - first / 4 : 0;
        const uint32_t words = bytes / 4 < left ? bytes / 4 : left;
        // FP8's scales are floats, which callers must align (expect_elements_aligned).
        const bool are_aligned = args_.wire == LlDispatchWire::kFp8 || is_word(args_.out_scales);
        const uint32_t num_places = *placement.num;
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < num_places; ++i) {
            const uint32_t row = placement.rows[i];
            if (is_elastic(args_)) {
                CROSSDOCK_UNROLL
                for (uint32_t j = 0; j < 4; ++j) {
                    const uint32_t value = static_cast<uint32_t>((j < 2 ? part.low : part.high) >> (32 * (j % 2)));
                    if (j < words) *args_.elastic.out_scales.at(row, first / 4 + j) = value;
                }
                continue;
            }
            const uint32_t column = args_.transposed_scales ? placement.columns[i] : 0;
            const uint64_t first_word = uint64_t{row - column} * scales + column + uint64_t{step} * (first / 4);
            std::byte* target = args_.out_scales + 4 * first_word;
            CROSSDOCK_UNROLL
            for (uint32_t j = 0; j < 4; ++j) {
                const uint32_t value = static_cast<uint32_t>((j < 2 ? part.low : part.high) >> (32 * (j % 2)));
                if (j < words) store_word(target + 4 * uint64_t{step} * j, value, are_aligned);
            }
        }
    }
    static constexpr uint32_t kScalePart = 8;  // bytes that a lane places at once
    // This lane's first part of a row's scales, so that it can be loaded early.
    CROSSDOCK_DEVICE uint64_t load_first_scales(const std::byte* scales) const {
        const uint32_t first = kScalePart * op_.lane();
        return first < args_.scale_bytes ? *reinterpret_cast<const uint64_t*>(scales + first) : 0;
    }
    // One warp. Places all scales of a row. Each is read once, for any number of places. part: load_first_scales.
    CROSSDOCK_DEVICE void place_all_scales(const Placement& placement, const std::byte* scales, uint64_t part) const {
        CROSSDOCK_ROLLED
        for (uint32_t first = kScalePart * op_.lane(); first < args_.scale_bytes; first += kScalePart * kLanes) {
            const bool is_first = first < kScalePart * kLanes;
            place_scale_part(placement, first, kScalePart,
                             {is_first ? part : *reinterpret_cast<const uint64_t*>(scales + first), 0});
        }
    }
    // Places this lane's part of a row's scales in these groups of lines.
    template <uint32_t kMost>
    CROSSDOCK_DEVICE void place_scales_of_lines(const Placement& placement, const Ll128Row& row, uint32_t first_group,
                                                uint32_t num, const Ll128Group (&groups)[kMost]) const {
        if (args_.scale_bytes == 0) return;
        CROSSDOCK_ROLLED
        for (uint32_t g = 0; g < num; ++g) {
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
                Bytes16 bytes = groups[0].pieces[i];
                CROSSDOCK_UNROLL
                for (uint32_t other = 1; other < kMost; ++other) {
                    if (other == g) bytes = groups[other].pieces[i];
                }
                const uint32_t offset = row.offset(first_group + g, i);
                if (!row.has_payload(first_group + g, i, row.bytes()) || offset < args_.row_bytes) continue;
                place_scale_part(placement, offset - args_.row_bytes, row.has_tag(i) ? 8 : 16, bytes);
            }
        }
    }

    // This rank's own rows, if they stayed in the block's sending stages: each warp places that of one stage.

    // Looked up while the counts are on their way.
    CROSSDOCK_DEVICE uint32_t first_choice_of_own_row(const WorkShare& share) const {
        const uint32_t stage = share.warp(ctx_);
        return stage < send_.num_staged() ? send_.choices_before(stage, c_.rank) : 0;
    }
    // first_choice: of first_choice_of_own_row.
    CROSSDOCK_DEVICE RowsRead place_own_row(const Announced& announced, const WorkShare& share,
                                            uint32_t first_choice) const {
        const uint32_t of_stage = share.warp(ctx_);
        SendTask own;
        if (of_stage >= send_.num_staged() || !send_.find_own_row(of_stage, own) ||
            own.row_idx >= announced.rows[c_.rank])
            return {};
        const Placement placement = placement_of_warp();
        const auto read = [&](uint32_t base, Header& header) {
            const uint32_t k = base + op_.lane();
            header.origin.payload = send_.header_word(own, 0, first_choice, 0);
            header.choice.payload = send_.header_word(own, 0, first_choice, 1 + (k < c_.topk ? k : 0));
            return true;
        };
        Header header;
        read(0, header);
        if (!read_header(announced, {c_.rank, own.row_idx}, header, true, placement, read)) return {1, 0};
        ctx_.mark(Step::kDispatchHeader);
        const RowStage stage = send_.stage_at(own.stage);
        if (const RowStage::Lead lead{ctx_}; lead && !send_.own_rows_are_placed()) {
            if (args_.wire == LlDispatchWire::kBytes) stage.wait_loaded(ctx_, 0);
            store_places(placement, stage, 0, args_.row_bytes);
            RowStage::wait_read(ctx_);
        }
        const std::byte* scales = stage.data() + args_.shared.tail;
        place_all_scales(placement, scales, load_first_scales(scales));
        if (is_leader(ctx_)) count_rows(ctx_, c_.reach, c_.rank, 1, bytes_with_scales(args_));
        ctx_.warp_sync();
        ctx_.mark(Step::kDispatchPlaced);
        return {1, 1};
    }

    // Plain rows: each warp with a stage places rows through it, in the order of sources.

    CROSSDOCK_DEVICE RowsRead receive_plain_rows(const Announced& announced, const WorkShare& share) {
        RowsRead rows;
        const uint32_t warp = share.warp(ctx_);
        const uint32_t stages = c_.warp_layout.receive_stages;
        if (warp >= stages) return rows;
        const RowStage stage = stage_of(ctx_, args_.shared, c_.warp_layout.num_stages + warp);
        const Placement placement = placement_of_warp();
        ArrivingRow row;
        CROSSDOCK_ROLLED
        for (uint32_t i = share.first(ctx_); i < announced.plain_before[c_.arena.num_ranks];
             i += stages * share.num_blocks) {
            while (announced.plain_before[row.source + 1] <= i) ++row.source;
            row.i = i - announced.plain_before[row.source];
            ++rows.expected;
            rows.read += receive_plain(announced, row, placement, stage) ? 1 : 0;
        }
        return rows;
    }

    CROSSDOCK_DEVICE bool receive_plain(const Announced& announced, const ArrivingRow& row, const Placement& placement,
                                        const RowStage& stage) {
        const uint32_t slot = slot_of(c_, row.source, row.i);
        const uint64_t* flag = op_.flag(c_.rank, slot);
        uint64_t seen = 0;  // of the flag, with the header
        const auto read = [&](uint32_t base, Header& header) {
            return headers_.wait(row, base, header, [&] { seen = ctx_.load_acquire_system(flag); });
        };
        Header header;
        if (!read(0, header) || !read_header(announced, row, header, true, placement, read)) return false;
        ctx_.mark(Step::kDispatchHeader);
        const bool arrived = is_leader(ctx_) && (op_.is_gin_peer(row.source) || word_epoch(seen) == op_.epoch ||
                                                 op_.wait_word(WaitStep::kRow, row.source, flag, seen));
        if (ctx_.warp_broadcast(arrived ? 1u : 0u) == 0) return false;
        ctx_.mark(Step::kDispatchArrived);
        ctx_.fence_async_copies();  // the flag was read by an ordinary load, the row is read by an asynchronous copy
        const std::byte* source = op_.row(c_.rank, slot);
        const uint32_t direct = *placement.direct;
        const std::byte* scales = source + args_.row_bytes;
        const uint64_t first_scales = load_first_scales(scales);
        if (const RowStage::Lead lead{ctx_}; lead && (direct & kDirectTokens) == 0) {
            place_plain(placement, stage, source);
            if (publishes_rows(args_)) {
                RowStage::wait_stores(ctx_);
                ctx_.fence_landed();
            }
        }
        if ((direct & kDirectScales) == 0) place_all_scales(placement, scales, first_scales);
        if (is_leader(ctx_)) op_.note_read(slot);
        ctx_.warp_sync();
        if (publishes_rows(args_)) publisher_.publish(placement, 0, 1, 1, rows_of_zones(announced));
        ctx_.mark(Step::kDispatchPlaced);
        return true;
    }
    // The leader.
    CROSSDOCK_DEVICE void place_plain(const Placement& placement, const RowStage& stage, const std::byte* source) {
        CROSSDOCK_ROLLED
        for (uint32_t first = 0; first < args_.row_bytes; first += c_.warp_layout.chunk_bytes) {
            const uint32_t left = args_.row_bytes - first;
            const uint32_t chunk = left < c_.warp_layout.chunk_bytes ? left : c_.warp_layout.chunk_bytes;
            stage.load(ctx_, source + first, chunk);
            stage.wait_loaded(ctx_, round_++);
            store_places(placement, stage, first, chunk);
            stage.wait_reusable(ctx_);
        }
    }
    // The leader. Bytes [first, first + chunk) of a row are in the stage.
    CROSSDOCK_DEVICE void store_places(const Placement& placement, const RowStage& stage, uint32_t first,
                                       uint32_t chunk) const {
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < *placement.num; ++i)
            stage.store(ctx_, args_.out_tokens + uint64_t{placement.rows[i]} * args_.row_bytes + first, 0, chunk);
        RowStage::end_group(ctx_);
    }

    // LL128 rows, of the sources in turn. Consecutive runs are in different blocks, so that all blocks finish together
    // even with few rows.

    CROSSDOCK_DEVICE RowsRead receive_ll128_rows(const Announced& announced, const WorkShare& share) const {
        RowsRead rows;
        const Placement placement = placement_of_warp();
        const Ll128Row shape(ctx_, bytes_with_scales(args_));
        const uint32_t num_rows = announced.ll128[c_.arena.num_ranks] * c_.arena.num_ranks;
        const Ll128Parts parts = Ll128Parts::of(shape, num_rows, share.step());
        CROSSDOCK_ROLLED
        for (uint32_t i = share.first(ctx_); i < num_rows * parts.num; i += share.step()) {
            const uint32_t number = i / parts.num;
            const uint32_t slot = number / c_.arena.num_ranks;
            const ArrivingRow row{number - slot * c_.arena.num_ranks, slot};
            if (slot >= announced.ll128[row.source]) continue;
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
                    if (needs_header) header = headers_.load(slot, 0);
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
            if (!came || (needs_header && !read_header(announced, row, header, is_first, placement, read_more)))
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
            place_scales_of_lines(placement, shape, first, num, wait.groups);
        }
        if (is_leader(ctx_) && is_first) op_.note_read(slot);
        ctx_.warp_sync();
        if (publishes_rows(args_))
            publisher_.publish(placement, run.begin, run.end, shape.groups(), rows_of_zones(announced));
        ctx_.mark(Step::kDispatchPlaced);
        return true;
    }

    const Op& op_;
    const Send& send_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
    HeaderReader<Op> headers_;
    RowPublisher<Op> publisher_;
    uint32_t round_ = 0;  // loads of this warp's stage
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
