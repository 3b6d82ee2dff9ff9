// SPDX-License-Identifier: Apache-2.0
// The kernels' interface to the machine: lane, warp and block, barriers, shared memory, the clock, and memory that
// other ranks read and write. Two implementations: a GPU's threads, or a fiber of the CPU executor (one lane per warp).
#pragma once

#include "device/tagged_word.h"
#include "device/timeline.h"

#if defined(__CUDACC__)
#include "device/ptx.cuh"
#else
#include <cstring>

#include "device/cpu/warp.h"
#endif

namespace crossdock {

inline constexpr uint32_t kNoRank = ~uint32_t{0};  // where a function or a field may name none

namespace {

#if defined(__CUDACC__)

#if defined(CROSSDOCK_TIMELINE)
// In cycles of the SM's clock, which is cheap to read. A kernel's first step also has the time in ns.
__device__ int64_t timeline_clocks[kTimelineBlocks][kTimelineWarps][kTimelineSteps];
__device__ uint64_t timeline_begin_ns[kTimelineBlocks][kTimelineWarps][kTimelineSteps];
__device__ PhaseTimes phase_times[kTimelineBlocks][kTimelineWarps];
#endif

class Ctx {
  public:
    // unused: number of leading blocks of the grid that do nothing, which is_used tells.
    CROSSDOCK_DEVICE explicit Ctx(uint32_t unused = 0) : unused_(unused) {}
    CROSSDOCK_DEVICE uint32_t lane() const { return threadIdx.x % kLanes; }
    CROSSDOCK_DEVICE uint32_t warp_idx() const { return threadIdx.x / kLanes; }
    CROSSDOCK_DEVICE uint32_t num_warps() const { return blockDim.x / kLanes; }
    CROSSDOCK_DEVICE uint32_t block_idx() const { return blockIdx.x - unused_; }
    CROSSDOCK_DEVICE uint32_t num_blocks() const { return gridDim.x - unused_; }
    CROSSDOCK_DEVICE bool is_used() const { return blockIdx.x >= unused_; }
    CROSSDOCK_DEVICE std::byte* shared_memory() const {
        extern __shared__ __align__(128) unsigned char shared_memory_of_block[];
        return reinterpret_cast<std::byte*>(shared_memory_of_block);
    }
    CROSSDOCK_DEVICE void warp_sync() const { __syncwarp(); }
    CROSSDOCK_DEVICE void block_sync() const { __syncthreads(); }
    // A barrier of the block's last `warps` warps.
    CROSSDOCK_DEVICE void last_warps_sync(uint32_t warps) const { ptx::barrier_sync(1, warps * kLanes); }
    CROSSDOCK_DEVICE uint64_t now_ns() const { return ptx::global_timer_ns(); }
    CROSSDOCK_DEVICE void mark([[maybe_unused]] auto step) const {
#if defined(CROSSDOCK_TIMELINE)
        const uint32_t number = static_cast<uint32_t>(step);
        if (lane() != 0) return;
        if (begins_kernel(number)) timeline_begin_ns[block_idx()][warp_idx()][number] = now_ns();
        timeline_clocks[block_idx()][warp_idx()][number] = clock64();
#endif
    }
    CROSSDOCK_DEVICE void enter([[maybe_unused]] auto phase) const {
#if defined(CROSSDOCK_TIMELINE)
        if (lane() != 0) return;
        PhaseTimes& times = phase_times[block_idx()][warp_idx()];
        const int64_t now = clock64();
        const uint32_t number = static_cast<uint32_t>(phase);
        if (begins_kernel(number)) {
            times.sm = ptx::sm_number();
            for (uint32_t i = number; i < number + kMostSteps; ++i) times.total[i] = 0;
        } else {
            times.total[times.phase] += now - times.since;
        }
        times.phase = number;
        times.since = now;
#endif
    }
    CROSSDOCK_DEVICE void pause(uint64_t) const { __nanosleep(20); }
    CROSSDOCK_DEVICE bool is_killed() const { return false; }
    // GPUs do not know of processes.
    CROSSDOCK_DEVICE uint32_t rank_to_name(uint32_t) const { return kNoRank; }
    CROSSDOCK_DEVICE void report_loss(uint32_t) const {}
    CROSSDOCK_DEVICE bool is_interrupted() const { return false; }
    CROSSDOCK_DEVICE bool skips_store_wait() const { return false; }
    CROSSDOCK_DEVICE bool skips_credit() const { return false; }
    CROSSDOCK_DEVICE void note_slot_written(int, int, const void*, int, uint64_t, uint64_t) const {}
    CROSSDOCK_DEVICE void note_slot_read(int, const void*, int, uint64_t, uint64_t) const {}
    CROSSDOCK_DEVICE void note_operation_read(int, uint64_t, uint64_t, uint64_t) const {}
    CROSSDOCK_DEVICE void note_unread_slots_allowed() const {}
    static constexpr int kPollsPerClockRead = 32;

    // 64-bit words that other ranks see.
    CROSSDOCK_DEVICE uint64_t load_acquire_system(const uint64_t* word) const { return ptx::load_acquire_system(word); }
    CROSSDOCK_DEVICE uint64_t load_relaxed_system(const uint64_t* word) const { return ptx::load_relaxed_system(word); }
    CROSSDOCK_DEVICE void store_release_system(uint64_t* word, uint64_t value) const {
        ptx::store_release_system(word, value);
    }
    CROSSDOCK_DEVICE void store_relaxed_system(uint64_t* word, uint64_t value) const {
        ptx::store_relaxed_system(word, value);
    }
    // A flag for bytes whose stores by this thread have landed (RowStage): a reader that sees it sees them. The fence
    // orders asynchronous writes to global memory before the release and waits for nothing (the one for all memory
    // waits for the device); the release waits until peers see the bytes and all other writes in flight on the GPU.
    // With a relaxed store after either fence, rows arrived after their flags. Without bulk copies the bytes are
    // ordinary stores, of this thread's warp: the release also orders those that warp barriers order before it.
    CROSSDOCK_DEVICE void store_landed_system(uint64_t* word, uint64_t value) const {
        fence_async_copies();
        ptx::store_release_system(word, value);
    }
    // Announces that what earlier kernels of this stream have read may be overwritten. Their loads have completed, so a
    // release has nothing to order.
    CROSSDOCK_DEVICE void store_entered_system(uint64_t* word, uint64_t value) const {
        ptx::store_relaxed_system(word, value);
    }
    // Returns the value (4 or 8 bytes) as one that the compiler does not know: it keeps nothing computed from it in
    // registers across a loop.
    template <typename T>
    CROSSDOCK_DEVICE T found_anew(T value) const {
        ptx::hide_origin(value);
        return value;
    }
    CROSSDOCK_DEVICE TaggedWord load_tagged(const TaggedWord* word) const {
        TaggedWord seen;
        ptx::load_relaxed_system_16(word, seen.payload, seen.tag);
        return seen;
    }
    CROSSDOCK_DEVICE void store_tagged(TaggedWord* word, uint64_t payload, uint64_t tag) const {
        ptx::store_relaxed_system_16(word, payload, tag);
    }
    // By the lanes whose condition holds, in one instruction of the warp, after warp_sync.
    CROSSDOCK_DEVICE void store_tagged_if(bool condition, TaggedWord* word, uint64_t payload, uint64_t tag) const {
        ptx::store_relaxed_system_16_if(condition, word, payload, tag);
    }
    // For a word that other blocks of this kernel may read at the same time: only later kernels use its value.
    CROSSDOCK_DEVICE void store_for_later(uint64_t* word, uint64_t value) const { *word = value; }
    // Words shared with this rank's other blocks.
    CROSSDOCK_DEVICE uint64_t add_relaxed_device(uint64_t* word, uint64_t value) const {
        return ptx::add_relaxed_device_64(word, value);
    }
    CROSSDOCK_DEVICE uint32_t add_relaxed_device(uint32_t* word, uint32_t value) const {
        return ptx::add_relaxed_device_32(word, value);
    }
    // Increments, and wraps to 0 at the limit. Returns the value before.
    CROSSDOCK_DEVICE uint32_t count_up_device(uint32_t* word, uint32_t limit) const {
        return ptx::increment_relaxed_device(word, limit - 1);
    }
    // When it returns, every other block sees the value and what was stored before.
    CROSSDOCK_DEVICE uint64_t exchange_release_device(uint64_t* word, uint64_t value) const {
        return ptx::exchange_release_device_64(word, value);
    }
    CROSSDOCK_DEVICE uint32_t load_relaxed_device(const uint32_t* word) const { return ptx::load_relaxed_device(word); }
    CROSSDOCK_DEVICE uint32_t load_acquire_device(const uint32_t* word) const { return ptx::load_acquire_device(word); }
    CROSSDOCK_DEVICE void store_relaxed_device(uint32_t* word, uint32_t value) const {
        ptx::store_relaxed_device(word, value);
    }
    CROSSDOCK_DEVICE uint32_t add_acq_rel_device(uint32_t* word, uint32_t value) const {
        return ptx::add_acq_rel_device(word, value);
    }
    CROSSDOCK_DEVICE void fence_system() const { __threadfence_system(); }
    // Orders bytes whose stores by this thread have landed (RowStage) before all words that it stores from now on (with
    // store_entered_system), and before its puts.
    CROSSDOCK_DEVICE void fence_landed() const {
        fence_async_copies();
        ptx::fence_acq_rel_system();
    }
    // Orders ordinary loads before later reads of global memory by asynchronous copies. Without bulk copies, all are
    // ordinary ones (cp.async, too) that barriers and acquires order.
    CROSSDOCK_DEVICE void fence_async_copies() const {
        if constexpr (kHasBulkCopies) ptx::fence_proxy_async_global();
    }

    // Programmatic dependent launch: what earlier kernels write after let_next_kernel_start may be read only after
    // wait_for_previous_kernels. Without it kernels begin when those before them have ended.
    CROSSDOCK_DEVICE void wait_for_previous_kernels() const {
        if constexpr (kHasBulkCopies) ptx::wait_for_previous_kernels();
    }
    CROSSDOCK_DEVICE void let_next_kernel_start() const {
        if constexpr (kHasBulkCopies) ptx::let_next_kernel_start();
    }

    // Counters in shared memory.
    CROSSDOCK_DEVICE uint32_t add_shared(uint32_t* counter, uint32_t value) const { return atomicAdd(counter, value); }
    // Acquire-release within the block: a later add by any warp sees everything before this one.
    CROSSDOCK_DEVICE uint32_t add_acq_rel_shared(uint32_t* counter, uint32_t value) const {
        return ptx::add_acq_rel_shared(counter, value);
    }
    // Sets the counter to `value`, if that is larger. A thread that reads the value with load_acquire_shared sees
    // everything that this thread has seen.
    CROSSDOCK_DEVICE void max_release_shared(uint32_t* counter, uint32_t value) const {
        ptx::max_release_shared(counter, value);
    }
    CROSSDOCK_DEVICE uint32_t load_acquire_shared(const uint32_t* counter) const {
        return ptx::load_acquire_shared(counter);
    }
    CROSSDOCK_DEVICE void max_shared(uint64_t* largest, uint64_t value) const {
        atomicMax(reinterpret_cast<unsigned long long*>(largest), static_cast<unsigned long long>(value));
    }

    // The sum over all lanes, and over the lanes before this one.
    CROSSDOCK_DEVICE uint32_t warp_sum(uint32_t value) const { return __reduce_add_sync(~0u, value); }
    CROSSDOCK_DEVICE uint32_t warp_sum_before(uint32_t value) const {
        uint32_t sum = value;
        for (uint32_t step = 1; step < kLanes; step *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, sum, step);
            if (lane() >= step) sum += other;
        }
        return sum - value;
    }
    // The number of lanes whose value is true, of all and of those before this one.
    CROSSDOCK_DEVICE uint32_t warp_count(bool value) const { return ones_of(warp_ballot(value)); }
    CROSSDOCK_DEVICE uint32_t warp_count_before(bool value) const {
        return ones_of(warp_ballot(value) & ((1u << lane()) - 1));
    }
    // The sum over all lanes in fixed order: lane i of the first half plus lane i of the second half, then halved
    // again.
    template <typename Sum>
    CROSSDOCK_DEVICE Sum warp_halving_sum(Sum value) const {
        for (uint32_t step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
        return value;
    }
    // The number of lanes before this one with the same value.
    CROSSDOCK_DEVICE uint32_t lanes_before_with(uint32_t value) const {
        return ones_of(__match_any_sync(~0u, value) & ((1u << lane()) - 1));
    }
    CROSSDOCK_DEVICE bool warp_all(bool value) const { return __all_sync(~0u, value) != 0; }
    CROSSDOCK_DEVICE bool warp_any(bool value) const { return __any_sync(~0u, value) != 0; }
    // Bit i: the value of lane i.
    CROSSDOCK_DEVICE uint32_t warp_ballot(bool value) const { return __ballot_sync(~0u, value); }
    CROSSDOCK_DEVICE uint32_t warp_or(uint32_t value) const { return __reduce_or_sync(~0u, value); }
    // Bit i of lane j becomes bit j of lane i. Each step swaps blocks of bits across the diagonal, half as large.
    CROSSDOCK_DEVICE uint32_t warp_transpose(uint32_t bits) const {
        uint32_t upper = 0xFFFF0000u;
        CROSSDOCK_UNROLL
        for (uint32_t step = kLanes / 2; step > 0; step /= 2, upper ^= upper >> step) {
            const uint32_t other = __shfl_xor_sync(~0u, bits, step);
            bits = (lane() & step) == 0 ? (bits & ~upper) | (other << step & upper)
                                        : (bits & upper) | (other >> step & ~upper);
        }
        return bits;
    }
    CROSSDOCK_DEVICE uint32_t warp_max(uint32_t value) const { return __reduce_max_sync(~0u, value); }
    // The largest value of each kNum neighbours, a power of two.
    template <uint32_t kNum>
    CROSSDOCK_DEVICE uint32_t group_max(uint32_t value) const {
        CROSSDOCK_UNROLL
        for (uint32_t step = 1; step < kNum; step *= 2) {
            const uint32_t other = __shfl_xor_sync(~0u, value, step);
            value = other > value ? other : value;
        }
        return value;
    }
    // Lane 0's value. What lane 0 has read or acquired is ordered before what the other lanes do afterwards.
    CROSSDOCK_DEVICE uint64_t warp_broadcast(uint64_t value) const {
        __syncwarp();
        return __shfl_sync(~0u, value, 0);
    }
    CROSSDOCK_DEVICE uint32_t warp_broadcast(uint32_t value) const {
        __syncwarp();
        return __shfl_sync(~0u, value, 0);
    }
    // That lane's value, without such an order.
    CROSSDOCK_DEVICE uint32_t warp_broadcast_from(uint32_t lane, uint32_t value) const {
        return __shfl_sync(~0u, value, static_cast<int>(lane));
    }

  private:
    CROSSDOCK_DEVICE static uint32_t ones_of(uint32_t bits) { return static_cast<uint32_t>(__popc(bits)); }

    uint32_t unused_;
};

#else

class Ctx {
  public:
    explicit Ctx(cpu::Warp& warp) : warp_(&warp) {}
    uint32_t lane() const { return 0; }
    uint32_t warp_idx() const { return static_cast<uint32_t>(warp_->warp_idx); }
    uint32_t num_warps() const { return static_cast<uint32_t>(warp_->num_warps); }
    uint32_t block_idx() const { return static_cast<uint32_t>(warp_->block_idx); }
    uint32_t num_blocks() const { return static_cast<uint32_t>(warp_->num_blocks); }
    std::byte* shared_memory() const { return warp_->shared_memory; }
    void warp_sync() const {}
    void block_sync() const {
        if (warp_->num_warps > 1) warp_->meet(0, warp_->num_warps);
    }
    void last_warps_sync(uint32_t warps) const {
        if (warps > 1) warp_->meet(1, warps);
    }
    uint64_t now_ns() const { return warp_->now_ns(); }
    void mark(auto) const {}
    void enter(auto) const {}
    void pause(uint64_t deadline_ns) const { warp_->pause(deadline_ns); }
    uint32_t rank_to_name(uint32_t peer) const {
        return static_cast<uint32_t>(warp_->rank_to_name(static_cast<int>(peer)));
    }
    void report_loss(uint32_t rank) const { warp_->report_loss(static_cast<int>(rank)); }
    bool is_interrupted() const { return warp_->is_interrupted(); }
    bool is_killed() const { return warp_->is_killed(); }
    bool skips_store_wait() const { return warp_->fault() == cpu::Fault::kSkipStoreWait; }
    bool skips_credit() const { return warp_->fault() == cpu::Fault::kReuseSlot; }
    void note_slot_written(int writer, int owner, const void* memory, int buffer, uint64_t slot, uint64_t epoch) const {
        if (auto* checker = warp_->checker()) checker->slot_written(writer, owner, memory, buffer, slot, epoch);
    }
    void note_slot_read(int owner, const void* memory, int buffer, uint64_t slot, uint64_t epoch) const {
        if (auto* checker = warp_->checker()) checker->slot_read(owner, memory, buffer, slot, epoch);
    }
    void note_operation_read(int owner, uint64_t epoch, uint64_t announced, uint64_t read) const {
        if (auto* checker = warp_->checker()) checker->operation_read(owner, epoch, announced, read);
    }
    void note_unread_slots_allowed() const {
        if (auto* checker = warp_->checker()) checker->unread_slots_allowed();
    }
    static constexpr int kPollsPerClockRead = 1;

    uint64_t load_acquire_system(const uint64_t* word) const { return looked(__atomic_load_n(word, __ATOMIC_ACQUIRE)); }
    uint64_t load_relaxed_system(const uint64_t* word) const { return looked(__atomic_load_n(word, __ATOMIC_RELAXED)); }
    void store_release_system(uint64_t* word, uint64_t value) const {
        warp_->scheduling_point();
        if (!warp_->is_killed()) __atomic_store_n(word, value, __ATOMIC_RELEASE);
    }
    void store_entered_system(uint64_t* word, uint64_t value) const { store_release_system(word, value); }
    void store_landed_system(uint64_t* word, uint64_t value) const { store_release_system(word, value); }
    void store_relaxed_system(uint64_t* word, uint64_t value) const {
        warp_->scheduling_point();
        if (!warp_->is_killed()) __atomic_store_n(word, value, __ATOMIC_RELAXED);
    }
    template <typename T>
    T found_anew(T value) const {
        return value;
    }
    TaggedWord load_tagged(const TaggedWord* word) const {
        const uint64_t tag = __atomic_load_n(&word->tag, __ATOMIC_ACQUIRE);
        return looked(TaggedWord{__atomic_load_n(&word->payload, __ATOMIC_RELAXED), tag});
    }
    void store_tagged(TaggedWord* word, uint64_t payload, uint64_t tag) const {
        warp_->scheduling_point();
        if (warp_->is_killed()) return;
        __atomic_store_n(&word->payload, payload, __ATOMIC_RELAXED);
        __atomic_store_n(&word->tag, tag, __ATOMIC_RELEASE);
    }
    void store_tagged_if(bool condition, TaggedWord* word, uint64_t payload, uint64_t tag) const {
        if (condition) store_tagged(word, payload, tag);
    }
    void store_for_later(uint64_t* word, uint64_t value) const { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
    uint64_t add_relaxed_device(uint64_t* word, uint64_t value) const {
        warp_->scheduling_point();
        return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
    }
    uint32_t add_relaxed_device(uint32_t* word, uint32_t value) const {
        warp_->scheduling_point();
        return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
    }
    uint32_t count_up_device(uint32_t* word, uint32_t limit) const {
        warp_->scheduling_point();
        // All blocks are fibers of one thread, and switch only where they wait.
        const uint32_t before = __atomic_load_n(word, __ATOMIC_RELAXED);
        __atomic_store_n(word, before + 1 < limit ? before + 1 : 0, __ATOMIC_RELAXED);
        return before;
    }
    uint64_t exchange_release_device(uint64_t* word, uint64_t value) const {
        warp_->scheduling_point();
        return __atomic_exchange_n(word, value, __ATOMIC_RELEASE);
    }
    uint32_t load_relaxed_device(const uint32_t* word) const { return looked(__atomic_load_n(word, __ATOMIC_RELAXED)); }
    uint32_t load_acquire_device(const uint32_t* word) const { return looked(__atomic_load_n(word, __ATOMIC_ACQUIRE)); }
    void store_relaxed_device(uint32_t* word, uint32_t value) const { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
    uint32_t add_acq_rel_device(uint32_t* word, uint32_t value) const {
        warp_->scheduling_point();
        return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
    }
    void fence_system() const {}  // only release stores publish data on the CPU
    void fence_landed() const {}
    void fence_async_copies() const {}
    uint32_t add_shared(uint32_t* counter, uint32_t value) const {
        warp_->polling_point();
        const uint32_t before = __atomic_load_n(counter, __ATOMIC_RELAXED);
        __atomic_store_n(counter, before + value, __ATOMIC_RELAXED);
        return before;
    }
    uint32_t add_acq_rel_shared(uint32_t* counter, uint32_t value) const {
        warp_->polling_point();
        const uint32_t before = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
        __atomic_store_n(counter, before + value, __ATOMIC_RELEASE);
        return before;
    }
    void max_release_shared(uint32_t* counter, uint32_t value) const {
        if (value > __atomic_load_n(counter, __ATOMIC_RELAXED)) __atomic_store_n(counter, value, __ATOMIC_RELEASE);
    }
    uint32_t load_acquire_shared(const uint32_t* counter) const {
        return looked(__atomic_load_n(counter, __ATOMIC_ACQUIRE));
    }
    void max_shared(uint64_t* largest, uint64_t value) const {
        if (value > __atomic_load_n(largest, __ATOMIC_RELAXED)) __atomic_store_n(largest, value, __ATOMIC_RELAXED);
    }
    void wait_for_previous_kernels() const {}
    void let_next_kernel_start() const {}
    uint32_t warp_max(uint32_t value) const { return value; }
    template <uint32_t>
    uint32_t group_max(uint32_t value) const {
        return value;
    }
    uint32_t warp_sum(uint32_t value) const { return value; }
    uint32_t warp_sum_before(uint32_t) const { return 0; }
    uint32_t warp_count(bool value) const { return value ? 1 : 0; }
    uint32_t warp_count_before(bool) const { return 0; }
    template <typename Sum>
    Sum warp_halving_sum(Sum value) const {
        return value;
    }
    uint32_t lanes_before_with(uint32_t) const { return 0; }
    bool warp_all(bool value) const { return value; }
    bool warp_any(bool value) const { return value; }
    uint32_t warp_ballot(bool value) const { return value ? 1 : 0; }
    uint32_t warp_or(uint32_t value) const { return value; }
    uint32_t warp_transpose(uint32_t bits) const { return bits & 1; }
    uint64_t warp_broadcast(uint64_t value) const { return value; }
    uint32_t warp_broadcast(uint32_t value) const { return value; }
    uint32_t warp_broadcast_from(uint32_t, uint32_t value) const { return value; }
    cpu::Warp& warp() const { return *warp_; }

  private:
    // What a load found. GPUs' other warps run between any two loads.
    template <typename T>
    T looked(T value) const {
        warp_->polling_point();
        return value;
    }

    cpu::Warp* warp_;
};

#endif

// Lane 0 does what only one thread may do, such as issuing and awaiting bulk copies.
CROSSDOCK_DEVICE bool is_leader(const Ctx& ctx) { return ctx.lane() == 0; }
CROSSDOCK_DEVICE uint32_t thread_idx(const Ctx& ctx) { return ctx.warp_idx() * kLanes + ctx.lane(); }
CROSSDOCK_DEVICE uint32_t num_threads(const Ctx& ctx) { return ctx.num_warps() * kLanes; }

// act(i) for every i below num: the lanes of a warp share them, or the threads of a block.
template <typename Act>
CROSSDOCK_DEVICE void for_lanes(const Ctx& ctx, uint32_t num, Act act) {
    CROSSDOCK_ROLLED
    for (uint32_t i = ctx.lane(); i < num; i += kLanes) act(i);
}
template <typename Act>
CROSSDOCK_DEVICE void for_threads(const Ctx& ctx, uint32_t num, Act act) {
    const uint32_t threads = num_threads(ctx);
    CROSSDOCK_ROLLED
    for (uint32_t i = thread_idx(ctx); i < num; i += threads) act(i);
}

}  // namespace
}  // namespace crossdock
