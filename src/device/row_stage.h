// SPDX-License-Identifier: Apache-2.0
// A staging area in shared memory, through which rows move asynchronously: bulk loads in, bulk stores out.
//
// One thread loads and stores: a warp's leader, while the whole warp is in the scope of a RowStage::Lead, or several
// lanes, in a loop over RowStage::Turns that the whole warp runs. The order is: load + wait_loaded, or fill + filled;
// then stores; then wait_stores (the stores have landed) or wait_reusable (the stage may be filled again). If one warp
// loads a stage and others store from it, the loading warp calls loaded_for_block before the next block barrier, the
// others wait_loaded after it.
//
// *Landed* means completed: the writes are visible to the thread that issued the stores (PTX:
// cp.async.bulk.wait_group), and not yet to other threads. A peer that sees a flag sees them only if the flag is stored
// by Ctx::store_landed_system, or after Ctx::fence_landed: these order the asynchronous writes before the flag, at
// system scope.
//
// On GPUs without bulk copies the thread's warp does the work (device/warp_requests.h): loads are asynchronous copies
// of 16 bytes per lane, and stores are ordinary ones, which have read their source and are ordered before the thread's
// next release when store returns. So they are landed then, and there is nothing to wait for.
//
// On the CPU a load stores the address of its source instead of copying it, so a row is copied once; its source must
// stay unchanged until the stores are awaited, which the contract requires anyway (inputs stay unmodified during the
// operation). In the simulation loads and stores go through the stage, late and out of order.
#pragma once

#include <type_traits>

#include "device/block_barrier.h"

namespace crossdock {

inline constexpr uint32_t kStageHeadBytes = 128;  // in front of the data, which keeps the data's alignment

namespace {

#if defined(__CUDACC__)

// Whether rows at this address can be loaded and stored.
CROSSDOCK_DEVICE bool takes_rows(const void* memory) { return reinterpret_cast<uintptr_t>(memory) % 16 == 0; }

class BulkRowStage {
  public:
    CROSSDOCK_DEVICE explicit BulkRowStage(std::byte* memory)
        : barrier_(reinterpret_cast<uint64_t*>(memory)), data_(memory + kStageHeadBytes) {}

    // `if (const RowStage::Lead lead{ctx}) ...`, by one warp: true for the leader.
    class Lead {
      public:
        CROSSDOCK_DEVICE explicit Lead(const Ctx&) {}
        CROSSDOCK_DEVICE explicit operator bool() const { return is_leader(Ctx{}); }
    };
    // `for (RowStage::Turns turns(ctx, acts); turns.next();) ...`, by one warp: all lanes, maybe one after the other.
    // acts: false in lanes that would do nothing.
    class Turns {
      public:
        CROSSDOCK_DEVICE Turns(const Ctx&, bool) {}
        CROSSDOCK_DEVICE bool next() {
            const bool is_first = is_first_;
            is_first_ = false;
            return is_first;
        }

      private:
        bool is_first_ = true;
    };

    // One thread, before the first load. After the last init call initialised, then synchronise with the threads that
    // wait.
    CROSSDOCK_DEVICE void init() const { ptx::mbarrier_init(barrier_, 1); }
    CROSSDOCK_DEVICE static void initialised() {
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async_shared();
    }

    CROSSDOCK_DEVICE static bool takes(const void* memory) { return takes_rows(memory); }

    CROSSDOCK_DEVICE void load(const Ctx&, const std::byte* source, uint32_t bytes) const {
        ptx::mbarrier_arrive_expect_bytes(barrier_, bytes);
        ptx::bulk_load(data_, source, bytes, barrier_);
    }
    // The same with a tail (none: 0 bytes) after the first part.
    CROSSDOCK_DEVICE void load(const Ctx&, const std::byte* source, uint32_t bytes, const std::byte* tail,
                               uint32_t tail_bytes) const {
        ptx::mbarrier_arrive_expect_bytes(barrier_, bytes + tail_bytes);
        ptx::bulk_load(data_, source, bytes, barrier_);
        if (tail_bytes > 0) ptx::bulk_load(data_ + bytes, tail, tail_bytes, barrier_);
    }
    CROSSDOCK_DEVICE static void loaded_for_block(const Ctx&) {}
    // Waits for load number `round` of this stage, counted from 0.
    CROSSDOCK_DEVICE void wait_loaded(const Ctx&, uint32_t round) const {
        while (!ptx::mbarrier_try_wait(barrier_, round & 1)) {
        }
    }

    CROSSDOCK_DEVICE std::byte* data() const { return data_; }
    // By every thread that wrote into the data, before the barrier that precedes the stores.
    CROSSDOCK_DEVICE static void filled() { ptx::fence_proxy_async_shared(); }

    // is_read_soon: the target should stay in the caches.
    CROSSDOCK_DEVICE void store(const Ctx&, std::byte* target, uint32_t at, uint32_t bytes, bool = false) const {
        ptx::bulk_store(target, data_ + at, bytes);
    }
    CROSSDOCK_DEVICE static void end_group(const Ctx&) { ptx::bulk_commit_group(); }
    // Waits until all but the latest max_pending groups of this thread have landed. It may wait for more.
    CROSSDOCK_DEVICE static void wait_stores(const Ctx&, int max_pending = 0) {
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
    // Waits until this thread's stores have read their sources, except the latest max_pending groups (0 or 1).
    CROSSDOCK_DEVICE void wait_reusable(const Ctx&, int max_pending = 0) const {
        if (max_pending > 0) {
            ptx::bulk_wait_group_read<1>();
        } else {
            ptx::bulk_wait_group_read<0>();
        }
    }
    // The same for a stage that is not filled again: other threads may still store from it.
    CROSSDOCK_DEVICE static void wait_read(const Ctx&) { ptx::bulk_wait_group_read<0>(); }
    // Waits until the source of the latest load may be overwritten.
    CROSSDOCK_DEVICE void release_source(const Ctx&) const {}

  private:
    uint64_t* barrier_;
    std::byte* data_;
};

// The same for GPUs without bulk copies.
class WarpRowStage {
  public:
    CROSSDOCK_DEVICE explicit WarpRowStage(std::byte* memory)
        : barrier_(reinterpret_cast<uint64_t*>(memory)), data_(memory + kStageHeadBytes) {}

    class Lead : public WarpLead {
      public:
        CROSSDOCK_DEVICE explicit Lead(const Ctx& ctx) : WarpLead(ctx, 0) {}
    };
    using Turns = WarpTurns;

    // Each lane arrives with its part of a load.
    CROSSDOCK_DEVICE void init() const { ptx::mbarrier_init(barrier_, BlockBarrier::kArrivalsOfLoad); }
    CROSSDOCK_DEVICE static void initialised() {}
    CROSSDOCK_DEVICE static bool takes(const void* memory) { return takes_rows(memory); }

    CROSSDOCK_DEVICE void load(const Ctx& ctx, const std::byte* source, uint32_t bytes) const {
        WarpRequest::load(data_, source, bytes, barrier_).make(ctx);
    }
    CROSSDOCK_DEVICE void load(const Ctx& ctx, const std::byte* source, uint32_t bytes, const std::byte* tail,
                               uint32_t tail_bytes) const {
        if (tail_bytes == 0) return load(ctx, source, bytes);
        WarpRequest::load(data_, source, bytes, nullptr).make(ctx);
        WarpRequest::load(data_ + bytes, tail, tail_bytes, barrier_).make(ctx);
    }
    CROSSDOCK_DEVICE static void loaded_for_block(const Ctx&) {}
    CROSSDOCK_DEVICE void wait_loaded(const Ctx&, uint32_t round) const {
        while (!ptx::mbarrier_test_wait(barrier_, round & 1)) {
        }
    }

    CROSSDOCK_DEVICE std::byte* data() const { return data_; }
    CROSSDOCK_DEVICE static void filled() {}

    CROSSDOCK_DEVICE void store(const Ctx& ctx, std::byte* target, uint32_t at, uint32_t bytes, bool = false) const {
        WarpRequest::store(target, data_ + at, bytes).make(ctx);
    }
    CROSSDOCK_DEVICE static void end_group(const Ctx&) {}
    CROSSDOCK_DEVICE static void wait_stores(const Ctx&, int = 0) {}
    CROSSDOCK_DEVICE void wait_reusable(const Ctx&, int = 0) const {}
    CROSSDOCK_DEVICE static void wait_read(const Ctx&) {}
    CROSSDOCK_DEVICE void release_source(const Ctx&) const {}

  private:
    uint64_t* barrier_;
    std::byte* data_;
};

using RowStage = std::conditional_t<kHasBulkCopies, BulkRowStage, WarpRowStage>;

#else

class RowStage {
  public:
    explicit RowStage(std::byte* memory) : head_(reinterpret_cast<Head*>(memory)), data_(memory + kStageHeadBytes) {}

    struct Lead {
        explicit Lead(const Ctx&) {}
        explicit operator bool() const { return true; }
    };
    class Turns {
      public:
        Turns(const Ctx&, bool) {}
        bool next() { return num_++ == 0; }

      private:
        int num_ = 0;
    };

    void init() const { *head_ = Head{}; }
    static void initialised() {}
    static constexpr bool takes(const void*) { return true; }

    void load(const Ctx& ctx, const std::byte* source, uint32_t bytes) const { load(ctx, source, bytes, nullptr, 0); }
    void load(const Ctx& ctx, const std::byte* source, uint32_t bytes, const std::byte* tail,
              uint32_t tail_bytes) const {
        const bool is_lazy = ctx.warp().is_lazy();
        *head_ = {is_lazy ? nullptr : source, is_lazy ? 0 : bytes, bytes + tail_bytes};
        if (is_lazy) ctx.warp().copy_async(data_, source, bytes);
        if (tail_bytes > 0) ctx.warp().copy_async(data_ + bytes, tail, tail_bytes);
    }
    static void loaded_for_block(const Ctx& ctx) { ctx.warp().wait_copies(0); }
    void wait_loaded(const Ctx& ctx, uint32_t) const { ctx.warp().wait_copies_to(data_, head_->bytes); }

    // For kernels that read or fill in the data themselves.
    std::byte* data() const { return data_; }
    static void filled() {}

    void store(const Ctx& ctx, std::byte* target, uint32_t at, uint32_t bytes, bool is_read_soon = false) const {
        const auto [from, loaded, all] = *head_;
        const uint32_t remembered = at < loaded ? (bytes < loaded - at ? bytes : loaded - at) : 0;
        if (remembered > 0) ctx.warp().copy_async(target, from + at, remembered, is_read_soon);
        if (bytes > remembered) {
            ctx.warp().copy_async(target + remembered, data_ + at + remembered, bytes - remembered, is_read_soon);
        }
    }
    static void end_group(const Ctx&) {}
    static void wait_stores(const Ctx& ctx, int = 0) {
        if (!ctx.skips_store_wait()) ctx.warp().wait_copies(0);
    }
    void wait_reusable(const Ctx& ctx, int = 0) const {
        ctx.warp().wait_sources_read();
        *head_ = Head{};
    }
    static void wait_read(const Ctx& ctx) { ctx.warp().wait_sources_read(); }
    void release_source(const Ctx& ctx) const { wait_reusable(ctx); }

  private:
    struct Head {
        const std::byte* loaded_from = nullptr;
        uint32_t loaded_bytes = 0;  // of the first part, if it was not copied
        uint32_t bytes = 0;         // of the latest load
    };
    static_assert(sizeof(Head) <= kStageHeadBytes, "a stage's head must hold it");

    Head* head_;
    std::byte* data_;
};

#endif

}  // namespace
}  // namespace crossdock
