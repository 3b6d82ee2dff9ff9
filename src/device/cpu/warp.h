// SPDX-License-Identifier: Apache-2.0
// The CPU executor's interface to one warp of a kernel. A warp is a fiber; all warps of a launch run on the calling
// thread, so only other ranks' memory needs atomics; what warps of a launch share is atomic for ThreadSanitizer, which
// takes each warp for a thread. Kernels use it only through device/context.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "device/cpu/fault.h"
#include "device/platform.h"

namespace crossdock::cpu {

// Follows the protocol's events in the simulation and records the first violation. Null in other backends.
class ProtocolChecker {
  public:
    virtual ~ProtocolChecker() = default;
    // Rank `writer` starts to write slot `slot` of buffer `buffer` in rank `owner`'s memory for operation `epoch`.
    // memory: the beginning of the owner's part of the symmetric memory, which differs between groups.
    virtual void slot_written(int writer, int owner, const void* memory, int buffer, uint64_t slot, uint64_t epoch) = 0;
    // The owner has read the slot.
    virtual void slot_read(int owner, const void* memory, int buffer, uint64_t slot, uint64_t epoch) = 0;
    // Operation `epoch` of `owner` has read all its rows: the number announced, the number read.
    virtual void operation_read(int owner, uint64_t epoch, uint64_t rows_announced, uint64_t rows_read) = 0;
    // From now on slots may stay unread: a peer is masked, or an operation was cancelled.
    virtual void unread_slots_allowed() = 0;
};

class Warp {
  public:
    virtual ~Warp() = default;

    int block_idx = 0;
    int num_blocks = 1;
    int warp_idx = 0;
    int num_warps = 1;
    std::byte* shared_memory = nullptr;  // the block's, 128-byte aligned

    // A barrier of this many warps of the block, always the same ones at the same barrier.
    static constexpr int kNumBarriers = 2;
    virtual void meet(int barrier, int warps) = 0;

    // Nanoseconds, monotonic; in the simulation simulated time.
    virtual uint64_t now_ns() = 0;

    // After a failed poll: lets other fibers (and, oversubscribed, other threads) run. Simulated time may jump to
    // deadline_ns when no task can make progress.
    virtual void pause(uint64_t deadline_ns) = 0;

    // The warp did more than poll, so its next pause does not continue a long wait.
    virtual void note_progress() {}

    // The simulation may switch to another fiber here. Does nothing in other backends.
    virtual void scheduling_point() = 0;
    // The same after a check that may have failed. Does not count as progress.
    virtual void polling_point() = 0;

    // Asynchronous copy, complete at the latest when wait_copies returns. Immediate unless is_lazy(); in the simulation
    // it reads its source and writes its target at some later time, in any order. is_read_soon: the target should stay
    // in the caches.
    virtual void copy_async(void* target, const void* source, size_t bytes, bool is_read_soon = false) = 0;
    // Blocks until all but at most max_pending of this warp's latest copies have landed.
    virtual void wait_copies(int max_pending) = 0;
    // Blocks until this warp's copies into [target, target + bytes) have landed.
    virtual void wait_copies_to(const void* target, size_t bytes) = 0;
    // Blocks until all of this warp's copies have read their sources; they may land later.
    virtual void wait_sources_read() = 0;
    virtual bool is_lazy() const = 0;

    // The warp whose code runs in the calling thread; null: none. Atomic, because kernels read what executors set.
    static Warp* running() { return t_running.load(std::memory_order_relaxed); }
    static void set_running(Warp* warp) { t_running.store(warp, std::memory_order_relaxed); }

    // One-sided operations on memory of GIN peers, as device/network.h describes them. Addresses are this process's.
    virtual void put(int peer, void* target, const void* source, size_t bytes) = 0;
    virtual void put_value(int peer, uint64_t* target, uint64_t value) = 0;
    virtual void signal(int peer, uint64_t* word, uint64_t increase) = 0;
    virtual void flush_puts() = 0;

    // Called after a failed poll for a word of the peer. If the peer's process has ended, returns the rank to name: the
    // peer, or the one whose loss the peer had reported; else -1.
    virtual int rank_to_name(int /*peer*/) { return -1; }
    // This rank fails because it has lost `rank`: peers that later find this one gone name that one.
    virtual void report_loss(int /*rank*/) {}

    // The program has ended this launch's waits.
    virtual bool is_interrupted() const { return false; }

    // The rank was killed: its writes to other ranks are lost.
    virtual bool is_killed() const = 0;
    virtual Fault fault() const = 0;
    virtual ProtocolChecker* checker() = 0;

  private:
    static inline thread_local std::atomic<Warp*> t_running = nullptr;
};

}  // namespace crossdock::cpu
