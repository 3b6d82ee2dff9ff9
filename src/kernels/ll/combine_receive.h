// SPDX-License-Identifier: Apache-2.0
// Combine, receive half: a token's rows are summed in a fixed order as soon as they have arrived. At the end: the
// kernel.
#pragma once

#include <type_traits>

#include "device/sum_rows.h"
#include "kernels/ll/combine_send.h"

namespace crossdock {
namespace {

template <DType kDType, RowForms kForms, typename Op>
class CombineReceive {
  public:
    CROSSDOCK_DEVICE explicit CombineReceive(const Op& op)
        : op_(op), ctx_(op.ctx), args_(op.args), c_(op.c), summands_(summands_of_warp(op.ctx, op.args)), staged_(op) {}

    // The choices of the first token that this warp sums, before the operation is known.
    CROSSDOCK_DEVICE void fetch() { first_choice_ = load_first_choice(op_.first_share()); }
    // Prefetches the peers' entries.
    CROSSDOCK_DEVICE void look_ahead() {
        if (op_.receives() && !sums_are_staged()) early_entry_ = load_entry_for_lane(0);
    }

    // Warps share parts of tokens, so that few tokens still occupy many warps.
    CROSSDOCK_DEVICE void run(const WorkShare& share, bool is_first) {
        if (args_.leaves_out) ctx_.note_unread_slots_allowed();
        Choice choice = is_first ? first_choice_ : load_first_choice(share);
        const bool is_ll128 = kForms == RowForms::kLl128 || (op_.own_rows_are_ll128() && allows_ll128(args_));
        const Ll128Row shape(ctx_, args_.row_bytes);
        const Ll128Parts parts = Ll128Parts::of(shape, c_.num_tokens, share.step());
        const uint32_t work = c_.num_tokens * (is_ll128 ? parts.num : args_.segments);
        uint64_t alike = sums_are_staged() ? await_ranks_of_block(share, work) : ranks_alike(0, early_entry_);
        if (alike != all_ranks() && !sums_are_staged()) alike = ranks_entered_alike(ctx_, args_, op_);
        CROSSDOCK_ROLLED
        for (uint32_t i = share.first(ctx_); i < work; i += share.step()) {
            const uint32_t part = i / c_.num_tokens;
            const uint32_t token = i - part * c_.num_tokens;
            std::byte* out = args_.out_tokens + uint64_t{token} * args_.row_bytes;
            bool all_alike = false;
            const uint32_t num = list_summands_of_token(token, choice, alike, all_alike);
            ctx_.mark(Step::kCombineListed);
            if (!all_alike && !wait_entries(num)) {
                ctx_.note_unread_slots_allowed();
            } else if (is_ll128) {
                sum_ll128_rows(num, shape, parts.run(part), out);
            } else {
                sum_plain_rows(num, part, out);
            }
            if (!all_alike) alike = ranks_entered_alike(ctx_, args_, op_);
            if (i + share.step() < work) choice = choice_of_lane((i + share.step()) % c_.num_tokens, 0);
            ctx_.warp_sync();
            ctx_.mark(Step::kCombineSummed);
        }
        if (is_elastic(args_) && args_.elastic.with_weights) CombineWeights<Op>(op_).receive(share);
    }

  private:
    // A warp finds once for all its tokens which of the first ranks have entered with the same terms: one bit per rank,
    // this rank's always set.
    static constexpr uint32_t kRanksSeenAtOnce = 64;

    CROSSDOCK_DEVICE uint64_t all_ranks() const {
        return c_.arena.num_ranks < kRanksSeenAtOnce ? (uint64_t{1} << c_.arena.num_ranks) - 1 : ~uint64_t{0};
    }
    // The entry of rank base + lane.
    CROSSDOCK_DEVICE TaggedWord load_entry_for_lane(uint32_t base) const {
        const uint32_t rank = base + op_.lane();
        return rank < c_.arena.num_ranks && rank != c_.rank ? op_.load_entry_of(rank) : TaggedWord{};
    }
    CROSSDOCK_DEVICE uint64_t ranks_alike(uint32_t base, const TaggedWord& entry) const {
        const uint32_t rank = base + op_.lane();
        const bool is_alike = rank == c_.rank || (rank < c_.arena.num_ranks && op_.is_alike(entry));
        return uint64_t{ctx_.warp_ballot(is_alike)} << base;
    }
    // In the host's memory, one warp waits for the entries of the ranks that return rows to this block, and compares
    // those of other ranks that have come: entries are in one line, and reads of it take turns. Returns the bits of
    // this rank and of those that it has waited for, without those that did not come, in all warps.
    CROSSDOCK_DEVICE uint64_t await_ranks_of_block(const WorkShare& share, uint32_t work) const {
        if (share.warp(ctx_) == 0) {
            uint64_t ranks = 0;
            const uint32_t choices = (work - share.block + share.num_blocks - 1) / share.num_blocks * c_.topk;
            CROSSDOCK_ROLLED
            for (uint32_t i = op_.lane(); share.block < work && i < choices; i += kLanes) {
                const uint32_t token = (share.block + i / c_.topk * share.num_blocks) % c_.num_tokens;
                const uint32_t rank = rank_of_expert(c_, expert_id(c_, token, i % c_.topk));
                if (rank < kRanksSeenAtOnce && op_.is_active_here(rank)) ranks |= uint64_t{1} << rank;
            }
            const uint64_t own = c_.rank < kRanksSeenAtOnce ? uint64_t{1} << c_.rank : 0;
            ranks = or_of_lanes(ranks) & ~own;
            uint64_t alike = own;
            CROSSDOCK_ROLLED
            for (uint32_t rank = op_.lane(); rank < c_.arena.num_ranks && rank < kRanksSeenAtOnce; rank += kLanes) {
                TaggedWord entry{};
                if ((ranks >> rank & 1) != 0) {
                    if (op_.wait_entry(rank, entry)) alike |= uint64_t{1} << rank;
                } else if (rank != c_.rank && c_.scope.masking == 0) {
                    entry = op_.load_entry_of(rank);
                    if (op_.is_of(entry) && !op_.is_alike(entry)) expect_agreement(ctx_, c_.scope, op_, rank);
                }
            }
            alike = or_of_lanes(alike);
            if (is_leader(ctx_)) block_head(ctx_).alike = alike;
        }
        share.sync(ctx_);
        return block_head(ctx_).alike;
    }
    CROSSDOCK_DEVICE uint64_t or_of_lanes(uint64_t bits) const {
        return uint64_t{ctx_.warp_or(static_cast<uint32_t>(bits >> 32))} << 32 |
               ctx_.warp_or(static_cast<uint32_t>(bits));
    }
    CROSSDOCK_DEVICE_RARE static uint64_t ranks_entered_alike(const Ctx& ctx, decltype(Op::args) args,
                                                              Operation operation) {
        const Op op(ctx, args, operation);
        const CombineReceive receive(op);
        uint64_t alike = 0;
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; base < op.c.arena.num_ranks && base < kRanksSeenAtOnce; base += kLanes) {
            const TaggedWord entry = receive.load_entry_for_lane(base);
            // This rank may have no tokens there, and so not wait for that entry. Of two such ranks, the one that
            // enters later sees the other's entry, unless both enter within the time that an entry takes to arrive.
            const bool differs = op.is_of(entry) && !op.is_alike(entry);
            if (differs && op.c.scope.masking == 0) expect_agreement(ctx, op.c.scope, op, base + op.lane());
            alike |= receive.ranks_alike(base, entry);
        }
        return alike;
    }

    CROSSDOCK_DEVICE bool sums_are_staged() const {
        return kLanes > 1 && !kHasGinPeers && kForms == RowForms::kBoth && StagedSums<kDType, Op>::are_used(args_);
    }

    // Elastic rows are not weighted.
    CROSSDOCK_DEVICE bool has_weights() const { return has_row_per_choice(args_) && !is_elastic(args_); }

    struct Choice {
        int64_t given = 0;
        int32_t own_row = kOtherRank;
        float weight = 1.0f;
    };
    // Choice base + lane of the token.
    CROSSDOCK_DEVICE Choice choice_of_lane(uint32_t token, uint32_t base) const {
        if (token >= c_.num_tokens) return {};
        const uint32_t k = base + op_.lane() < c_.topk ? base + op_.lane() : base;
        return {given_id(c_, token, k), args_.own_rows_stay ? *own_row(c_, token, k) : kOtherRank,
                has_weights() ? args_.topk_weights[uint64_t{token} * c_.topk + k] : 1.0f};
    }
    CROSSDOCK_DEVICE Choice load_first_choice(const WorkShare& share) const {
        if (!op_.receives() || !share.has(ctx_) || c_.num_tokens == 0) return {};
        return choice_of_lane(share.first(ctx_) % c_.num_tokens, 0);
    }

    CROSSDOCK_DEVICE bool is_row_here(int32_t row) const { return static_cast<uint32_t>(row) < num_rows_here(args_); }
    // A summand is a cell or, below 0, one of this rank's own rows that stay.
    CROSSDOCK_DEVICE static int64_t summand_of_own_row(int32_t row) { return -1 - int64_t{row}; }
    CROSSDOCK_DEVICE const std::byte* own_row_of(int64_t summand) const {
        return args_.tokens + static_cast<uint64_t>(-1 - summand) * args_.row_bytes;
    }

    // Where a row of a token returns. k: the choice or, without a row per choice, the rank among the token's.
    CROSSDOCK_DEVICE uint32_t cell_to_read(uint32_t token, bool per_choice, uint32_t k) const {
        if constexpr (!kHasGinPeers) return cell_of(c_, token, k);
        // A choice that was not dispatched has none. Its row does not come.
        const uint32_t cell = *returned_cell(c_, per_choice, token, k);
        return cell < c_.offsets.num_cells ? cell : 0;
    }

    // Lists the rows that are summed for one token, in the order of its choices, and returns their number. Skips rows
    // of masked ranks, and own choices that had no room. first_choice: choice_of_lane of the first choices. all_alike:
    // the ranks of all these rows are in the bit mask `alike`. Expert-major, a choice of this rank that was not
    // dispatched here arrives in its cell like any other.
    CROSSDOCK_DEVICE uint32_t list_summands_of_token(uint32_t token, Choice first_choice, uint64_t alike,
                                                     bool& all_alike) const {
        const bool per_choice = has_row_per_choice(args_);
        const bool per_rank = is_elastic(args_) && !per_choice;
        const bool per_expert = is_elastic(args_) && per_choice;  // one row of an expert that is named twice
        const uint64_t ranks = per_rank ? ranks_of_token(token, first_choice) : 0;
        all_alike = true;
        uint32_t num_targets = 0;  // ranks of the choices that all lanes have seen to
        uint32_t num = 0;
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; has_choices_from(c_, base); base += kLanes) {
            const uint32_t k = base + op_.lane();
            const Choice choice = base == 0 ? first_choice : choice_of_lane(token, base);
            const uint32_t rank = k < c_.topk ? rank_of_expert(c_, expert_of(c_, choice.given)) : kDropped;
            const uint32_t expert = per_expert && k < c_.topk ? expert_of(c_, choice.given) : kDropped;
            const bool is_first =
                per_expert ? is_first_of_expert(c_, token, base, expert) : is_first_of_rank(c_, token, base, rank);
            const bool repeats = ctx_.lanes_before_with(per_expert ? expert : rank) != 0 || !is_first;
            const bool has_row = rank != kDropped && ((per_choice && !per_expert) || !repeats);
            const uint32_t target_idx = num_targets + ctx_.warp_count_before(has_row);
            num_targets += ctx_.warp_count(has_row);
            const bool is_own = args_.own_rows_stay && rank == c_.rank;
            const bool is_summed = has_row && op_.is_active_here(rank) && !(is_own && choice.own_row == kNoRoom);
            // Elastic sums of one row per rank are in the order of ranks.
            const uint32_t at = per_rank ? number_of_ones(ranks & ((uint64_t{1} << (rank & 63)) - 1))
                                         : num + ctx_.warp_count_before(is_summed);
            num += ctx_.warp_count(is_summed);
            const bool is_alike = rank < kRanksSeenAtOnce && (alike >> (rank & (kRanksSeenAtOnce - 1)) & 1) != 0;
            all_alike = all_alike && ctx_.warp_all(!is_summed || is_alike);
            if (!is_summed) continue;
            summands_.index[at] =
                is_own && is_row_here(choice.own_row)
                    ? summand_of_own_row(choice.own_row)
                    : static_cast<int64_t>(cell_to_read(token, per_choice, per_choice ? k : target_idx));
            summands_.weight[at] = choice.weight;
            summands_.ranks[at] = rank;
        }
        ctx_.warp_sync();
        return num;
    }

    // Elastic, all ranks in one bit mask: those of a token's choices.
    CROSSDOCK_DEVICE uint64_t ranks_of_token(uint32_t token, Choice first_choice) const {
        uint64_t ranks = 0;
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; has_choices_from(c_, base); base += kLanes) {
            const uint32_t k = base + op_.lane();
            const Choice choice = base == 0 ? first_choice : choice_of_lane(token, base);
            const uint32_t rank = k < c_.topk ? rank_of_expert(c_, expert_of(c_, choice.given)) : kDropped;
            if (rank != kDropped) ranks |= uint64_t{1} << (rank & 63);
        }
        return or_of_lanes(ranks);
    }

    // Waits for the entries of a token's ranks: they enter before they send. Returns false if nothing is to be summed
    // because the group has failed.
    CROSSDOCK_DEVICE bool wait_entries(uint32_t num) const {
        bool came = true;
        for_lanes(ctx_, num, [&](uint32_t k) {
            TaggedWord entry{};
            came = came && op_.wait_entry(summands_.ranks[k], entry);
        });
        return ctx_.warp_all(came) || !ctx_.warp_any(has_failed(ctx_, c_.scope));
    }

    // LL128 rows.

    CROSSDOCK_DEVICE void sum_ll128_rows(uint32_t num, const Ll128Row& shape, const Ll128Run& run,
                                         std::byte* out) const {
        const bool came = sum_ll128_run(num, shape, run, out);
        if (!came || run.begin != 0) return;
        for_lanes(ctx_, num, [&](uint32_t k) { note_summand(summands_.index[k]); });
    }
    // Once per summand.
    CROSSDOCK_DEVICE void note_summand(int64_t summand) const {
        if (summand >= 0) {
            op_.note_read(static_cast<uint32_t>(summand));
        } else {
            count_rows(ctx_, c_.reach, c_.rank, 1, args_.row_bytes);
        }
    }
    // Some rows of a token in some groups of lines, which a warp awaits together: bit g * kRows + r is group g of row
    // r. All of it must stay in registers: that decides how fast a combine is.
    struct Tile {
        static constexpr uint32_t kRows = std::remove_cvref_t<decltype(Op::args)>::kRowsAtOnce;
        static constexpr uint32_t kGroups = 8 / kRows;
        static constexpr uint32_t kBitOfEachGroup = kGroups > 1 ? 1u << kRows | 1 : 1;
        static_assert(kGroups <= 2, "a bit of each");

        uint32_t base;         // the first row, among the token's summands
        uint32_t first_group;  // of its row
        uint32_t expected;
        Ll128Wait<kRows * kGroups> wait;
        // Where the rows are. If own rows stay, each poll computes their addresses again from places in units of 16
        // bytes: pointers would push sums out of registers.
        uint32_t places[kRows];
        const std::byte* lines[kRows];

        CROSSDOCK_DEVICE uint32_t row_of(uint32_t bit) const { return base + bit % kRows; }
        CROSSDOCK_DEVICE uint32_t group_of(uint32_t bit) const { return first_group + bit / kRows; }
        CROSSDOCK_DEVICE bool is_own(uint32_t bit) const { return (wait.plain >> bit & 1) != 0; }
    };
    // Sums a run of groups. Returns false if not all rows have arrived.
    CROSSDOCK_DEVICE bool sum_ll128_run(uint32_t num, const Ll128Row& shape, const Ll128Run& run,
                                        std::byte* out) const {
        const std::byte* cells = op_.row(c_.rank, 0);
        bool has_all = true;
        CROSSDOCK_ROLLED
        for (uint32_t first = run.begin; first < run.end; first += Tile::kGroups) {
            const uint32_t groups = run.end - first < Tile::kGroups ? run.end - first : Tile::kGroups;
            Ll128Sums<kDType> sums[Tile::kGroups];
            if (is_elastic(args_)) {
                CROSSDOCK_UNROLL
                for (uint32_t g = 0; g < Tile::kGroups; ++g) add_biases(sums[g], shape, first + g, out);
            }
            CROSSDOCK_ROLLED
            for (uint32_t base = 0; base < num; base += Tile::kRows) {
                const uint32_t rows = num - base < Tile::kRows ? num - base : Tile::kRows;
                Tile tile;
                tile.base = base;
                tile.first_group = first;
                tile.expected = ((1u << rows) - 1) * (groups > 1 ? Tile::kBitOfEachGroup : 1);
                locate(tile, rows, shape, cells);
                const bool came = wait_for(tile, shape, cells);
                has_all = has_all && came;
                add(tile, shape, sums);
            }
            CROSSDOCK_UNROLL
            for (uint32_t g = 0; g < Tile::kGroups; ++g) {
                if (g < groups) sums[g].rounded().write(shape, first + g, args_.row_bytes, out);
            }
        }
        return has_all;
    }
    CROSSDOCK_DEVICE void locate(Tile& tile, uint32_t rows, const Ll128Row& shape, const std::byte* cells) const {
        tile.wait.missing = tile.expected;
        CROSSDOCK_UNROLL
        for (uint32_t r = 0; r < Tile::kRows; ++r) {
            const int64_t summand = summands_.index[tile.base + (r < rows ? r : 0)];
            if (!args_.own_rows_stay) {
                tile.lines[r] = cells + shape.offset_in_lines(tile.first_group) +
                                static_cast<uint64_t>(static_cast<uint32_t>(summand)) * c_.offsets.row_stride;
            } else if (summand < 0) {
                tile.places[r] = static_cast<uint32_t>(-1 - summand) * (args_.row_bytes / 16);
                tile.wait.plain |= Tile::kBitOfEachGroup << r;
            } else {
                tile.places[r] = static_cast<uint32_t>(summand) * (c_.offsets.row_stride / 16);
            }
        }
    }
    // Returns false if not all rows have arrived.
    CROSSDOCK_DEVICE bool wait_for(Tile& tile, const Ll128Row& shape, const std::byte* cells) const {
        const auto load = [&](uint32_t bit, Ll128Group& group) {
            const uint32_t r = bit % Tile::kRows;
            if (args_.own_rows_stay) {
                const bool is_own = tile.is_own(bit);
                const std::byte* data = is_own ? args_.tokens : cells;
                data += uint64_t{ctx_.found_anew(tile.places[r])} * 16;
                group.load_either(ctx_, shape, tile.group_of(bit), data, is_own);
            } else {
                group.load(ctx_, shape, tile.group_of(bit), tile.lines[r] + bit / Tile::kRows * Ll128Row::kGroupBytes);
            }
        };
        return wait_as_warp(
            ctx_, c_.scope, op_, WaitStep::kRow,
            [&] {
                tile.wait.look(ctx_, shape, op_.epoch, load, [&](uint32_t bit) { return tile.group_of(bit); });
                return tile.wait.missing == 0 ? kNoRank : summands_.ranks[tile.row_of(tile.wait.first_missing())];
            },
            [&] {
                const uint32_t bit = tile.wait.first_missing();
                const uint32_t cell = static_cast<uint32_t>(summands_.index[tile.row_of(bit)]);
                return epoch_in_ll128(ctx_, op_.row(c_.rank, cell), tile.group_of(bit));
            });
    }
    // Adds what has arrived.
    CROSSDOCK_DEVICE void add(const Tile& tile, const Ll128Row& shape, Ll128Sums<kDType>* sums) const {
        static_assert(kCellRow == 0, "other tags are unusual ones");
        const uint32_t present = tile.expected & ~tile.wait.missing & ~ctx_.warp_or(tile.wait.unusual);
        CROSSDOCK_UNROLL
        for (uint32_t bit = 0; bit < Tile::kRows * Tile::kGroups; ++bit) {
            if ((present >> bit & 1) == 0) continue;
            const Ll128Group& group = tile.wait.groups[bit];
            sums[bit / Tile::kRows].add(tile.is_own(bit) ? group.aligned(ctx_, shape, tile.group_of(bit)) : group,
                                        summands_.weight[tile.row_of(bit)]);
        }
    }

    // The token's bias, if there is one. out: its sum.
    CROSSDOCK_DEVICE const std::byte* bias_of(uint32_t i, const std::byte* out) const {
        const std::byte* bias = args_.elastic.bias[i];
        return bias == nullptr ? nullptr : bias + (out - args_.out_tokens);
    }
    CROSSDOCK_DEVICE void add_biases(Ll128Sums<kDType>& sums, const Ll128Row& shape, uint32_t group,
                                     const std::byte* out) const {
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < 2; ++i) {
            const std::byte* bias = bias_of(i, out);
            if (bias == nullptr) continue;
            Ll128Group pieces;
            pieces.read(shape, group, bias);
            sums.add(pieces, 1.0f);
        }
    }

    // Plain rows.

    // Biases, then other rows.
    struct BiasedSummands {
        const std::byte* bias[2];
        AddressSummands others;
        uint32_t count;

        CROSSDOCK_DEVICE const std::byte* row(uint32_t i) const { return i < 2 ? bias[i] : others.row(i - 2); }
        CROSSDOCK_DEVICE float weight(uint32_t i) const { return i < 2 ? 1.0f : others.weight(i - 2); }
    };

    CROSSDOCK_DEVICE void sum_plain_rows(uint32_t num, uint32_t segment, std::byte* out) {
        const uint32_t first = segment * args_.segment_bytes;
        const uint32_t left = args_.row_bytes - first;
        const uint32_t bytes = left < args_.segment_bytes ? left : args_.segment_bytes;
        const bool is_cell = op_.lane() < num && summands_.index[op_.lane()] >= 0;
        locate_rows(first == 0, num);
        ctx_.mark(Step::kCombineArrived);
        const uint32_t element = first / dtype_bytes(kDType);
        const uint32_t elements = bytes / dtype_bytes(kDType);
        if (is_elastic(args_) && (args_.elastic.bias[0] != nullptr || args_.elastic.bias[1] != nullptr)) {
            const BiasedSummands summands{
                {bias_of(0, out), bias_of(1, out)}, {summands_.index, summands_.weight, num}, num + 2};
            sum_rows<kDType>(ctx_, summands, element, elements, out);
        } else if (is_quantised(args_.wire)) {
            sum_quantised_rows(num, element, elements, out);
        } else if (!sums_are_staged() || !staged_.sum(summands_, num, is_cell, first, bytes, out)) {
            sum_rows<kDType>(ctx_, AddressSummands{summands_.index, summands_.weight, num}, element, elements, out);
        }
    }
    // Replaces the summands by their addresses, as AddressSummands takes them; null for rows that do not arrive.
    CROSSDOCK_DEVICE void locate_rows(bool notes_reads, uint32_t num) const {
        const auto locate = [&](uint32_t k, const std::byte* row) {
            summands_.index[k] = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row));
        };
        for_lanes(ctx_, num, [&](uint32_t k) {
            const int64_t summand = summands_.index[k];
            if (summand < 0) {
                if (notes_reads) note_summand(summand);
                return locate(k, own_row_of(summand));
            }
            const uint32_t cell = static_cast<uint32_t>(summand);
            uint64_t content = kCellNothing;
            const bool came = op_.is_gin_peer(summands_.ranks[k])
                                  ? wait_gin_cell(summands_.ranks[k], cell, content)
                                  : op_.wait_word(WaitStep::kRow, summands_.ranks[k], op_.flag(c_.rank, cell), content);
            if (came && notes_reads) note_summand(summand);
            locate(k, came && content == kCellRow ? op_.row(c_.rank, cell) : nullptr);
        });
        ctx_.warp_sync();
    }
    // Waits for a GIN peer's rows, then reads what is said of this one.
    CROSSDOCK_DEVICE bool wait_gin_cell(uint32_t rank, uint32_t cell, uint64_t& content) const {
        const auto* flag = reinterpret_cast<const uint64_t*>(op_.row(c_.rank, cell) - op_.row_front());
        return wait_gin(op_, WaitStep::kRow, Signal::kData, rank) &&
               op_.wait_word(WaitStep::kRow, rank, op_.counts(c_.rank, rank), content) &&
               op_.wait_word(WaitStep::kRow, rank, flag, content);
    }
    CROSSDOCK_DEVICE void sum_quantised_rows(uint32_t count, uint32_t first, uint32_t num, std::byte* out) const {
        const uint32_t elements = args_.row_bytes / 2;
        const AddressSummands summands{summands_.index, summands_.weight, count};
        for_lanes(ctx_, num, [&](uint32_t i) {
            float sum = 0.0f;
            CROSSDOCK_ROLLED
            for (uint32_t k = 0; k < count; ++k) {
                if (summands.row(k) == nullptr) continue;
                const float value = quantised_element(args_.wire, summands.row(k), elements, first + i);
                sum = fused_multiply_add(summands.weight(k), value, sum);
            }
            store_element<DType::kBf16>(out, first + i, sum);
        });
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
    SummandLists summands_;
    StagedSums<kDType, Op> staged_;
    Choice first_choice_;
    TaggedWord early_entry_{};
};

// The kernel: both halves or one of them. Contract: nccl_ep.h, ncclEpCombine; protocol: docs/protocol.md.
template <DType kDType, RowForms kForms>
CROSSDOCK_DEVICE void ll_combine(const Ctx& ctx, const auto& args) {
    using Op = LlOperation<std::remove_cvref_t<decltype(args)>>;
    Op op(ctx, args);
    CombineSend<kDType, kForms, Op> send(op);
    CombineReceive<kDType, kForms, Op> receive(op);
    run_operation(op, 0, send, receive);
}

}  // namespace
}  // namespace crossdock
