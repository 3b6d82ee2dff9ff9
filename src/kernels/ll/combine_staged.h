// SPDX-License-Identifier: Apache-2.0
// Combine, receive half: sums of rows in the host's memory. They pass through a stage of the warp, by asynchronous
// loads: by ordinary ones, of which a warp has few under way, two H200s read 4 GB/s instead of 25.
#pragma once

#include "device/sum_rows.h"
#include "kernels/ll/peers.h"

namespace crossdock {
namespace {

template <DType kDType, typename Op>
class StagedSums {
  public:
    CROSSDOCK_DEVICE static bool are_used(const auto& args) { return args.shared.receive_stage_bytes > 0; }

    CROSSDOCK_DEVICE explicit StagedSums(const Op& op)
        : op_(op), ctx_(op.ctx), memory_(memory_of_warp(op.ctx, op.args.shared)) {}

    // One lane of each warp, before a block barrier.
    CROSSDOCK_DEVICE static void init(const Ctx& ctx, const auto& args) {
        std::byte* const memory = memory_of_warp(ctx, args.shared);
        CROSSDOCK_UNROLL
        for (uint32_t half = 0; half < 2; ++half)
            BlockBarrier(loaded(memory, half)).init(kLanes * BlockBarrier::kArrivalsOfLoad);
        RowStage::initialised();
    }

    // Sums bytes [first, first + bytes) of the rows, of which each lane knows whether its own is in the host's memory.
    // Returns false, without having done anything, if there are more rows than lanes, or none is there.
    CROSSDOCK_DEVICE bool sum(const SummandLists& summands, uint32_t num, bool is_in_host, uint32_t first,
                              uint32_t bytes, std::byte* out) {
        constexpr uint32_t kStep = kLanes * 16;
        const uint32_t lane = op_.lane();
        const int64_t address = lane < num ? summands.index[lane] : 0;
        const bool is_staged = is_in_host && lane < num && address != 0;
        const uint32_t staged = ctx_.warp_count(is_staged);
        const uint32_t place = ctx_.warp_count_before(is_staged);
        const uint32_t half_bytes = (op_.args.shared.receive_stage_bytes - kStageHeadBytes) / 2;
        if (num > kLanes || staged == 0) return false;
        const uint32_t share = half_bytes / staged;  // of a row
        const uint32_t piece = share - share % (share < kStep ? 16 : kStep);
        const std::byte* const source = reinterpret_cast<const std::byte*>(static_cast<uintptr_t>(address)) + first;
        const auto target = [&](uint32_t number) {
            return memory_ + kStageHeadBytes + number % 2 * half_bytes + place * piece;
        };
        const auto bytes_at = [&](uint32_t at) { return bytes - at < piece ? bytes - at : piece; };
        const auto load = [&](uint32_t number, uint32_t at) {
            const BlockBarrier barrier(loaded(memory_, number % 2));
            for (RowStage::Turns turns(ctx_, is_staged); turns.next();) {
                if (is_staged) barrier.arrive_with_load(ctx_, target(number), source + at, bytes_at(at));
            }
            if (!is_staged) barrier.arrive(ctx_, BlockBarrier::kArrivalsOfLoad);
        };
        ctx_.fence_async_copies();  // this lane has seen that its row may be read
        load(num_loads_, 0);
        CROSSDOCK_ROLLED
        for (uint32_t at = 0; at < bytes; at += piece, ++num_loads_) {
            // All lanes have summed what was in the other half.
            if (at + piece < bytes) load(num_loads_ + 1, at + piece);
            BlockBarrier(loaded(memory_, num_loads_ % 2)).wait(ctx_, num_loads_ / 2);
            // As if the whole row were there.
            if (is_staged)
                summands.index[lane] =
                    static_cast<int64_t>(reinterpret_cast<uintptr_t>(target(num_loads_)) - first - at);
            ctx_.warp_sync();
            sum_rows<kDType>(ctx_, AddressSummands{summands.index, summands.weight, num},
                             (first + at) / dtype_bytes(kDType), bytes_at(at) / dtype_bytes(kDType), out);
            ctx_.warp_sync();
        }
        return true;
    }

  private:
    CROSSDOCK_DEVICE static std::byte* memory_of_warp(const Ctx& ctx, const LlCombineShared& shared) {
        return shared.receive_stages.in(ctx.shared_memory()) + ctx.warp_idx() * shared.receive_stage_bytes;
    }
    CROSSDOCK_DEVICE static BlockBarrierMemory& loaded(std::byte* memory, uint32_t half) {
        return reinterpret_cast<BlockBarrierMemory*>(memory)[half];
    }

    const Op& op_;
    const Ctx& ctx_;
    std::byte* memory_;
    uint32_t num_loads_ = 0;  // of the halves in turn
};

}  // namespace
}  // namespace crossdock
