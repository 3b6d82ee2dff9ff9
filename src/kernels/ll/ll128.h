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

#include "device/numeric.h"
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

inline namespace CROSSDOCK_VARIANT {

inline constexpr uint32_t kPiecesOfLine = 8;
// A warp moves a group of lines at once.
inline constexpr uint32_t kLinesOfGroup = uint32_t{kLanes} < kPiecesOfLine ? 1 : uint32_t{kLanes} / kPiecesOfLine;
inline constexpr uint32_t kPiecesOfLane = kLinesOfGroup * kPiecesOfLine / uint32_t{kLanes};
static_assert(16 * kPiecesOfLine == kLineBytes && kLinePayload + 8 == kLineBytes,
              "a line is pieces of 16 bytes, of the last one half is the tag");
static_assert(kPiecesOfLane * kLanes == kLinesOfGroup * kPiecesOfLine && kPiecesOfLine % kPiecesOfLane == 0,
              "every lane has as many pieces, of one line: at most its last one has a tag");

// Where 16 bytes of a line are. The first seven pieces of all lines hold the row's beginning, the halves beside the
// tags its end: so all that is copied is aligned.
struct Ll128Piece {
    uint32_t line;
    uint32_t place;   // in its line
    uint32_t offset;  // of its payload in the row

    CROSSDOCK_DEVICE bool has_tag() const { return place + 1 == kPiecesOfLine; }
    CROSSDOCK_DEVICE uint32_t offset_in_lines() const { return line * kLineBytes + place * 16; }
};

// How a row of so many bytes, a multiple of 16, is cut.
class Ll128Row {
  public:
    CROSSDOCK_DEVICE explicit Ll128Row(uint32_t bytes) : bytes_(bytes), lines_(lines_of(bytes)) {}
    CROSSDOCK_DEVICE uint32_t bytes() const { return bytes_; }
    CROSSDOCK_DEVICE uint32_t groups() const { return (lines_ + kLinesOfGroup - 1) / kLinesOfGroup; }
    CROSSDOCK_DEVICE bool has_line_of(const Ll128Piece& piece) const { return piece.line < lines_; }

    // The i-th of this lane's pieces of a group.
    CROSSDOCK_DEVICE Ll128Piece piece(const Ctx& ctx, uint32_t group, uint32_t i) const {
        const uint32_t number = static_cast<uint32_t>(ctx.lane()) * kPiecesOfLane + i;
        const uint32_t line = group * kLinesOfGroup + number / kPiecesOfLine;
        const uint32_t place = number % kPiecesOfLine;
        constexpr uint32_t kAligned = kLinePayload / 16 * 16;
        const bool has_tag = place + 1 == kPiecesOfLine;
        return {line, place, has_tag ? kAligned * lines_ + 8 * line : kAligned * line + 16 * place};
    }

  private:
    uint32_t bytes_;
    uint32_t lines_;
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
    CROSSDOCK_DEVICE void read(const Ctx& ctx, const Ll128Row& row, uint32_t group, const std::byte* data) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
            const Ll128Piece piece = row.piece(ctx, group, i);
            Bytes16 bytes{0, 0};
            if (piece.offset < row.bytes()) {
                if (piece.has_tag()) {
                    bytes.low = *reinterpret_cast<const uint64_t*>(data + piece.offset);
                } else {
                    bytes = *reinterpret_cast<const Bytes16*>(data + piece.offset);
                }
            }
            pieces[i] = bytes;
        }
    }

    CROSSDOCK_DEVICE void store(const Ctx& ctx, const Ll128Row& row, uint32_t group, std::byte* lines,
                                uint64_t tag) const {
        ctx.warp_sync();  // all lanes of a line in one instruction
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
            const Ll128Piece piece = row.piece(ctx, group, i);
            if (!row.has_line_of(piece)) continue;
            ctx.store_tagged(reinterpret_cast<TaggedWord*>(lines + piece.offset_in_lines()), pieces[i].low,
                             piece.has_tag() ? tag : pieces[i].high);
        }
    }

    CROSSDOCK_DEVICE void load(const Ctx& ctx, const Ll128Row& row, uint32_t group, const std::byte* lines) {
        CROSSDOCK_UNROLL
        for (uint32_t i = kPiecesOfLane; i-- > 0;) {  // tags first
            const Ll128Piece piece = row.piece(ctx, group, i);
            if (!row.has_line_of(piece)) continue;
            const TaggedWord word =
                ctx.load_tagged(reinterpret_cast<const TaggedWord*>(lines + piece.offset_in_lines()));
            pieces[i] = {word.payload, word.tag};
        }
    }

    // This lane's tags, if it has any, are of that operation; and say that.
    CROSSDOCK_DEVICE bool is_of(const Ctx& ctx, const Ll128Row& row, uint32_t group, uint64_t epoch) const {
        const Ll128Piece last = row.piece(ctx, group, kPiecesOfLane - 1);
        return !last.has_tag() || !row.has_line_of(last) || ll128_epoch(pieces[kPiecesOfLane - 1].high) == epoch;
    }
    CROSSDOCK_DEVICE bool says(const Ctx& ctx, const Ll128Row& row, uint32_t group, uint64_t content) const {
        const Ll128Piece last = row.piece(ctx, group, kPiecesOfLane - 1);
        return !last.has_tag() || !row.has_line_of(last) || ll128_content(pieces[kPiecesOfLane - 1].high) == content;
    }

    // The row's first `bytes` bytes (a multiple of 16), as far as they are here.
    CROSSDOCK_DEVICE void write(const Ctx& ctx, const Ll128Row& row, uint32_t group, uint32_t bytes,
                                std::byte* target) const {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
            const Ll128Piece piece = row.piece(ctx, group, i);
            if (!row.has_line_of(piece) || piece.offset >= bytes) continue;
            if (piece.has_tag()) {
                *reinterpret_cast<uint64_t*>(target + piece.offset) = pieces[i].low;
            } else {
                *reinterpret_cast<Bytes16*>(target + piece.offset) = pieces[i];
            }
        }
    }
};

// Which operation the first line of a group is of, for a diagnosis; 0: of none.
CROSSDOCK_DEVICE_RARE uint64_t epoch_in_ll128(const Ctx& ctx, const std::byte* lines, uint32_t group) {
    const std::byte* end = lines + (uint64_t{group} * kLinesOfGroup + 1) * kLineBytes;
    const uint64_t epoch = ll128_epoch(ctx.load_tagged(reinterpret_cast<const TaggedWord*>(end) - 1).tag);
    return epoch >> kEpochBits == 0 ? epoch : 0;
}

// Several groups on their way in, polled together until all are here.
template <uint32_t kMost>
struct Ll128Wait {
    static_assert(kMost < 32, "a bit of 32 per group");
    Ll128Group groups[kMost];
    uint32_t missing;  // bits; the same for all lanes

    CROSSDOCK_DEVICE bool awaits(uint32_t i) const { return (missing >> i & 1) != 0; }
    CROSSDOCK_DEVICE uint32_t first_missing() const {
        return static_cast<uint32_t>(number_of_ones((missing & (0u - missing)) - 1));
    }

    // lines(i), group(i): where the i-th is.
    template <typename Lines, typename Group>
    CROSSDOCK_DEVICE void look(const Ctx& ctx, const Ll128Row& row, uint64_t epoch, Lines lines, Group group) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kMost; ++i) {
            if (awaits(i)) groups[i].load(ctx, row, group(i), lines(i));
        }
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kMost; ++i) {
            if (awaits(i) && ctx.warp_all(groups[i].is_of(ctx, row, group(i), epoch))) missing &= ~(1u << i);
        }
    }
};

// Weighted sums of what a lane has of groups, as device/sum_rows.h defines them.
template <DType kDType>
struct Ll128Sums {
    static constexpr uint32_t kPerWord = 8 / dtype_bytes(kDType);
    float sums[kPiecesOfLane][2 * kPerWord] = {};

    CROSSDOCK_DEVICE void add(const Ll128Group& group, float weight) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
            CROSSDOCK_UNROLL
            for (uint32_t e = 0; e < 2 * kPerWord; ++e) {
                const uint64_t packed = e < kPerWord ? group.pieces[i].low : group.pieces[i].high;
                sums[i][e] = fused_multiply_add(weight, element_of<kDType>(packed, e % kPerWord), sums[i][e]);
            }
        }
    }
    CROSSDOCK_DEVICE Ll128Group rounded() const {
        Ll128Group group;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
            group.pieces[i] = {0, 0};
            CROSSDOCK_UNROLL
            for (uint32_t e = 0; e < kPerWord; ++e) {
                group.pieces[i].low |= packed_element<kDType>(sums[i][e], e);
                group.pieces[i].high |= packed_element<kDType>(sums[i][kPerWord + e], e);
            }
        }
        return group;
    }
};

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
