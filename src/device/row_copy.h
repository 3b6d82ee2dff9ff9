// SPDX-License-Identifier: Apache-2.0
// Copies of rows by one warp, 16 bytes per lane.
#pragma once

#include "device/row_stage.h"

namespace crossdock {
namespace {

// Copies the same bytes to several targets. Addresses and sizes are multiples of 16. On CPUs a copy may land late: call
// wait_row_copies before the rows are announced.
template <typename Target>
CROSSDOCK_DEVICE void copy_row(const Ctx& ctx, const std::byte* source, uint32_t bytes, uint32_t num_targets,
                               Target target_of) {
#if defined(__CUDACC__)
    constexpr uint32_t kAtOnce = 4;
    for (uint32_t at = ctx.lane() * 16; at < bytes; at += kAtOnce * kLanes * 16) {
        Bytes16 parts[kAtOnce];
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t part = at + i * kLanes * 16;
            if (part < bytes) parts[i] = *reinterpret_cast<const Bytes16*>(source + part);
        }
        CROSSDOCK_ROLLED
        for (uint32_t n = 0; n < num_targets; ++n) {
            std::byte* target = target_of(n);
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                const uint32_t part = at + i * kLanes * 16;
                if (part < bytes) *reinterpret_cast<Bytes16*>(target + part) = parts[i];
            }
        }
    }
#else
    for (uint32_t n = 0; n < num_targets; ++n) ctx.warp().copy_async(target_of(n), source, bytes);
#endif
}

// The same for rows of scales: addresses of any alignment, if all targets have the same.
template <typename Target>
CROSSDOCK_DEVICE void copy_scales(const Ctx& ctx, const std::byte* source, uint32_t bytes, uint32_t num_targets,
                                  Target target_of) {
    if (num_targets == 0) return;
    if (RowStage::takes(source) && RowStage::takes(target_of(0)))
        return copy_row(ctx, source, bytes, num_targets, target_of);
    CROSSDOCK_ROLLED
    for (uint32_t at = ctx.lane(); at < bytes; at += kLanes) {
        CROSSDOCK_ROLLED
        for (uint32_t n = 0; n < num_targets; ++n) target_of(n)[at] = source[at];
    }
}

CROSSDOCK_DEVICE void wait_row_copies(const Ctx& ctx) {
#if !defined(__CUDACC__)
    ctx.warp().wait_copies(0);
#endif
    ctx.warp_sync();
}

CROSSDOCK_DEVICE void zero_row(const Ctx& ctx, std::byte* target, uint32_t bytes) {
#if defined(__CUDACC__)
    for (uint32_t at = ctx.lane() * 16; at < bytes; at += kLanes * 16)
        *reinterpret_cast<Bytes16*>(target + at) = Bytes16{};
#else
    static_cast<void>(ctx);
    std::memset(target, 0, bytes);
#endif
}

CROSSDOCK_DEVICE void zero_scales(const Ctx& ctx, std::byte* target, uint32_t bytes) {
    if (RowStage::takes(target)) return zero_row(ctx, target, bytes);
    CROSSDOCK_ROLLED
    for (uint32_t at = ctx.lane(); at < bytes; at += kLanes) target[at] = std::byte{0};
}

}  // namespace
}  // namespace crossdock
