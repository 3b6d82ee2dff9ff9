// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/local_executor.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"
#include "core/interrupt.h"
#include "runtime/cpu/fiber.h"
#include "runtime/cpu/fiber_stack.h"
#include "runtime/cpu/idle_backoff.h"
#include "runtime/cpu/local_put.h"
#include "runtime/cpu/stream_copy.h"
#include "runtime/cpu/zeroed_memory.h"

namespace crossdock::cpu {
namespace {

struct Launch {
    const std::function<void(Warp&)>* kernel;
    bool streams_rows;
    bool is_users;
    IdleBackoff backoff;
    Progress* progress;                          // may be null
    EndedPeers* peers;                           // may be null
    uint64_t earliest_deadline_ns = UINT64_MAX;  // of the current round's pauses
    bool progressed = false;                     // a task did more than poll in the current round
    Interruption interruption;
    std::atomic<bool> interrupted{false};  // for ThreadSanitizer, which takes fibers for threads
    bool broken = false;                   // a warp threw, or a barrier cannot complete: the others unwind

    // All warps wait.
    void idle(uint64_t deadline_ns) {
        if (peers != nullptr) peers->look();
        interrupted.store(interruption.has_come(), std::memory_order_relaxed);
        backoff.idle(deadline_ns);
    }
};

struct Barrier {
    int num_arrived = 0;
    uint64_t generation = 0;
};

struct Block {
    Barrier barriers[Warp::kNumBarriers];
};

// Thrown into the fibers of a broken launch; the cause is reported instead.
struct LaunchBroken {};

class LocalWarp final : public Warp {
  public:
    Launch* launch = nullptr;
    Block* block = nullptr;
    Fiber* fiber = nullptr;  // null: the only warp of its launch, on the caller's stack

    bool is_blocked() const {
        return barrier_ != nullptr && barrier_->generation == awaited_generation_ && !launch->broken;
    }

    void meet(int number, int warps) override {
        if (warps == 1) return;
        Barrier& barrier = block->barriers[number];
        release(&barrier);
        arrive_and_wait(barrier, warps);
        acquire(&barrier);
    }

    // Users' kernels may measure time.
    uint64_t now_ns() override { return launch->is_users ? steady_now_ns() : wait_now_ns(); }

    void pause(uint64_t deadline_ns) override {
        const ExecutorsWork work(kernel());
        if (fiber == nullptr) {
            if (launch->progress != nullptr && launch->progress->progress()) launch->backoff.reset();
            launch->idle(deadline_ns);
            return;
        }
        launch->earliest_deadline_ns = std::min(launch->earliest_deadline_ns, deadline_ns);
        suspend();
    }

    int rank_to_name(int peer) override {
        const ExecutorsWork work(kernel());
        return launch->peers == nullptr ? -1 : launch->peers->rank_to_name(peer, told_of_ended_);
    }

    void report_loss(int rank) override {
        const ExecutorsWork work(kernel());
        if (launch->peers != nullptr) launch->peers->report_loss(rank);
    }

    void scheduling_point() override {}
    void polling_point() override {}

    void copy_async(void* target, const void* source, size_t bytes, bool is_read_soon) override {
        if (launch->streams_rows && !is_read_soon) {
            stream_copy(target, source, bytes);
        } else {
            std::memcpy(target, source, bytes);
        }
        note_progress();
    }

    void wait_copies(int) override {
        if (launch->streams_rows) finish_stream_copies();
    }
    // Copies are synchronous: they have read their sources, and this warp's later reads of a target see them.
    void wait_copies_to(const void*, size_t) override {}
    void wait_sources_read() override {}
    bool is_lazy() const override { return false; }

    void put(int, void* target, const void* source, size_t bytes) override {
        put_local(target, source, bytes);
        note_progress();
    }
    void put_value(int, uint64_t* target, uint64_t value) override {
        __atomic_store_n(target, value, __ATOMIC_RELAXED);
    }
    void signal(int, uint64_t* word, uint64_t increase) override {
        __atomic_fetch_add(word, increase, __ATOMIC_RELEASE);
        note_progress();
    }
    void flush_puts() override {}
    bool is_interrupted() const override { return launch->interrupted.load(std::memory_order_relaxed); }
    bool is_killed() const override { return false; }
    Fault fault() const override { return Fault::kNone; }
    ProtocolChecker* checker() override { return nullptr; }

    void note_progress() override {
        const ExecutorsWork work(kernel());
        if (fiber == nullptr) {
            launch->backoff.reset();
        } else {
            launch->progressed = true;
        }
    }

    void run() {
        const RunAs scope(kernel(), launch);
        (*launch->kernel)(*this);
    }

  private:
    VirtualThread* kernel() const { return fiber == nullptr || launch->is_users ? nullptr : &fiber->kernel(); }

    void arrive_and_wait(Barrier& barrier, int warps) {
        const ExecutorsWork work(kernel());
        if (++barrier.num_arrived == warps) {
            barrier.num_arrived = 0;
            ++barrier.generation;
            launch->progressed = true;
            return;
        }
        awaited_generation_ = barrier.generation;
        barrier_ = &barrier;
        suspend();
        barrier_ = nullptr;
    }

    void suspend() {
        fiber->suspend();
        if (launch->broken) throw LaunchBroken{};
    }

    const Barrier* barrier_ = nullptr;  // where it waits
    uint64_t awaited_generation_ = 0;
    uint32_t told_of_ended_ = 0;
};

// Memory that a thread's launches reuse.
struct LaunchMemory {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<LocalWarp> warps;
    std::vector<Block> blocks;
    std::vector<ZeroedMemory> shared;

    void prepare(const LaunchShape& shape, Launch& launch) {
        const size_t num_blocks = static_cast<size_t>(shape.num_blocks);
        const size_t num_warps = num_blocks * static_cast<size_t>(shape.warps_per_block);
        warps.assign(num_warps, LocalWarp());
        blocks.assign(num_blocks, Block());
        // A user's only thread is a fiber, too: its stack has the size and the guard of the others.
        const bool has_fibers = num_warps > 1 || shape.is_users;
        if (has_fibers) make_fibers(num_warps, shape.stack_bytes == 0 ? kWarpStackBytes : shape.stack_bytes);
        if (shared.size() < num_blocks) shared.resize(num_blocks);
        for (size_t block_idx = 0; block_idx < num_blocks; ++block_idx) {
            if (shared[block_idx].bytes() < shape.shared_bytes) {
                shared[block_idx] = ZeroedMemory(shape.shared_bytes, kSharedAlignment);
            }
        }
        for (size_t i = 0; i < num_warps; ++i) {
            LocalWarp& warp = warps[i];
            warp.launch = &launch;
            warp.block_idx = static_cast<int>(i) / shape.warps_per_block;
            warp.num_blocks = shape.num_blocks;
            warp.warp_idx = static_cast<int>(i) % shape.warps_per_block;
            warp.num_warps = shape.warps_per_block;
            warp.shared_memory = shared[static_cast<size_t>(warp.block_idx)].data();
            warp.block = &blocks[static_cast<size_t>(warp.block_idx)];
            if (has_fibers) {
                warp.fiber = fibers[i].get();
                warp.fiber->start([](void* self) { static_cast<LocalWarp*>(self)->run(); }, &warp);
            }
        }
    }

  private:
    void make_fibers(size_t count, size_t stack_bytes) {
        if (count > fibers.size()) expect_room_for_stacks(count - fibers.size());
        for (size_t i = 0; i < count; ++i) {
            if (i < fibers.size() && fibers[i]->stack_bytes() >= stack_bytes) continue;
            auto fiber = std::make_unique<Fiber>(stack_bytes);
            if (i == fibers.size()) {
                fibers.push_back(std::move(fiber));
            } else {
                fibers[i] = std::move(fiber);
            }
        }
    }
};

// Destructors of other thread-local and static objects may launch after this memory is destroyed.
thread_local bool t_memory_is_gone = false;

struct LaunchMemoryOfThread : LaunchMemory {
    ~LaunchMemoryOfThread() { t_memory_is_gone = true; }
};

// Resumes every runnable fiber in turn until all have finished.
std::exception_ptr run_fibers(Launch& launch, std::vector<LocalWarp>& warps) {
    std::exception_ptr cause;
    for (size_t num_running = warps.size(); num_running > 0;) {
        launch.earliest_deadline_ns = UINT64_MAX;
        launch.progressed = false;
        bool resumed = false;
        for (LocalWarp& warp : warps) {
            if (warp.fiber->is_finished() || warp.is_blocked()) continue;
            resumed = true;
            Warp::set_running(&warp);
            warp.fiber->resume();
            if (!warp.fiber->is_finished()) continue;
            --num_running;
            launch.progressed = true;
            if (auto thrown = warp.fiber->take_exception(); thrown != nullptr && cause == nullptr) {
                cause = thrown;
                launch.broken = true;
            }
        }
        if (launch.progress != nullptr && launch.progress->progress()) launch.progressed = true;
        if (!resumed) {
            cause = std::make_exception_ptr(
                Error(ncclInternalError, "block barrier: some warps wait, others of the block have returned"));
            launch.broken = true;
        } else if (launch.progressed) {
            launch.backoff.reset();
        } else {
            launch.idle(launch.earliest_deadline_ns);
        }
    }
    return cause;
}

}  // namespace

LocalExecutor::LocalExecutor(int num_ranks, std::shared_ptr<Progress> progress)
    : num_spins_(IdleBackoff::spins_for(num_ranks)), progress_(std::move(progress)) {}

void LocalExecutor::watch_peers(int num_ranks, PeerLosses& losses) {
    peers_ = std::make_unique<EndedPeers>(num_ranks, losses);
}

void LocalExecutor::run(const LaunchShape& shape, const std::function<void(Warp&)>& kernel) {
    thread_local LaunchMemoryOfThread t_memory;
    LaunchMemory own;
    LaunchMemory& memory = t_memory_is_gone ? own : t_memory;
    Launch launch{&kernel, shape.streams_rows, shape.is_users, IdleBackoff(num_spins_), progress_.get(), peers_.get()};
    memory.prepare(shape, launch);
    release(&launch);
    struct ClearRunning {
        ~ClearRunning() { Warp::set_running(nullptr); }
    } at_the_end;
    if (memory.warps.front().fiber == nullptr) {
        Warp::set_running(&memory.warps.front());
        kernel(memory.warps.front());
    } else if (auto cause = run_fibers(launch, memory.warps)) {
        std::rethrow_exception(cause);
    }
}

bool LocalExecutor::wait(const std::function<bool()>& ready, uint64_t deadline_ns) {
    IdleBackoff backoff(num_spins_);
    while (!ready()) {
        if (progress_ != nullptr && progress_->progress()) {
            backoff.reset();
            continue;
        }
        if (wait_now_ns() >= deadline_ns) return ready();
        backoff.idle(deadline_ns);
    }
    return true;
}

uint64_t LocalExecutor::now_ns() { return wait_now_ns(); }

}  // namespace crossdock::cpu
