// SPDX-License-Identifier: Apache-2.0
// The forms in which the rows of HT's combine travel; among them its quantisation recipes. What callers pass for each:
// core/recipes.h. How to add one: CONTRIBUTING.md. A dispatch sends rows as they are.
//
// A row is quantised in pieces of `quantised_bytes` (HtWarpLayout; the last may be shorter), one after the other in the
// packet. Who sums decides how large they are:
// - A pipeline (GPUs): each summer has its share of a part of the row in registers (PartSum). A share is a piece.
// - One warp (CPUs): it sums a part of the row in a stage. The part is a piece.
#pragma once

#include "device/mxfp8.h"
#include "device/row_stage.h"
#include "nccl_ep/ep_enums.h"

namespace crossdock {

enum class HtWire : uint32_t {
    kRows,     // one row for each rank of a token: the sum of its experts' rows
    kMxfp8,    // the same, bf16 rows quantised (expert-major, one team)
    kChoices,  // expert-major: the row of every expert, which the source rank adds up in the order of choices
};

constexpr HtWire ht_wire_of(ncclEpCombQuant_t recipe) {
    return recipe == NCCL_EP_COMB_QUANT_MXFP8 ? HtWire::kMxfp8 : HtWire::kRows;
}

CROSSDOCK_HOST_DEVICE constexpr bool is_quantised(HtWire wire) { return wire == HtWire::kMxfp8; }

// Calls run<dtype, wire>().
template <typename Run>
void with_wire(DType dtype, HtWire wire, Run run) {
    switch (wire) {
        case HtWire::kRows:
            return with_dtype(dtype, [&]<DType kDType>() { run.template operator()<kDType, HtWire::kRows>(); });
        case HtWire::kMxfp8:
            return run.template operator()<DType::kBf16, HtWire::kMxfp8>();
        case HtWire::kChoices:
            return with_dtype(dtype, [&]<DType kDType>() { run.template operator()<kDType, HtWire::kChoices>(); });
    }
}

// A piece, in bytes of the row, is a multiple of this.
constexpr uint32_t wire_granule(HtWire wire) {
    switch (wire) {
        case HtWire::kRows:
        case HtWire::kChoices:
            break;
        case HtWire::kMxfp8:
            return kMxfp8Block * dtype_bytes(DType::kBf16);
    }
    return 16;
}

// What a piece of so many bytes takes on the wire, a multiple of 16.
CROSSDOCK_HOST_DEVICE constexpr uint32_t wire_bytes(HtWire wire, uint32_t bytes) {
    switch (wire) {
        case HtWire::kRows:
        case HtWire::kChoices:
            break;
        case HtWire::kMxfp8:
            return mxfp8_part_bytes(bytes / 2);
    }
    return bytes;
}
// The same of a row, or of a part of one.
constexpr uint32_t wire_bytes(HtWire wire, uint32_t bytes, uint32_t quantised_bytes) {
    if (quantised_bytes == 0) return 0;
    return bytes / quantised_bytes * wire_bytes(wire, quantised_bytes) + wire_bytes(wire, bytes % quantised_bytes);
}

namespace {

// One warp. Stores its share of a sum in wire form, where that share of the last summand was.
template <HtWire kWire, DType kDType>
CROSSDOCK_DEVICE void store_share(const Ctx& ctx, const PartSum<kDType>& sum, std::byte* share, uint32_t bytes) {
    if constexpr (kWire == HtWire::kMxfp8) {
        ctx.warp_sync();  // all lanes have read their summands
        CROSSDOCK_UNROLL
        for (uint32_t v = 0; v < PartSum<kDType>::kVectors; v += kMxfp8Vectors) {
            Bytes16 vectors[kMxfp8Vectors];
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kMxfp8Vectors; ++i) vectors[i] = sum.packed(v + i);
            const uint32_t element = PartSum<kDType>::place(ctx, v) / 2;
            quantise_mxfp8(ctx, vectors, 2 * element < bytes, share + element,
                           share + bytes / 2 + element / kMxfp8Block);
        }
    } else {
        static_assert(!is_quantised(kWire), "how a share is quantised");
        sum.store(ctx, share, bytes);
    }
}

// The leader. Sends `bytes` of a row, whose shares are in wire form.
template <HtWire kWire>
CROSSDOCK_DEVICE void send_shares(const Ctx& ctx, const RowStage& from, std::byte* packet, uint32_t bytes,
                                  uint32_t share_bytes, bool is_read_soon) {
    if constexpr (is_quantised(kWire)) {
        CROSSDOCK_ROLLED
        for (uint32_t first = 0; first < bytes; first += share_bytes) {
            const uint32_t share = bytes - first < share_bytes ? bytes - first : share_bytes;
            from.store(ctx, packet, first, wire_bytes(kWire, share), is_read_soon);
            packet += wire_bytes(kWire, share_bytes);
        }
    } else {
        from.store(ctx, packet, 0, bytes, is_read_soon);
    }
}

// One warp. Brings a part that was summed in a stage to its wire form, in the bytes from tail_at on. Returns where the
// wire form begins in the stage.
template <HtWire kWire>
CROSSDOCK_DEVICE uint32_t quantise_part(const Ctx& ctx, std::byte* stage, uint32_t bytes, uint32_t tail_at) {
    if constexpr (kWire == HtWire::kMxfp8) {
        quantise_mxfp8(ctx, stage, bytes / 2, stage + tail_at, stage + tail_at + bytes / 2);
        return tail_at;
    }
    static_assert(kWire == HtWire::kMxfp8 || !is_quantised(kWire), "how a part is quantised");
    return 0;
}

// One warp. out[e] = sum over i of rows[i][e], i ascending, of `count` rows in wire form, in fp32 with one rounding.
template <HtWire kWire, DType kDType>
CROSSDOCK_DEVICE void sum_wire_rows(const Ctx& ctx, const std::byte* const* rows, uint32_t count, uint32_t bytes,
                                    uint32_t quantised_bytes, std::byte* out) {
    if constexpr (kWire == HtWire::kMxfp8) {
        sum_mxfp8_rows(ctx, rows, count, bytes / 2, quantised_bytes / 2, out);
    } else {
        static_assert(!is_quantised(kWire), "how quantised rows are summed");
        sum_rows<kDType>(ctx, PointerSummands{rows, count}, 0, bytes / dtype_bytes(kDType), out);
    }
}

}  // namespace
}  // namespace crossdock
