// SPDX-License-Identifier: Apache-2.0
// GPU instructions that C++ cannot express: one instruction per function, memory order and scope in its name. PTX ISA
// 9.0, sm_80 and later; what needs more says so.
#pragma once

#include <cstdint>

namespace crossdock::ptx {

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t load_relaxed_system(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_system(uint64_t* address, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_system(uint64_t* address, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Hides from the compiler how the value was computed.
__device__ __forceinline__ void hide_origin(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void hide_origin(uint64_t& value) { asm volatile("" : "+l"(value)); }

// 16 bytes in one access: both halves come from the same store.
__device__ __forceinline__ void load_relaxed_system_16(const void* address, uint64_t& low, uint64_t& high) {
    asm volatile("{\n .reg .b128 v;\n ld.relaxed.sys.global.b128 v, [%2];\n mov.b128 {%0, %1}, v;\n}"
                 : "=l"(low), "=l"(high)
                 : "l"(address)
                 : "memory");
}

__device__ __forceinline__ void store_relaxed_system_16(void* address, uint64_t low, uint64_t high) {
    asm volatile("{\n .reg .b128 v;\n mov.b128 v, {%1, %2};\n st.relaxed.sys.global.b128 [%0], v;\n}" ::"l"(address),
                 "l"(low), "l"(high)
                 : "memory");
}

// By some lanes of a converged warp, in one instruction. A branch instead of the predicate would not guarantee that.
__device__ __forceinline__ void store_relaxed_system_16_if(bool condition, void* address, uint64_t low, uint64_t high) {
    asm volatile(
        "{\n .reg .b128 v;\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n mov.b128 v, {%1, %2};\n"
        " @p st.relaxed.sys.global.b128 [%0], v;\n}" ::"l"(address),
        "l"(low), "l"(high), "r"(static_cast<uint32_t>(condition))
        : "memory");
}

__device__ __forceinline__ uint64_t add_relaxed_device_64(uint64_t* address, uint64_t value) {
    uint64_t before;
    asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
}

__device__ __forceinline__ uint32_t add_relaxed_device_32(uint32_t* address, uint32_t value) {
    uint32_t before;
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
}

// Wraps to 0 after `last`.
__device__ __forceinline__ uint32_t increment_relaxed_device(uint32_t* address, uint32_t last) {
    uint32_t before;
    asm volatile("atom.inc.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(last) : "memory");
    return before;
}

__device__ __forceinline__ uint64_t exchange_release_device_64(uint64_t* address, uint64_t value) {
    uint64_t before;
    asm volatile("atom.exch.release.gpu.global.b64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
}

__device__ __forceinline__ uint32_t load_relaxed_device(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t load_acquire_device(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed_device(uint32_t* address, uint32_t value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t add_acq_rel_device(uint32_t* address, uint32_t value) {
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
}

// Not the sequentially consistent fence, which takes longer.
__device__ __forceinline__ void fence_acq_rel_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Orders the generic proxy (ordinary loads and stores) with the async proxy (bulk copies), both ways, for the block's
// shared memory. sm_90. (The fence for all memory would wait until the device sees what this thread has written.)
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ uint64_t global_timer_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ uint32_t sm_number() {
    uint32_t number;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
    return number;
}

// Two floats as e4m3, saturating, to nearest even; NaN is 0x7F. sm_89.
__device__ __forceinline__ uint16_t e4m3_pair_of(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// Two e4m3 elements as f16, which holds them exactly. sm_89.
__device__ __forceinline__ uint32_t f16_pair_of_e4m3(uint16_t pair) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}

// Two floats as bf16 or f16, to nearest even; NaN is 0x7FFF.
__device__ __forceinline__ uint32_t bf16_pair_of(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ uint32_t f16_pair_of(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// A named barrier of the block for this many threads (barrier 0: all threads).
__device__ __forceinline__ void barrier_sync(uint32_t barrier, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- the kernels before and after this one in the stream (programmatic dependent launch): sm_90 ----

// Everything before this kernel in the stream has finished and is visible.
__device__ __forceinline__ void wait_for_previous_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel may take its place on the device; it still waits for this one's end.
__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- mbarrier: counts arrivals, and (sm_90) the bytes of bulk loads ----

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Counters in the block's shared memory.
__device__ __forceinline__ uint32_t load_acquire_shared(const uint32_t* counter) {
    uint32_t value;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(shared_address(counter)) : "memory");
    return value;
}

__device__ __forceinline__ void max_release_shared(uint32_t* counter, uint32_t value) {
    asm volatile("red.max.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(counter)), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t add_acq_rel_shared(uint32_t* counter, uint32_t value) {
    uint32_t before;
    asm volatile("atom.add.acq_rel.cta.shared::cta.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(shared_address(counter)), "r"(value)
                 : "memory");
    return before;
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// sm_90.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// sm_90.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// A release; threads that wait for the phase acquire. Several times: sm_90.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier, uint32_t times) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(times) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_once(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done != 0;
}

// The same, but the thread may sleep for a while first. sm_90.
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done != 0;
}

// ---- asynchronous copies of 16 aligned bytes ----

// Past the L1. The target is written when a barrier for which the thread calls async_copies_arrive completes its phase.
__device__ __forceinline__ void async_copy_16(uint32_t shared_target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_target), "l"(source) : "memory");
}

// One arrival, when all of this thread's copies so far have landed.
__device__ __forceinline__ void async_copies_arrive(uint32_t shared_barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_barrier) : "memory");
}

__device__ __forceinline__ void load_shared_16(uint32_t shared_source, uint64_t& low, uint64_t& high) {
    asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "r"(shared_source) : "memory");
}

// ---- bulk copies: 16-byte aligned addresses and sizes; sm_90 ----

__device__ __forceinline__ void bulk_load(void* shared_target, const void* source, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared_target)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void bulk_store(void* target, const void* shared_source, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
                 "r"(shared_address(shared_source)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the writes of all but the latest kPending groups are visible to this thread.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until all but the latest kPending groups have read their sources.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace crossdock::ptx
