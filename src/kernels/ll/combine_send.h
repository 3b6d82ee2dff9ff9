// SPDX-License-Identifier: Apache-2.0
// Combine, send half: the experts' rows go back to the rank that each token came from, into that token's own cells.
#pragma once

#include "kernels/ll/combine_list.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

// Rows as they are, in plain form: a warp's leader brings one after the other through the warp's stage.
template <typename Args>
class PlainReturns {
  public:
    CROSSDOCK_DEVICE PlainReturns(const Ctx& ctx, const Args& args, const LlCombineShared& shared)
        : args_(args),
          stage_(stage_of(ctx, shared, static_cast<uint32_t>(ctx.warp_idx()))),
          list_(ctx, args, false),
          number_(ctx.warp_idx() * ctx.num_blocks() + ctx.block_idx()),
          step_(static_cast<int>(args.common.crew.num_stages) * ctx.num_blocks()) {}

    // The first row sets out before the operation is known. After a barrier behind ReturnList::count.
    CROSSDOCK_DEVICE void begin(const Ctx& ctx) {
        size_ = list_.size();
        find_and_load(ctx);
    }

    // Where nothing is sent after all: what has set out must arrive before its stage is gone.
    CROSSDOCK_DEVICE void abandon(const Ctx& ctx) {
        if (is_there_ && row_.row_idx >= 0) stage_.wait_loaded(ctx, round_);
    }

    CROSSDOCK_DEVICE void run(const Ctx& ctx, const Operation& operation) {
        const auto& c = args_.common;
        while (number_ < size_) {
            if (!is_there_) {
                // Its home has fewer rows than others.
            } else if (row_.row_idx < 0) {
                if (list_.has_cell(row_) && wait_credit(ctx, c, operation, row_.home)) {
                    note_cell_written(ctx, args_, operation, row_);
                    leave_empty(ctx, c, operation, row_);
                }
            } else {
                send(ctx, operation);
            }
            number_ += step_;
            find_and_load(ctx);
        }
    }

  private:
    CROSSDOCK_DEVICE uint32_t chunk_at(uint32_t first) const {
        const uint32_t left = args_.row_bytes - first;
        return left < args_.common.crew.chunk_bytes ? left : args_.common.crew.chunk_bytes;
    }
    CROSSDOCK_DEVICE const std::byte* source() const {
        return args_.tokens + static_cast<uint64_t>(row_.row_idx) * args_.row_bytes;
    }
    CROSSDOCK_DEVICE void find_and_load(const Ctx& ctx) {
        is_there_ = number_ < size_ && list_.find(number_, row_);
        if (is_there_ && row_.row_idx >= 0) stage_.load(ctx, source(), chunk_at(0));
    }
    CROSSDOCK_DEVICE void send(const Ctx& ctx, const Operation& operation) {
        const auto& c = args_.common;
        const bool has_credit = list_.has_cell(row_) && wait_credit(ctx, c, operation, row_.home);
        const bool is_far = is_remote(c.reach, row_.home);
        const uint64_t outbox = is_far ? take_outbox_row(ctx, c, static_cast<uint32_t>(ctx.warp_idx()), turn_++) : 0;
        std::byte* target = is_far ? in_outbox(c, outbox) : row_at(c, operation, row_.home, row_.cell);
        if (has_credit) note_cell_written(ctx, args_, operation, row_);
        CROSSDOCK_ROLLED
        for (uint32_t first = 0; first < args_.row_bytes; first += c.crew.chunk_bytes) {
            const uint32_t chunk = chunk_at(first);
            if (first > 0) stage_.load(ctx, source() + first, chunk);
            stage_.wait_loaded(ctx, round_++);
            ctx.mark(Step::kCombineLoaded);
            if (has_credit) stage_.store(ctx, target + first, 0, chunk);
            stage_.end_group(ctx);
            ctx.mark(Step::kCombineStored);
            stage_.wait_reusable(ctx);
        }
        if (!has_credit) return;
        RowStage::wait_stores(ctx);
        ctx.mark(Step::kCombineLanded);
        if (is_far) return put_home(ctx, c, operation, row_, outbox, args_.row_bytes);
        flag_cell(ctx, c, operation, row_, kCellRow);
        ctx.mark(Step::kCombineFlagged);
    }

    const Args& args_;
    RowStage stage_;
    ReturnList<Args> list_;
    int number_;
    int step_;
    int size_ = 0;
    uint32_t round_ = 0;
    uint32_t turn_ = 0;  // rows for other domains
    bool is_there_ = false;
    Return row_;
};

CROSSDOCK_DEVICE bool sends_lines(const Ctx& ctx, const auto& c) {
    return static_cast<uint32_t>(ctx.block_idx()) < c.send_blocks;
}

// Rows as they are, in line form: a warp takes a run of a row's groups of lines.
template <typename Args>
class LineReturns {
  public:
    CROSSDOCK_DEVICE LineReturns(const Ctx& ctx, const Args& args)
        : args_(args),
          list_(ctx, args, true),
          shape_(args.row_bytes),
          number_(static_cast<uint32_t>(ctx.warp_idx()) * args.common.send_blocks +
                  static_cast<uint32_t>(ctx.block_idx())),
          step_(static_cast<uint32_t>(ctx.num_warps()) * args.common.send_blocks) {}

    // The first run sets out before the operation is known. After a barrier behind ReturnList::count.
    CROSSDOCK_DEVICE void begin(const Ctx& ctx) {
        parts_ = LineParts::of(shape_, static_cast<uint32_t>(list_.size()), step_);
        find_and_read(ctx);
    }

    CROSSDOCK_DEVICE void run(const Ctx& ctx, const Operation& operation) {
        const auto& c = args_.common;
        CROSSDOCK_ROLLED
        while (number_ < static_cast<uint32_t>(list_.size()) * parts_.num) {
            const bool has_credit =
                is_there_ && is_leader(ctx) && list_.has_cell(row_) && wait_credit(ctx, c, operation, row_.home);
            if (ctx.warp_broadcast(has_credit ? 1u : 0u) != 0) send(ctx, operation);
            number_ += step_;
            find_and_read(ctx);
        }
    }

  private:
    static constexpr uint32_t kGroupsAtOnce = 8;

    CROSSDOCK_DEVICE void find_and_read(const Ctx& ctx) {
        is_there_ = number_ < static_cast<uint32_t>(list_.size()) * parts_.num &&
                    list_.find(static_cast<int>(number_ / parts_.num), row_);
        if (!is_there_) return;
        run_ = parts_.run(number_ % parts_.num);
        read(ctx, run_.begin);
    }
    CROSSDOCK_DEVICE void read(const Ctx& ctx, uint32_t first) {
        if (row_.row_idx < 0) return;  // whatever the lines hold: their tags say "nothing"
        const std::byte* source = args_.tokens + static_cast<uint64_t>(row_.row_idx) * args_.row_bytes;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kGroupsAtOnce; ++i) {
            if (first + i < run_.end) groups_[i].read(ctx, shape_, first + i, source);
        }
    }
    CROSSDOCK_DEVICE void send(const Ctx& ctx, const Operation& operation) {
        const auto& c = args_.common;
        if (run_.begin == 0 && is_leader(ctx)) note_cell_written(ctx, args_, operation, row_);
        const uint64_t tag = line_tag(operation.epoch, row_.row_idx < 0 ? kCellNothing : kCellRow);
        std::byte* lines = row_at(c, operation, row_.home, row_.cell);
        ctx.mark(Step::kCombineLoaded);
        CROSSDOCK_ROLLED
        for (uint32_t first = run_.begin; first < run_.end; first += kGroupsAtOnce) {
            if (first != run_.begin) read(ctx, first);
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kGroupsAtOnce; ++i) {
                if (first + i < run_.end) groups_[i].store(ctx, shape_, first + i, lines, tag);
            }
        }
        ctx.mark(Step::kCombineStored);
    }

    const Args& args_;
    ReturnList<Args> list_;
    LineRow shape_;
    uint32_t number_;
    uint32_t step_;
    LineParts parts_{};
    bool is_there_ = false;
    Return row_;
    LineRun run_{};
    LineGroup groups_[kGroupsAtOnce] = {};
};

// What a row's sum on this rank needs, looked up by one warp. What does not come is not summed.
CROSSDOCK_DEVICE void list_terms(const Ctx& ctx, const auto& c, const Operation& operation, const Return& row,
                                 const TermList& terms) {
    const RowRecord* record = row_record(c, row.home, row.slot);
    const int32_t* rows = reinterpret_cast<const int32_t*>(record + 1);
    // Where they do not come, no word is of this operation.
    if (is_remote(c.reach, row.home))
        wait_far_as_warp(ctx, c, operation, WaitStep::kWeights, Signal::kWeights, row.home);
    const TaggedWord* weights = weight_words(c, operation, c.rank, row.home, record->token_idx);
    CROSSDOCK_ROLLED
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
        uint64_t pair = 0;
        const bool came = wait_tagged(ctx, c, operation, WaitStep::kWeights, row.home, weights + k / 2, pair);
        terms.index[k] = came ? rows[k] : -1;
        terms.weight[k] = float_of(static_cast<uint32_t>(pair >> (32 * (k % 2))));
    }
    ctx.warp_sync();
}

// The same without gaps. Returns how many.
CROSSDOCK_DEVICE uint32_t list_present_terms(const Ctx& ctx, const auto& c, const Operation& operation,
                                             const Return& row, const TermList& terms) {
    list_terms(ctx, c, operation, row, terms);
    int num = 0;
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; has_choices_from(c, base); base += kLanes) {
        const uint32_t k = base + static_cast<uint32_t>(ctx.lane());
        const int64_t index = k < c.topk ? terms.index[k] : -1;
        const float weight = k < c.topk ? terms.weight[k] : 0.0f;
        ctx.warp_sync();
        const int at = num + ctx.warp_count_before(index >= 0);
        if (index >= 0) {
            terms.index[at] = index;
            terms.weight[at] = weight;
        }
        num += ctx.warp_count(index >= 0);
        ctx.warp_sync();
    }
    return static_cast<uint32_t>(num);
}

// Bytes [row_first, row_first + chunk) of a row that is computed, into a stage; the part-th of several warps does its
// share.
template <DType kDType>
CROSSDOCK_DEVICE void compute_row(const Ctx& ctx, const auto& args, const Operation& operation, const Return& row,
                                  const RowStage& stage, uint32_t row_first, uint32_t chunk, int part, int parts,
                                  const TermList& terms) {
    constexpr uint32_t kSegmentBytes = 1024;
    if (args.wire == LlCombineWire::kNvfp4) {
        if (part == 0 && row.row_idx >= 0) {
            quantise_nvfp4(ctx, args.tokens + static_cast<uint64_t>(row.row_idx) * args.row_bytes, args.row_bytes / 2,
                           args.row_scales[row.row_idx], stage.data());
        }
        return;
    }
    list_terms(ctx, args.common, operation, row, terms);
    CROSSDOCK_ROLLED
    for (uint32_t first = static_cast<uint32_t>(part) * kSegmentBytes; first < chunk;
         first += static_cast<uint32_t>(parts) * kSegmentBytes) {
        const uint32_t bytes = chunk - first < kSegmentBytes ? chunk - first : kSegmentBytes;
        sum_rows<kDType>(ctx, RowTerms{args.tokens, args.row_bytes, terms.index, terms.weight, args.common.topk},
                         (row_first + first) / dtype_bytes(kDType), bytes / dtype_bytes(kDType),
                         stage.data() - row_first);
    }
    ctx.warp_sync();
}

// Rows that are computed, in plain form: a block fills its stages together, then warps send one each.
template <DType kDType>
CROSSDOCK_DEVICE void return_computed(const Ctx& ctx, const auto& args, const LlCombineShared& shared,
                                      const Operation& operation) {
    const auto& c = args.common;
    const ReturnList list(ctx, args, false);
    const int total = list.size();
    const int stages = static_cast<int>(c.crew.num_stages);
    const TermList terms = terms_of_warp(ctx, args, shared);
    Return row;
    uint32_t turn = 0;
    CROSSDOCK_ROLLED
    for (int base = ctx.block_idx(); base < total; base += stages * ctx.num_blocks(), ++turn) {
        const int left = (total - base + ctx.num_blocks() - 1) / ctx.num_blocks();
        const int num = left < stages ? left : stages;
        const int parts = num < ctx.num_warps() ? ctx.num_warps() / num : 1;  // warps that share a row
        CROSSDOCK_ROLLED
        for (uint32_t row_first = 0; row_first < args.wire_bytes; row_first += c.crew.chunk_bytes) {
            const uint32_t rest = args.wire_bytes - row_first;
            const uint32_t chunk = rest < c.crew.chunk_bytes ? rest : c.crew.chunk_bytes;
            CROSSDOCK_ROLLED
            for (int i = ctx.warp_idx(); i < num * parts; i += ctx.num_warps()) {
                if (!list.find(base + i / parts * ctx.num_blocks(), row)) continue;
                compute_row<kDType>(ctx, args, operation, row, stage_of(ctx, shared, static_cast<uint32_t>(i / parts)),
                                    row_first, chunk, i % parts, parts, terms);
            }
            stage_of(ctx, shared, 0).filled();
            ctx.block_sync();
            CROSSDOCK_ROLLED
            for (int i = ctx.warp_idx(); i < num; i += ctx.num_warps()) {
                if (!is_leader(ctx) || !list.find(base + i * ctx.num_blocks(), row) || !list.has_cell(row)) continue;
                if (!wait_credit(ctx, c, operation, row.home)) continue;
                const RowStage stage = stage_of(ctx, shared, static_cast<uint32_t>(i));
                const bool is_far = is_remote(c.reach, row.home);
                const uint64_t outbox = is_far ? take_outbox_row(ctx, c, static_cast<uint32_t>(i), turn) : 0;
                if (row_first == 0) note_cell_written(ctx, args, operation, row);
                if (row.row_idx >= 0) {
                    std::byte* target = is_far ? in_outbox(c, outbox) : row_at(c, operation, row.home, row.cell);
                    stage.store(ctx, target + row_first, 0, chunk);
                }
                stage.end_group(ctx);
                RowStage::wait_stores(ctx);
                stage.wait_reusable(ctx);
                if (chunk != rest) continue;
                if (row.row_idx < 0) {
                    leave_empty(ctx, c, operation, row);
                } else if (is_far) {
                    put_home(ctx, c, operation, row, outbox, args.wire_bytes);
                } else {
                    flag_cell(ctx, c, operation, row, kCellRow);
                }
            }
            ctx.block_sync();
        }
    }
}

// Rows summed by their sender, in line form: a warp takes a run of a row's groups of lines.
template <DType kDType>
CROSSDOCK_DEVICE void return_line_sums(const Ctx& ctx, const auto& args, const LlCombineShared& shared,
                                       const Operation& operation) {
    constexpr uint32_t kRowsAtOnce = 4;
    constexpr uint32_t kGroupsAtOnce = 2;
    const auto& c = args.common;
    const ReturnList list(ctx, args, true);
    const LineRow shape(args.row_bytes);
    const uint32_t warps = static_cast<uint32_t>(ctx.num_warps()) * c.send_blocks;
    const LineParts parts = LineParts::of(shape, static_cast<uint32_t>(list.size()), warps);
    const TermList terms = terms_of_warp(ctx, args, shared);
    const uint64_t tag = line_tag(operation.epoch, kCellRow);
    Return row;
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.warp_idx()) * c.send_blocks + static_cast<uint32_t>(ctx.block_idx());
         i < static_cast<uint32_t>(list.size()) * parts.num; i += warps) {
        if (!list.find(static_cast<int>(i / parts.num), row) || !list.has_cell(row)) continue;
        if (ctx.warp_broadcast(is_leader(ctx) && wait_credit(ctx, c, operation, row.home) ? 1u : 0u) == 0) continue;
        const LineRun run = parts.run(i % parts.num);
        if (run.begin == 0 && is_leader(ctx)) note_cell_written(ctx, args, operation, row);
        const uint32_t num = list_present_terms(ctx, c, operation, row, terms);
        std::byte* lines = row_at(c, operation, row.home, row.cell);
        CROSSDOCK_ROLLED
        for (uint32_t first = run.begin; first < run.end; first += kGroupsAtOnce) {
            LineSums<kDType> sums[kGroupsAtOnce];
            CROSSDOCK_ROLLED
            for (uint32_t base = 0; base < num; base += kRowsAtOnce) {
                LineGroup groups[kRowsAtOnce][kGroupsAtOnce];
                CROSSDOCK_UNROLL
                for (uint32_t r = 0; r < kRowsAtOnce; ++r) {
                    if (base + r >= num) continue;
                    const std::byte* source =
                        args.tokens + static_cast<uint64_t>(terms.index[base + r]) * args.row_bytes;
                    CROSSDOCK_UNROLL
                    for (uint32_t g = 0; g < kGroupsAtOnce; ++g) groups[r][g].read(ctx, shape, first + g, source);
                }
                CROSSDOCK_UNROLL
                for (uint32_t r = 0; r < kRowsAtOnce; ++r) {
                    if (base + r >= num) continue;
                    CROSSDOCK_UNROLL
                    for (uint32_t g = 0; g < kGroupsAtOnce; ++g) sums[g].add(groups[r][g], terms.weight[base + r]);
                }
            }
            CROSSDOCK_UNROLL
            for (uint32_t g = 0; g < kGroupsAtOnce; ++g) {
                if (first + g < run.end) sums[g].rounded().store(ctx, shape, first + g, lines, tag);
            }
        }
        ctx.warp_sync();
        ctx.mark(Step::kCombineStored);
    }
}

// The leaders of a block's first warps have a stage each for rows that go as they are.
template <RowForms kForms>
CROSSDOCK_DEVICE bool returns_plain_rows(const Ctx& ctx, const auto& args) {
    return kForms == RowForms::kBoth && !has_computed_rows(args) &&
           ctx.warp_idx() < static_cast<int>(args.common.crew.num_stages) && is_leader(ctx);
}

template <DType kDType, RowForms kForms>
CROSSDOCK_DEVICE void return_tokens(const Ctx& ctx, const auto& args, const LlCombineShared& shared,
                                    const Operation& operation, auto& lines, auto& plain) {
    if (args.wire == LlCombineWire::kSums) {
        put_weights(ctx, args, operation);
        announce_weights(ctx, args, operation);
    }
    if (has_computed_rows(args)) {
        if (sends_lines(ctx, args.common)) return_line_sums<kDType>(ctx, args, shared, operation);
        if (kForms == RowForms::kBoth) return_computed<kDType>(ctx, args, shared, operation);
    } else {
        if (sends_lines(ctx, args.common)) lines.run(ctx, operation);
        if (returns_plain_rows<kForms>(ctx, args)) plain.run(ctx, operation);
    }
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
