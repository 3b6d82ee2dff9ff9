// SPDX-License-Identifier: Apache-2.0
// LL128 rows. A line is 128 bytes: 120 of payload, then a tag with the operation's epoch. Eight lanes store a line in a
// single instruction of their warp, 16 bytes each, and load it likewise: a reader that sees the tag sees the line. So
// rows need no flag, and no store has to land before one.
//
// That such a store arrives whole in a peer's memory is a property of NVLink, on which NCCL's LL128 protocol relies as
// well. Where PCIe links two GPUs of a team, all rows are plain (Communicator::stores_lines_whole). On CPUs the tag is
// stored last and loaded first.
//
// Where a tag is expected, there may still be bytes of an earlier operation's plain rows. So that these are not taken
// for a tag, its upper 16 bits, which no epoch reaches, are a NaN in every row format, and the rest is mixed with a
// constant.
#pragma once

#include "device/sum_rows.h"
#include "kernels/ll/peers.h"

namespace crossdock {

inline constexpr uint64_t kLl128Rows = uint64_t{1} << (kPayloadBits - 1);  // in a row count: the rows are LL128 rows
static_assert(kMaxPayload / kMaxTopk < kLl128Rows, "a count of a rank's rows leaves that bit alone");

inline constexpr uint32_t kLl128ContentBits = 8;
inline constexpr uint64_t kLl128TagPattern = 0xFFFFA96C35E2D74B;
static_assert(kEpochBits + kLl128ContentBits <= 48, "a tag's upper 16 bits stay a NaN");

CROSSDOCK_HOST_DEVICE constexpr uint64_t ll128_tag(uint64_t epoch, uint64_t content) {
    return kLl128TagPattern ^ (epoch << kLl128ContentBits | content);
}
CROSSDOCK_HOST_DEVICE constexpr uint64_t ll128_epoch(uint64_t tag) {
    return (tag ^ kLl128TagPattern) >> kLl128ContentBits;
}
CROSSDOCK_HOST_DEVICE constexpr uint64_t ll128_content(uint64_t tag) {
    return (tag ^ kLl128TagPattern) % (uint64_t{1} << kLl128ContentBits);
}

namespace {

inline constexpr uint32_t kPiecesOfLine = 8;
// A warp moves a group of lines at once.
inline constexpr uint32_t kLinesOfGroup = kLanes < kPiecesOfLine ? 1 : kLanes / kPiecesOfLine;
inline constexpr uint32_t kPiecesOfLane = kLinesOfGroup * kPiecesOfLine / kLanes;
static_assert(16 * kPiecesOfLine == kLineBytes && kLinePayload + 8 == kLineBytes,
              "a line is pieces of 16 bytes, of the last one half is the tag");
static_assert(kPiecesOfLane * kLanes == kLinesOfGroup * kPiecesOfLine && kPiecesOfLine % kPiecesOfLane == 0,
              "every lane has as many pieces, of one line: at most its last one has a tag");

// This lane's view of a row of `bytes` bytes, a multiple of 16. The first seven pieces of all lines hold the row's
// beginning, the halves next to the tags its end, so that all copies are aligned.
class Ll128Row {
  public:
    static constexpr uint32_t kGroupBytes = kLinesOfGroup * kLineBytes;
    static constexpr uint32_t kAligned = kLinePayload / 16 * 16;  // of a line's payload; the rest is next to the tag
    // From group to group a piece moves by so many bytes of the row.
    static constexpr uint32_t kStep = kLinesOfGroup * kAligned;
    static constexpr uint32_t kStepAtTag = kLinesOfGroup * (kLinePayload - kAligned);

    CROSSDOCK_DEVICE Ll128Row(const Ctx& ctx, uint32_t bytes)
        : bytes_(bytes), groups_((lines_of(bytes) + kLinesOfGroup - 1) / kLinesOfGroup) {
        const uint32_t lines = lines_of(bytes);
        first_piece_ = ctx.lane() * kPiecesOfLane;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
            const uint32_t line = (first_piece_ + i) / kPiecesOfLine;
            const uint32_t piece = (first_piece_ + i) % kPiecesOfLine;
            first_offset_[i] = has_tag(i) ? kAligned * lines + 8 * line : kAligned * line + 16 * piece;
            groups_with_line_[i] = (lines + kLinesOfGroup - 1 - line) / kLinesOfGroup;
        }
    }
    CROSSDOCK_DEVICE uint32_t bytes() const { return bytes_; }
    CROSSDOCK_DEVICE uint32_t groups() const { return groups_; }

    // Whether this lane's i-th piece ends in a tag: only the last one may.
    CROSSDOCK_DEVICE bool has_tag(uint32_t i) const {
        return i + 1 == kPiecesOfLane && first_piece_ % kPiecesOfLine == kPiecesOfLine - kPiecesOfLane;
    }
    // Whether the piece's line exists in the group.
    CROSSDOCK_DEVICE bool has_line(uint32_t group, uint32_t i) const { return group < groups_with_line_[i]; }
    // The offset of the piece's payload in the row.
    CROSSDOCK_DEVICE uint32_t offset(uint32_t group, uint32_t i) const {
        return first_offset_[i] + group * (has_tag(i) ? kStepAtTag : kStep);
    }
    // The offset of 16 aligned bytes of the row that contain this payload, if any.
    CROSSDOCK_DEVICE uint32_t aligned_offset(uint32_t group, uint32_t i) const {
        const uint32_t aligned = offset(group, i) / 16 * 16;
        return aligned < bytes_ ? aligned : 0;
    }
    // Whether it holds any of the row's first `end` bytes.
    CROSSDOCK_DEVICE bool has_payload(uint32_t group, uint32_t i, uint32_t end) const {
        return has_line(group, i) && offset(group, i) < end;
    }
    // The offset of this lane's first piece of the group in all lines.
    CROSSDOCK_DEVICE uint32_t offset_in_lines(uint32_t group) const { return group * kGroupBytes + 16 * first_piece_; }

  private:
    uint32_t bytes_;
    uint32_t groups_;
    uint32_t first_piece_;
    uint32_t first_offset_[kPiecesOfLane];
    uint32_t groups_with_line_[kPiecesOfLane];
};

// Rounded down; both below 2^22. Faster than an integer division.
CROSSDOCK_DEVICE uint32_t quotient(uint32_t dividend, uint32_t divisor) {
    const uint32_t guess =
        static_cast<uint32_t>(about_divided(static_cast<float>(dividend), static_cast<float>(divisor)));
    if (guess * divisor > dividend) return guess - 1;
    return (guess + 1) * divisor > dividend ? guess : guess + 1;
}

// Groups [begin, end) of a row: one warp's share.
struct Ll128Run {
    uint32_t begin;
    uint32_t end;
};

// A row's groups, divided evenly among at most `warps` / `rows` warps.
struct Ll128Parts {
    uint32_t groups;  // of a row
    uint32_t groups_of_part;
    uint32_t num;

    CROSSDOCK_DEVICE static Ll128Parts of(const Ll128Row& row, uint32_t rows, uint32_t warps) {
        const uint32_t groups = row.groups();
        const uint32_t most = rows < warps ? quotient(warps, rows > 0 ? rows : 1) : 1;
        const uint32_t groups_of_part = quotient(groups + most - 1, most);
        return {groups, groups_of_part, quotient(groups + groups_of_part - 1, groups_of_part)};
    }
    CROSSDOCK_DEVICE Ll128Run run(uint32_t part) const {
        const uint32_t begin = part * groups_of_part;
        return {begin, begin + groups_of_part < groups ? begin + groups_of_part : groups};
    }
};

// A lane's pieces of a group of lines: payload, and tags in upper halves. Must be called by the full warp.
struct Ll128Group {
    Bytes16 pieces[kPiecesOfLane];

    // Reads a row's bytes; zeros past their end.
    CROSSDOCK_DEVICE void read(const Ll128Row& row, uint32_t group, const std::byte* data) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
            pieces[i] = {0, 0};
            if (!row.has_payload(group, i, row.bytes())) continue;
            const std::byte* source = data + row.offset(group, i);
            if (row.has_tag(i)) {
                pieces[i].low = *reinterpret_cast<const uint64_t*>(source);
            } else {
                pieces[i] = *reinterpret_cast<const Bytes16*>(source);
            }
        }
    }

    // If `stores`. lines: this lane's first piece of the group. Call after ctx.warp_sync(): all lanes of a line must
    // store in one instruction.
    CROSSDOCK_DEVICE void store(const Ctx& ctx, const Ll128Row& row, uint32_t group, std::byte* lines, uint64_t tag,
                                bool stores = true) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
            if (row.has_tag(i)) pieces[i].high = tag;
            ctx.store_tagged_if(stores && row.has_line(group, i), reinterpret_cast<TaggedWord*>(lines) + i,
                                pieces[i].low, pieces[i].high);
        }
    }

    CROSSDOCK_DEVICE void load_piece(const Ctx& ctx, uint32_t i, const std::byte* source) {
        const TaggedWord word = ctx.load_tagged(reinterpret_cast<const TaggedWord*>(source));
        pieces[i] = {word.payload, word.tag};
    }
    // lines: this lane's first piece of the group.
    CROSSDOCK_DEVICE void load(const Ctx& ctx, const Ll128Row& row, uint32_t group, const std::byte* lines) {
        CROSSDOCK_UNROLL
        for (uint32_t i = kPiecesOfLane; i-- > 0;) {  // tags first
            if (row.has_line(group, i)) load_piece(ctx, i, lines + 16 * i);
        }
    }
    // data: a row's lines, or a plain row's bytes: then aligned() returns the payload. One instruction for both, so
    // that rows of both forms are loaded together.
    CROSSDOCK_DEVICE void load_either(const Ctx& ctx, const Ll128Row& row, uint32_t group, const std::byte* data,
                                      bool is_plain) {
        CROSSDOCK_UNROLL
        for (uint32_t i = kPiecesOfLane; i-- > 0;) {
            const uint32_t offset = is_plain ? row.aligned_offset(group, i) : row.offset_in_lines(group) + 16 * i;
            if (row.has_line(group, i)) load_piece(ctx, i, data + offset);
        }
    }
    // The payload next to a tag is 8 bytes of a plain row, of which 16 were loaded.
    CROSSDOCK_DEVICE Ll128Group aligned(const Ctx& ctx, const Ll128Row& row, uint32_t group) const {
        constexpr uint32_t kLast = kPiecesOfLane - 1;
        Ll128Group other = *this;
        const uint64_t low = ctx.found_anew(pieces[kLast].low);  // apart from what was loaded
        const bool is_upper = row.has_tag(kLast) && row.offset(group, kLast) % 16 != 0;
        other.pieces[kLast].low = is_upper ? pieces[kLast].high : low;
        return other;
    }

    // The difference between this lane's tag and `tag`; 0 if there is none, or the lane has no tag.
    CROSSDOCK_DEVICE uint64_t difference(const Ll128Row& row, uint32_t group, uint64_t tag) const {
        constexpr uint32_t kLast = kPiecesOfLane - 1;
        return row.has_tag(kLast) && row.has_line(group, kLast) ? pieces[kLast].high ^ tag : 0;
    }

    // Writes this lane's part of the row's first `bytes` bytes (a multiple of 16).
    CROSSDOCK_DEVICE void write(const Ll128Row& row, uint32_t group, uint32_t bytes, std::byte* data) const {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
            if (!row.has_payload(group, i, bytes)) continue;
            std::byte* target = data + row.offset(group, i);
            if (row.has_tag(i)) {
                *reinterpret_cast<uint64_t*>(target) = pieces[i].low;
            } else {
                *reinterpret_cast<Bytes16*>(target) = pieces[i];
            }
        }
    }
};

// Writes this lane's part of groups [first, first + num) to any number of copies of the row's first `bytes` bytes (a
// multiple of 16).
template <uint32_t kMost>
class Ll128Copies {
  public:
    CROSSDOCK_DEVICE Ll128Copies(const Ll128Row& row, uint32_t first, uint32_t num, uint32_t bytes) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
            uint32_t stored = 0;
            CROSSDOCK_UNROLL
            for (uint32_t g = 0; g < kMost; ++g)
                stored |= g < num && row.has_payload(first + g, i, bytes) ? 1u << g : 0;
            offset_[i] = row.offset(first, i);
            whole_[i] = row.has_tag(i) ? 0 : stored;
            half_[i] = row.has_tag(i) ? stored : 0;
        }
    }
    // The first kNum groups. Without branches, each of which would take as long as a store.
    template <uint32_t kNum>
    CROSSDOCK_DEVICE void write(const Ll128Group (&groups)[kMost], std::byte* copy) const {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
            std::byte* target = copy + offset_[i];
            CROSSDOCK_UNROLL
            for (uint32_t g = 0; g < kNum; ++g) {
                const Bytes16& piece = groups[g].pieces[i];
                if ((whole_[i] >> g & 1) != 0) *reinterpret_cast<Bytes16*>(target + g * Ll128Row::kStep) = piece;
                if ((half_[i] >> g & 1) != 0)
                    *reinterpret_cast<uint64_t*>(target + g * Ll128Row::kStepAtTag) = piece.low;
            }
        }
    }

  private:
    uint32_t offset_[kPiecesOfLane];
    uint32_t whole_[kPiecesOfLane];  // bits: groups whose piece is all payload
    uint32_t half_[kPiecesOfLane];   // bits: groups whose piece ends in a tag
};

// The epoch of a group's first line, for a diagnosis; 0: none.
CROSSDOCK_DEVICE_RARE uint64_t epoch_in_ll128(const Ctx& ctx, const std::byte* lines, uint32_t group) {
    const std::byte* end = lines + uint64_t{group} * Ll128Row::kGroupBytes + kLineBytes;
    const uint64_t epoch = ll128_epoch(ctx.load_tagged(reinterpret_cast<const TaggedWord*>(end) - 1).tag);
    return epoch >> kEpochBits == 0 ? epoch : 0;
}

// Several groups that are polled together until all have arrived.
template <uint32_t kMost>
struct Ll128Wait {
    static_assert(kMost < 32, "a bit of 32 per group");
    Ll128Group groups[kMost];
    uint32_t missing;      // bits; the same for all lanes
    uint32_t plain = 0;    // bits: groups of a plain row, which need not arrive
    uint32_t unusual = 0;  // bits: groups that have arrived with a content other than 0 in this lane's tag

    CROSSDOCK_DEVICE bool awaits(uint32_t i) const { return (missing >> i & 1) != 0; }
    CROSSDOCK_DEVICE uint32_t first_missing() const { return number_of_ones((missing & (0u - missing)) - 1); }

    // group(i): the number of the i-th in its row; load(i, it) loads it.
    template <typename Load, typename Group>
    CROSSDOCK_DEVICE void look(const Ctx& ctx, const Ll128Row& row, uint64_t epoch, Load load, Group group) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kMost; ++i) {
            if (awaits(i)) load(i, groups[i]);
        }
        const uint64_t tag = ll128_tag(epoch, 0);
        uint32_t wrong = 0;
        uint32_t others = 0;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kMost; ++i) {
            const uint64_t difference = groups[i].difference(row, group(i), tag);
            others |= difference != 0 ? 1u << i : 0;
            wrong |= difference >> kLl128ContentBits != 0 ? 1u << i : 0;
        }
        unusual |= others & ~wrong & missing & ~plain;
        missing = ctx.warp_or(wrong & missing & ~plain);
    }
};

// Weighted sums of a lane's pieces, as device/sum_rows.h defines them.
template <DType kDType>
struct Ll128Sums {
    float sums[kPiecesOfLane][16 / dtype_bytes(kDType)] = {};

    CROSSDOCK_DEVICE void add(const Ll128Group& group, float weight) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) add_weighted<kDType>(group.pieces[i], weight, sums[i]);
    }
    CROSSDOCK_DEVICE Ll128Group rounded() const {
        Ll128Group group;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) group.pieces[i] = packed_sums<kDType>(sums[i]);
        return group;
    }
};

}  // namespace
}  // namespace crossdock
