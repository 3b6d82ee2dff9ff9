// SPDX-License-Identifier: Apache-2.0
// A barrier in shared memory at which some warps of a block wait for what others do: its phase is over once so many
// arrivals have come, and all bytes of the loads that were announced with them. Phases are numbered from 0. Who waits
// for one must know that those before it are over, and come before the one after it is.
#pragma once

#include "device/context.h"

namespace crossdock {

// Where it lies.
struct alignas(16) BlockBarrierMemory {
    std::byte bytes[16];
};

namespace {

#if defined(__CUDACC__)

class BlockBarrier {
  public:
    CROSSDOCK_DEVICE explicit BlockBarrier(BlockBarrierMemory& memory) : word_(reinterpret_cast<uint64_t*>(&memory)) {}

    // One thread, before a barrier of the block; behind the last of them RowStage::initialised.
    CROSSDOCK_DEVICE void init(uint32_t arrivals) const { ptx::mbarrier_init(word_, arrivals); }

    // What this thread has read and written comes before what those do that wait for the phase.
    CROSSDOCK_DEVICE void arrive(const Ctx&, uint32_t times = 1) const { ptx::mbarrier_arrive(word_, times); }
    // One arrival, and an asynchronous copy into shared memory, which the phase waits for.
    CROSSDOCK_DEVICE void arrive_with_load(const Ctx&, std::byte* target, const std::byte* source,
                                           uint32_t bytes) const {
        ptx::mbarrier_arrive_expect_bytes(word_, bytes);
        ptx::bulk_load(target, source, bytes, word_);
    }

    CROSSDOCK_DEVICE bool is_over(uint32_t phase) const { return ptx::mbarrier_test_wait(word_, phase & 1); }
    // Until all phases before that one are over: at once for phase 0.
    CROSSDOCK_DEVICE void wait_for_turn(const Ctx& ctx, uint32_t phase) const { wait(ctx, phase + 1); }
    CROSSDOCK_DEVICE void wait(const Ctx&, uint32_t phase) const {
        while (!ptx::mbarrier_try_wait(word_, phase & 1)) {
        }
    }

  private:
    uint64_t* word_;
};

#else

class BlockBarrier {
  public:
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

    // By parity, as on GPUs: who is ahead, or two behind, sees what is not so.
    bool is_over(uint32_t phase) const {
        return ((__atomic_load_n(&state_->phase, __ATOMIC_ACQUIRE) ^ phase) & 1) != 0;
    }
    void wait_for_turn(const Ctx& ctx, uint32_t phase) const { wait(ctx, phase + 1); }
    void wait(const Ctx& ctx, uint32_t phase) const {
        while (!is_over(phase)) ctx.pause(UINT64_MAX);
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
