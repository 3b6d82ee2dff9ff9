/* SPDX-License-Identifier: Apache-2.0
 *
 * For kernels of experts that compute a dispatch's rows while others still arrive, and whose results a low-latency
 * combine sends while others are still computed: the counters behind crossdockHandleSetOverlap (crossdock.h), for CUDA
 * and for threads of a CPU. Header only; it needs neither NCCL nor this library at run time.
 *
 * Words:
 *   zone    an expert of this rank (expert-major), or a source rank (rank-major)
 *   block   block_rows consecutive rows of a zone, the last one perhaps fewer
 *   turn    one dispatch, the consumer's run on its rows, and the combine that may follow
 *
 * High throughput has the expert-major layout only, and no combine that waits.
 *
 * A consumer runs once per turn. A sketch, one block of threads per block of rows:
 *
 *     crossdock::OverlapConsumer consumer(memory, zones, slots, block_rows);
 *     const uint32_t turn = consumer.turn();
 *     __shared__ uint32_t rows;
 *     if (threadIdx.x == 0) {
 *         uint32_t in_zone = 0;
 *         const bool is_known = consumer.wait_count(turn, zone, timeout_ns, in_zone);
 *         const bool is_block = is_known && block * block_rows < in_zone;
 *         rows = is_block ? consumer.wait_block(turn, zone, block, timeout_ns) : 0;
 *     }
 *     __syncthreads();
 *     ... compute rows [block * block_rows, + rows) of the zone ...
 *     __syncthreads();
 *     if (threadIdx.x == 0) {
 *         if (rows > 0) consumer.finish(turn, zone, block);   // if a combine waits
 *         consumer.leave(gridDim.x * gridDim.y);
 *     }
 */
#ifndef CROSSDOCK_OVERLAP_HPP_
#define CROSSDOCK_OVERLAP_HPP_

#include <cstdint>

#if defined(__CUDACC__)
#define CROSSDOCK_OVERLAP_CALL __host__ __device__ inline
#else
#define CROSSDOCK_OVERLAP_CALL inline
#endif

#if !defined(__CUDA_ARCH__)
#include <chrono>
#include <thread>
#endif

namespace crossdock {

/* Where the words are in the memory, in words of 4 bytes. Turns use two halves in turn: during one, the dispatch clears
 * the other. */
struct OverlapLayout {
    static constexpr uint32_t kHeadWords = 32;
    enum Head : uint32_t {
        kDispatches, /* that have finished: the number of the next turn */
        kConsumers,  /* runs that have finished */
        kLeaving,    /* of the consumer's run: how many of its parts have finished */
        kFinishing,  /* the same of the dispatch */
    };

    uint32_t zones;
    uint32_t blocks; /* of a zone */

    CROSSDOCK_OVERLAP_CALL static constexpr OverlapLayout of(uint32_t zones, uint32_t slots, uint32_t block_rows) {
        return {zones, static_cast<uint32_t>((uint64_t{slots} + block_rows - 1) / block_rows)};
    }
    CROSSDOCK_OVERLAP_CALL constexpr uint64_t half_words() const { return zones * (1 + 3 * uint64_t{blocks}); }
    CROSSDOCK_OVERLAP_CALL constexpr uint64_t bytes() const { return 4 * (kHeadWords + 2 * half_words()); }
    CROSSDOCK_OVERLAP_CALL constexpr uint64_t half(uint32_t turn) const { return kHeadWords + turn % 2 * half_words(); }
    /* 1 + the rows of a zone; 0: not known yet. */
    CROSSDOCK_OVERLAP_CALL constexpr uint64_t count(uint32_t turn, uint32_t zone) const { return half(turn) + zone; }
    /* The rows of a block, once all are in place; 0 until then. */
    CROSSDOCK_OVERLAP_CALL constexpr uint64_t ready(uint32_t turn, uint32_t zone, uint32_t block) const {
        return half(turn) + zones + uint64_t{zone} * blocks + block;
    }
    /* What the consumer has added when it has computed a block, or a part of it. */
    CROSSDOCK_OVERLAP_CALL constexpr uint64_t done(uint32_t turn, uint32_t zone, uint32_t block) const {
        return ready(turn, zone, block) + uint64_t{zones} * blocks;
    }
    /* The dispatch's own: 1024 for each row in place. */
    CROSSDOCK_OVERLAP_CALL constexpr uint64_t arrived(uint32_t turn, uint32_t zone, uint32_t block) const {
        return done(turn, zone, block) + uint64_t{zones} * blocks;
    }
};

/* By one thread of each part (block of threads, program, CPU thread); what others of the part read or wrote is ordered
 * by the part's own barriers. */
class OverlapConsumer {
  public:
    /* memory, block_rows: as in crossdockOverlap_t. zones: local experts (expert-major) or ranks (rank-major). slots:
     * the rows that a zone has room for. Low latency: the second dimension of dispatch's outputs->tokens. High
     * throughput: R * max_dispatch_tokens_per_rank, or max_recv_tokens_per_rank if that is less (and not 0). */
    CROSSDOCK_OVERLAP_CALL OverlapConsumer(void* memory, uint32_t zones, uint32_t slots, uint32_t block_rows)
        : words_(static_cast<uint32_t*>(memory)), layout_(OverlapLayout::of(zones, slots, block_rows)) {}

    /* Of this run: the same for all parts, until the last one leaves. Waits until the dispatch of the turn before has
     * ended, which clears what this turn uses; that takes no longer than the dispatch's own timeout. */
    CROSSDOCK_OVERLAP_CALL uint32_t turn() const {
        const uint32_t turn = acquire(words_ + OverlapLayout::kConsumers);
        while (static_cast<int32_t>(acquire(words_ + OverlapLayout::kDispatches) - turn) < 0) pause();
        return turn;
    }

    /* Waits until the rows of a zone are known. Returns false, and no number, after timeout_ns. */
    CROSSDOCK_OVERLAP_CALL bool wait_count(uint32_t turn, uint32_t zone, uint64_t timeout_ns, uint32_t& rows) const {
        const uint32_t word = wait(words_ + layout_.count(turn, zone), timeout_ns);
        rows = word - (word != 0 ? 1 : 0);
        return word != 0;
    }
    /* High throughput, where zones follow one another: the first row of a zone, once the rows of those before are
     * known. alignment: the handle's; 0 or 1: none. */
    CROSSDOCK_OVERLAP_CALL bool wait_first_row(uint32_t turn, uint32_t zone, uint32_t alignment, uint64_t timeout_ns,
                                               uint32_t& row) const {
        row = 0;
        if (alignment == 0) alignment = 1;
        for (uint32_t before = 0; before < zone; ++before) {
            uint32_t rows = 0;
            if (!wait_count(turn, before, timeout_ns, rows)) return false;
            row += (rows + alignment - 1) / alignment * alignment;
        }
        return true;
    }
    /* Waits until all rows of a block are in place; returns their number: 0 after timeout_ns, so call it only for
     * blocks that the zone has (wait_count). Read the rows with ordinary loads: __ldg and const __restrict__ might find
     * what was there before. Before asynchronous loads (TMA): fence.proxy.async, by the thread that issues them. */
    CROSSDOCK_OVERLAP_CALL uint32_t wait_block(uint32_t turn, uint32_t zone, uint32_t block,
                                               uint64_t timeout_ns) const {
        return wait(words_ + layout_.ready(turn, zone, block), timeout_ns);
    }
    /* Publishes what this part has computed of a block. A combine sends the block's rows when the sum of the values has
     * reached crossdockOverlap_t::done_value. After asynchronous stores (TMA): wait until they are complete, and
     * fence.proxy.async, first. */
    CROSSDOCK_OVERLAP_CALL void finish(uint32_t turn, uint32_t zone, uint32_t block, uint32_t value = 1) const {
        add(words_ + layout_.done(turn, zone, block), value);
    }
    /* This part reads and writes no more words of the turn. parts: of the run, in all; the last one ends it. */
    CROSSDOCK_OVERLAP_CALL void leave(uint32_t parts) const {
        uint32_t* leaving = words_ + OverlapLayout::kLeaving;
        if (add(leaving, 1) + 1 != parts) return;
        release(leaving, 0);
        add(words_ + OverlapLayout::kConsumers, 1);
    }

  private:
    CROSSDOCK_OVERLAP_CALL static uint32_t wait(const uint32_t* word, uint64_t timeout_ns) {
        uint64_t begin = 0;
        for (;;) {
            for (int poll = 0; poll < 64; ++poll) {
                const uint32_t value = acquire(word);
                if (value != 0) return value;
            }
            const uint64_t now = now_ns();
            if (begin == 0) begin = now;
            if (now - begin >= timeout_ns) return 0;
            pause();
        }
    }
#if defined(__CUDA_ARCH__)
    __device__ static uint32_t acquire(const uint32_t* word) {
        uint32_t value;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
        return value;
    }
    __device__ static void release(uint32_t* word, uint32_t value) {
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
    }
    __device__ static uint32_t add(uint32_t* word, uint32_t value) {
        uint32_t before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
        return before;
    }
    __device__ static uint64_t now_ns() {
        uint64_t now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        return now;
    }
    __device__ static void pause() { __nanosleep(100); }
#else
    CROSSDOCK_OVERLAP_CALL static uint32_t acquire(const uint32_t* word) {
        return __atomic_load_n(word, __ATOMIC_ACQUIRE);
    }
    CROSSDOCK_OVERLAP_CALL static void release(uint32_t* word, uint32_t value) {
        __atomic_store_n(word, value, __ATOMIC_RELEASE);
    }
    CROSSDOCK_OVERLAP_CALL static uint32_t add(uint32_t* word, uint32_t value) {
        return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
    }
    CROSSDOCK_OVERLAP_CALL static uint64_t now_ns() {
        return static_cast<uint64_t>(
            std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
    }
    CROSSDOCK_OVERLAP_CALL static void pause() { std::this_thread::yield(); }
#endif

    uint32_t* words_;
    OverlapLayout layout_;
};

}  // namespace crossdock

#endif  // CROSSDOCK_OVERLAP_HPP_
