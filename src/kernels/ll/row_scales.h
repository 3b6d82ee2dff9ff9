// SPDX-License-Identifier: Apache-2.0
// Dispatch: rows' scales, the caller's or those of FP8 rows that are quantised here. The caller's may begin at any
// address that their element type allows.
#pragma once

#include "kernels/ll/ll128.h"
#include "kernels/ll/peers.h"

namespace crossdock {
namespace {

CROSSDOCK_DEVICE bool is_word(const void* memory) { return reinterpret_cast<uintptr_t>(memory) % 4 == 0; }

// Copies a multiple of 4 bytes. All lanes.
CROSSDOCK_DEVICE void copy_words(const Ctx& ctx, void* target, const void* source, uint32_t bytes) {
    if (is_word(target) && is_word(source)) {
        for_lanes(ctx, bytes / 4,
                  [&](uint32_t i) { static_cast<uint32_t*>(target)[i] = static_cast<const uint32_t*>(source)[i]; });
    } else {
        for_lanes(ctx, bytes,
                  [&](uint32_t i) { static_cast<std::byte*>(target)[i] = static_cast<const std::byte*>(source)[i]; });
    }
}

// is_aligned: is_word(target).
CROSSDOCK_DEVICE void store_word(std::byte* target, uint32_t value, bool is_aligned) {
    if (is_aligned) {
        *reinterpret_cast<uint32_t*>(target) = value;
        return;
    }
    CROSSDOCK_UNROLL
    for (uint32_t i = 0; i < 4; ++i) target[i] = static_cast<std::byte>(value >> (8 * i));
}

// Receive half. Places a row's scales next to each of its copies.
template <typename Op>
class ScalePlacer {
  public:
    CROSSDOCK_DEVICE explicit ScalePlacer(const Op& op) : op_(op), args_(op.args), c_(op.c) {}

    // This lane's first part of a row's scales, so that it can be loaded early.
    CROSSDOCK_DEVICE uint64_t load_first(const std::byte* scales) const {
        const uint32_t first = kScalePart * op_.lane();
        return first < args_.scale_bytes ? *reinterpret_cast<const uint64_t*>(scales + first) : 0;
    }
    // One warp. Places all scales of a row. Each is read once, for any number of places. part: load_first.
    CROSSDOCK_DEVICE void place_all(const Placement& placement, const std::byte* scales, uint64_t part) const {
        CROSSDOCK_ROLLED
        for (uint32_t first = kScalePart * op_.lane(); first < args_.scale_bytes; first += kScalePart * kLanes) {
            const bool is_first = first < kScalePart * kLanes;
            place(placement, first, kScalePart,
                  {is_first ? part : *reinterpret_cast<const uint64_t*>(scales + first), 0});
        }
    }
    // Places this lane's part of a row's scales in these groups of lines.
    template <uint32_t kMost>
    CROSSDOCK_DEVICE void place_of_lines(const Placement& placement, const Ll128Row& row, uint32_t first_group,
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
                place(placement, offset - args_.row_bytes, row.has_tag(i) ? 8 : 16, bytes);
            }
        }
    }

  private:
    static constexpr uint32_t kScalePart = 8;  // bytes that a lane places at once

    // Places 8 or 16 bytes of a row's scales, from their byte `first` on.
    CROSSDOCK_DEVICE void place(const Placement& placement, uint32_t first, uint32_t bytes, const Bytes16& part) const {
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

    const Op& op_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
};

}  // namespace
}  // namespace crossdock
