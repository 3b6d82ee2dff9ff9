// SPDX-License-Identifier: Apache-2.0
// A warp's staging area in shared memory, through which rows move asynchronously: bulk loads in, bulk stores out.
//
// All lanes call the members unless "leader only" is said. The order is: load + wait_loaded, or fill + filled; then
// stores by the leader; then wait_stores (their data is at the target, a flag may follow) or wait_reusable (the stage
// may be filled again).
//
// On the CPU a load remembers where its source is instead of copying it, so a row is copied once; its source must
// therefore stay unchanged until the stores are awaited, which the GPU's rules (contract: inputs stay unmodified during
// the operation) give anyway. In the deterministic world loads and stores really go through the stage, late and out of
// order.
#pragma once

#include "device/context.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

#if defined(__CUDACC__)

class RowStage {
  public:
    static constexpr uint32_t kBarrierBytes = 128;  // in front of the data, which keeps the data's alignment

    CROSSDOCK_DEVICE RowStage(const Ctx& ctx, std::byte* memory)
        : barrier_(reinterpret_cast<uint64_t*>(memory)), data_(memory + kBarrierBytes) {
        if (is_leader(ctx)) {
            ptx::mbarrier_init(barrier_, 1);
            ptx::fence_mbarrier_init();
            ptx::fence_proxy_async();
        }
        ctx.warp_sync();
    }

    CROSSDOCK_DEVICE void load(const Ctx& ctx, const std::byte* source, uint32_t bytes) {
        if (is_leader(ctx)) {
            ptx::mbarrier_arrive_expect_bytes(barrier_, bytes);
            ptx::bulk_load(data_, source, bytes, barrier_);
        }
    }
    CROSSDOCK_DEVICE void wait_loaded(const Ctx& ctx) {
        while (!ptx::mbarrier_try_wait(barrier_, parity_)) {
        }
        parity_ ^= 1;
        ctx.warp_sync();
    }

    CROSSDOCK_DEVICE std::byte* fill() { return data_; }
    CROSSDOCK_DEVICE void filled(const Ctx& ctx) {
        ptx::fence_proxy_async();  // every lane's own writes, before the leader's bulk stores read them
        ctx.warp_sync();
    }

    // Leader only.
    CROSSDOCK_DEVICE void store(const Ctx&, std::byte* target, uint32_t at, uint32_t bytes) {
        ptx::bulk_store(target, data_ + at, bytes);
    }
    CROSSDOCK_DEVICE void end_group(const Ctx&) { ptx::bulk_commit_group(); }
    // All but the latest max_pending groups have arrived. Waiting for more than asked is always right.
    CROSSDOCK_DEVICE void wait_stores(const Ctx&, int max_pending = 0) {
        if (max_pending >= 4) {
            ptx::bulk_wait_group<4>();
        } else if (max_pending >= 2) {
            ptx::bulk_wait_group<2>();
        } else if (max_pending == 1) {
            ptx::bulk_wait_group<1>();
        } else {
            ptx::bulk_wait_group<0>();
        }
    }

    CROSSDOCK_DEVICE void wait_reusable(const Ctx& ctx) {
        if (is_leader(ctx)) ptx::bulk_wait_group_read();
        ctx.warp_sync();
    }

  private:
    uint64_t* barrier_;
    std::byte* data_;
    uint32_t parity_ = 0;
};

#else

class RowStage {
  public:
    static constexpr uint32_t kBarrierBytes = 128;

    RowStage(const Ctx&, std::byte* memory) : data_(memory + kBarrierBytes) {}

    void load(const Ctx& ctx, const std::byte* source, uint32_t bytes) {
        if (ctx.warp().is_lazy()) {
            ctx.warp().copy_async(data_, source, bytes);
        } else {
            loaded_from_ = source;
            loaded_bytes_ = bytes;
        }
    }
    void wait_loaded(const Ctx& ctx) { ctx.warp().wait_copies(0); }

    std::byte* fill() { return data_; }
    void filled(const Ctx&) {}

    void store(const Ctx& ctx, std::byte* target, uint32_t at, uint32_t bytes) {
        const uint32_t from_source = at < loaded_bytes_ ? (bytes < loaded_bytes_ - at ? bytes : loaded_bytes_ - at) : 0;
        if (from_source > 0) ctx.warp().copy_async(target, loaded_from_ + at, from_source);
        if (bytes > from_source) {
            ctx.warp().copy_async(target + from_source, data_ + at + from_source, bytes - from_source);
        }
    }
    void end_group(const Ctx&) {}
    void wait_stores(const Ctx& ctx, int = 0) {
        if (!ctx.skips_store_wait()) ctx.warp().wait_copies(0);
    }
    void wait_reusable(const Ctx& ctx) {
        ctx.warp().wait_copies(0);
        loaded_bytes_ = 0;
    }

  private:
    std::byte* data_;
    const std::byte* loaded_from_ = nullptr;
    uint32_t loaded_bytes_ = 0;
};

#endif

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
