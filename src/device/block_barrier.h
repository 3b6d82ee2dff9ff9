// SPDX-License-Identifier: Apache-2.0
// A barrier in shared memory (on GPUs an mbarrier): a phase is complete once the given number of arrivals, and all
// bytes of the loads announced with them, have arrived. Phases are numbered from 0. A warp may wait for a phase only
// after the ones before it are complete, and before the next one is. A load counts as kArrivalsOfLoad arrivals.
#pragma once

#include "device/context.h"
#include "device/warp_requests.h"

namespace crossdock {

// Its memory.
struct alignas(16) BlockBarrierMemory {
    std::byte bytes[16];
};

namespace {

#if defined(__CUDACC__)

class BlockBarrier {
  public:
    CROSSDOCK_DEVICE explicit BlockBarrier(BlockBarrierMemory& memory) : word_(reinterpret_cast<uint64_t*>(&memory)) {}

    // Without bulk copies all lanes of a warp load, and each arrives when its part has landed.
    static constexpr uint32_t kArrivalsOfLoad = kHasBulkCopies ? 1 : kLanes;

    // One thread, before a block barrier. After the last init call RowStage::initialised.
    CROSSDOCK_DEVICE void init(uint32_t arrivals) const { ptx::mbarrier_init(word_, arrivals); }

    // Orders what this thread has read and written before what threads do after waiting for the phase.
    CROSSDOCK_DEVICE void arrive(const Ctx&, uint32_t times = 1) const {
        if constexpr (kHasBulkCopies) {
            ptx::mbarrier_arrive(word_, times);
        } else {
            CROSSDOCK_ROLLED
            for (uint32_t i = 0; i < times; ++i) ptx::mbarrier_arrive_once(word_);
        }
    }
    // kArrivalsOfLoad arrivals, when an asynchronous copy into shared memory has landed. In the scope of a
    // RowStage::Lead or Turns.
    CROSSDOCK_DEVICE void arrive_with_load(const Ctx& ctx, std::byte* target, const std::byte* source,
                                           uint32_t bytes) const {
        if constexpr (kHasBulkCopies) {
            ptx::mbarrier_arrive_expect_bytes(word_, bytes);
            ptx::bulk_load(target, source, bytes, word_);
        } else {
            WarpRequest::load(target, source, bytes, word_).make(ctx);
        }
    }

    CROSSDOCK_DEVICE bool is_over(const Ctx&, uint32_t phase) const {
        return ptx::mbarrier_test_wait(word_, phase & 1);
    }
    // Waits until all phases before this one are complete: returns at once for phase 0.
    CROSSDOCK_DEVICE void wait_for_turn(const Ctx& ctx, uint32_t phase) const { wait(ctx, phase + 1); }
    CROSSDOCK_DEVICE void wait(const Ctx&, uint32_t phase) const {
        if constexpr (kHasBulkCopies) {
            while (!ptx::mbarrier_try_wait(word_, phase & 1)) {
            }
        } else {
            while (!ptx::mbarrier_test_wait(word_, phase & 1)) {
            }
        }
    }

  private:
    uint64_t* word_;
};

#else

class BlockBarrier {
  public:
    static constexpr uint32_t kArrivalsOfLoad = 1;

    explicit BlockBarrier(BlockBarrierMemory& memory) : state_(reinterpret_cast<State*>(&memory)) {}

    void init(uint32_t arrivals) const { *state_ = {arrivals, arrivals, 0}; }

    // All warps are fibers of one thread, and switch only where they wait.
    void arrive(const Ctx& ctx, uint32_t times = 1) const {
        const uint32_t missing = __atomic_load_n(&state_->missing, __ATOMIC_ACQUIRE) - times;
        __atomic_store_n(&state_->missing, missing > 0 ? missing : state_->arrivals, __ATOMIC_RELEASE);
        if (missing == 0) __atomic_store_n(&state_->phase, state_->phase + 1, __ATOMIC_RELEASE);
        ctx.warp().scheduling_point();
    }
    void arrive_with_load(const Ctx& ctx, std::byte* target, const std::byte* source, uint32_t bytes) const {
        ctx.warp().copy_async(target, source, bytes);
        ctx.warp().wait_copies_to(target, bytes);
        arrive(ctx);
    }

    // By parity, as on GPUs: wrong for a caller that is ahead or two phases behind.
    bool is_over(const Ctx& ctx, uint32_t phase) const {
        const uint32_t current = __atomic_load_n(&state_->phase, __ATOMIC_ACQUIRE);
        ctx.warp().polling_point();
        return ((current ^ phase) & 1) != 0;
    }
    void wait_for_turn(const Ctx& ctx, uint32_t phase) const { wait(ctx, phase + 1); }
    void wait(const Ctx& ctx, uint32_t phase) const {
        while (!is_over(ctx, phase)) ctx.pause(UINT64_MAX);
    }

  private:
    struct State {
        uint32_t arrivals;
        uint32_t missing;
        uint32_t phase;
    };
    static_assert(sizeof(State) <= sizeof(BlockBarrierMemory));

    State* state_;
};

#endif

}  // namespace
}  // namespace crossdock
