// SPDX-License-Identifier: Apache-2.0
// LL128 rows. A line is 128 bytes: 120 of payload and, last, a tag that says which operation it is of. Eight
// lanes store one in a single instruction of their warp, 16 bytes each, and load it likewise: whoever sees the tag sees
// the line. So nothing has to land before a flag may follow, and there is no flag.
//
// That such a store arrives whole in a peer's memory is a property of NVLink, which NCCL's LL128 protocol relies on,
// too. On CPUs the tag is stored last and loaded first.
//
// Where a tag is awaited, bytes of an earlier operation's plain rows may still lie. So that they are not taken for it,
// a tag is a number of 64 bits that has no other use: its upper 16 bits, which no epoch reaches, are a NaN in every
// format of rows, and the rest is mixed with a constant.
#pragma once

#include "device/sum_rows.h"
#include "kernels/ll/operation.h"

namespace crossdock {

inline constexpr uint64_t kLl128Rows = uint64_t{1} << (kPayloadBits - 1);  // in a row count: they are LL128 rows
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
inline constexpr uint32_t kLinesOfGroup = uint32_t{kLanes} < kPiecesOfLine ? 1 : uint32_t{kLanes} / kPiecesOfLine;
inline constexpr uint32_t kPiecesOfLane = kLinesOfGroup * kPiecesOfLine / uint32_t{kLanes};
static_assert(16 * kPiecesOfLine == kLineBytes && kLinePayload + 8 == kLineBytes,
              "a line is pieces of 16 bytes, of the last one half is the tag");
static_assert(kPiecesOfLane * kLanes == kLinesOfGroup * kPiecesOfLine && kPiecesOfLine % kPiecesOfLane == 0,
              "every lane has as many pieces, of one line: at most its last one has a tag");

// How this lane sees a row of so many bytes, a multiple of 16. The first seven pieces of all lines hold the row's
// beginning, the halves beside the tags its end: so all that is copied is aligned. From group to group a piece moves by
// a fixed number of bytes.
class Ll128Row {
  public:
    static constexpr uint32_t kGroupBytes = kLinesOfGroup * kLineBytes;

    CROSSDOCK_DEVICE Ll128Row(const Ctx& ctx, uint32_t bytes)
        : bytes_(bytes), groups_((lines_of(bytes) + kLinesOfGroup - 1) / kLinesOfGroup) {
        constexpr uint32_t kAligned = kLinePayload / 16 * 16;
        const uint32_t lines = lines_of(bytes);
        first_piece_ = static_cast<uint32_t>(ctx.lane()) * kPiecesOfLane;
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

    // Of the i-th of this lane's pieces. The last one may end in a tag.
    CROSSDOCK_DEVICE bool has_tag(uint32_t i) const {
        return i + 1 == kPiecesOfLane && first_piece_ % kPiecesOfLine == kPiecesOfLine - kPiecesOfLane;
    }
    // In that group.
    CROSSDOCK_DEVICE bool has_line(uint32_t group, uint32_t i) const { return group < groups_with_line_[i]; }
    // Of its payload in the row.
    CROSSDOCK_DEVICE uint32_t offset(uint32_t group, uint32_t i) const {
        return first_offset_[i] + group * kLinesOfGroup * (has_tag(i) ? 8 : kLinePayload / 16 * 16);
    }
    // Of 16 aligned bytes of the row, with that payload if it has any.
    CROSSDOCK_DEVICE uint32_t aligned_offset(uint32_t group, uint32_t i) const {
        const uint32_t aligned = offset(group, i) / 16 * 16;
        return aligned < bytes_ ? aligned : 0;
    }
    // Whether it has any, of the row's first `end` bytes.
    CROSSDOCK_DEVICE bool has_payload(uint32_t group, uint32_t i, uint32_t end) const {
        return has_line(group, i) && offset(group, i) < end;
    }
    // Of the first piece in all lines.
    CROSSDOCK_DEVICE uint32_t offset_in_lines(uint32_t group) const { return group * kGroupBytes + 16 * first_piece_; }

  private:
    uint32_t bytes_;
    uint32_t groups_;
    uint32_t first_piece_;
    uint32_t first_offset_[kPiecesOfLane];
    uint32_t groups_with_line_[kPiecesOfLane];
};

// Rounded down; both below 2^22. Shorter than a division of integers.
CROSSDOCK_DEVICE uint32_t quotient(uint32_t dividend, uint32_t divisor) {
    const uint32_t guess =
        static_cast<uint32_t>(about_divided(static_cast<float>(dividend), static_cast<float>(divisor)));
    if (guess * divisor > dividend) return guess - 1;
    return (guess + 1) * divisor > dividend ? guess : guess + 1;
}

// Groups [begin, end) of a row: what one of several warps does of it.
struct Ll128Run {
    uint32_t begin;
    uint32_t end;
};

// A row's groups, shared evenly by at most so many warps.
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

// What a lane has of a group of lines: payload, and tags in upper halves. All of it by a whole warp.
struct Ll128Group {
    Bytes16 pieces[kPiecesOfLane];

    // From a row's bytes; what is past their end is zero.
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

    // If it is to be stored. lines: this lane's first piece of the group. Behind ctx.warp_sync(): all lanes of a line
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
    // data: a row's lines; or, plain, its bytes: then aligned() has the payload. One instruction for both, so that rows
    // of both forms are on their way together.
    CROSSDOCK_DEVICE void load_either(const Ctx& ctx, const Ll128Row& row, uint32_t group, const std::byte* data,
                                      bool is_plain) {
        CROSSDOCK_UNROLL
        for (uint32_t i = kPiecesOfLane; i-- > 0;) {
            const uint32_t offset = is_plain ? row.aligned_offset(group, i) : row.offset_in_lines(group) + 16 * i;
            if (row.has_line(group, i)) load_piece(ctx, i, data + offset);
        }
    }
    // The payload beside a tag is 8 bytes of a plain row, of which 16 were loaded.
    CROSSDOCK_DEVICE Ll128Group aligned(const Ctx& ctx, const Ll128Row& row, uint32_t group) const {
        constexpr uint32_t kLast = kPiecesOfLane - 1;
        Ll128Group other = *this;
        const uint64_t low = ctx.found_anew(pieces[kLast].low);  // apart from what was loaded
        const bool is_upper = row.has_tag(kLast) && row.offset(group, kLast) % 16 != 0;
        other.pieces[kLast].low = is_upper ? pieces[kLast].high : low;
        return other;
    }

    // How this lane's tag, if it has any, differs from that of an operation's rows: 0 if it does not.
    CROSSDOCK_DEVICE uint64_t difference(const Ll128Row& row, uint32_t group, uint64_t tag) const {
        constexpr uint32_t kLast = kPiecesOfLane - 1;
        return row.has_tag(kLast) && row.has_line(group, kLast) ? pieces[kLast].high ^ tag : 0;
    }

    // The row's first `bytes` bytes (a multiple of 16), as far as they are here.
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

// Which operation the first line of a group is of, for a diagnosis; 0: of none.
CROSSDOCK_DEVICE_RARE uint64_t epoch_in_ll128(const Ctx& ctx, const std::byte* lines, uint32_t group) {
    const std::byte* end = lines + uint64_t{group} * Ll128Row::kGroupBytes + kLineBytes;
    const uint64_t epoch = ll128_epoch(ctx.load_tagged(reinterpret_cast<const TaggedWord*>(end) - 1).tag);
    return epoch >> kEpochBits == 0 ? epoch : 0;
}

// Several groups on their way in, polled together until all are here.
template <uint32_t kMost>
struct Ll128Wait {
    static_assert(kMost < 32, "a bit of 32 per group");
    Ll128Group groups[kMost];
    uint32_t missing;      // bits; the same for all lanes
    uint32_t plain = 0;    // bits: of a plain row, which is here
    uint32_t unusual = 0;  // bits: this lane has a tag that says something, of those that are here

    CROSSDOCK_DEVICE bool awaits(uint32_t i) const { return (missing >> i & 1) != 0; }
    CROSSDOCK_DEVICE uint32_t first_missing() const {
        return static_cast<uint32_t>(number_of_ones((missing & (0u - missing)) - 1));
    }

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

// Weighted sums of what a lane has of groups, as device/sum_rows.h defines them.
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
