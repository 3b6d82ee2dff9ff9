// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/simulation.h"

#include <cstring>

#include "core/error.h"
#include "runtime/cpu/zeroed_memory.h"

namespace crossdock::cpu {
namespace {

constexpr uint64_t kSwitchOneIn = 4;        // of the places where a warp may be interrupted
constexpr unsigned char kStaleByte = 0xcd;  // a GPU's shared memory is not zeroed either

struct SimulatedLaunch {
    Scheduler* scheduler;
    SlotChecker* checker;
    const std::function<void(Warp&)>* kernel;
    Task* launcher;
    int rank;
    int num_running;
    std::exception_ptr exception;  // the first one thrown by a warp
};

struct SimulatedBlock {
    ZeroedMemory shared;
    std::vector<Task*> at_barrier[Warp::kNumBarriers];
};

class SimulatedWarp final : public Warp {
  public:
    SimulatedWarp(SimulatedLaunch& launch, SimulatedBlock& block) : launch_(&launch), block_(&block) {
        shared_memory = block.shared.data();
    }

    // A task's body.
    static void run(void* self) { static_cast<SimulatedWarp*>(self)->run(); }

    void meet(int barrier, int warps) override {
        std::vector<Task*>& waiting = block_->at_barrier[barrier];
        if (static_cast<int>(waiting.size()) + 1 < warps) {
            waiting.push_back(&scheduler().current());
            scheduler().block();
            return;
        }
        for (Task* task : waiting) scheduler().wake(*task);
        waiting.clear();
        scheduling_point();
    }

    uint64_t now_ns() override { return scheduler().now_ns(); }
    void pause(uint64_t deadline_ns) override { scheduler().poll(deadline_ns); }

    void scheduling_point() override {
        scheduler().note_progress();
        if (scheduler().random().one_in(kSwitchOneIn)) scheduler().yield();
    }

    void copy_async(void* target, const void* source, size_t bytes, bool) override {
        const auto* first = static_cast<const std::byte*>(target);
        const bool stays = first >= shared_memory && first < shared_memory + block_->shared.bytes();
        scheduler().copy_async(target, source, bytes, !stays);
        scheduling_point();
    }
    void wait_copies(int max_pending) override { scheduler().wait_copies(max_pending); }
    void wait_copies_to(const void* target, size_t bytes) override { scheduler().wait_copies_to(target, bytes); }
    void wait_sources_read() override { scheduler().read_sources(); }
    bool is_lazy() const override { return true; }

    void put(int peer, void* target, const void* source, size_t bytes) override {
        scheduler().put(peer, target, source, bytes);
        scheduling_point();
    }
    void put_value(int peer, uint64_t* target, uint64_t value) override {
        scheduler().put_value(peer, target, value);
        scheduling_point();
    }
    void signal(int peer, uint64_t* word, uint64_t increase) override {
        scheduler().signal(peer, word, increase);
        scheduling_point();
    }
    void flush_puts() override { scheduler().flush_puts(); }

    bool is_killed() const override { return scheduler().is_killed(launch_->rank); }
    Fault fault() const override { return scheduler().config().fault; }
    ProtocolChecker* checker() override { return launch_->checker; }

  private:
    Scheduler& scheduler() const { return *launch_->scheduler; }

    void run() {
        try {
            (*launch_->kernel)(*this);
        } catch (...) {
            if (launch_->exception == nullptr) launch_->exception = std::current_exception();
        }
        // What a kernel leaves under way lands before the launch's memory is gone, but not earlier than its time.
        scheduler().wait_copies(0);
        if (--launch_->num_running == 0) scheduler().wake(*launch_->launcher);
    }

    SimulatedLaunch* launch_;
    SimulatedBlock* block_;
};

class SimulatedExecutor final : public Executor {
  public:
    SimulatedExecutor(Scheduler& scheduler, SlotChecker& checker, int rank)
        : scheduler_(&scheduler), checker_(&checker), rank_(rank) {}

    void run(const LaunchShape& shape, const std::function<void(Warp&)>& kernel) override {
        require_alive();
        Task& launcher = scheduler_->current();
        const int num_warps = shape.num_blocks * shape.warps_per_block;
        SimulatedLaunch launch{scheduler_, checker_, &kernel, &launcher, rank_, num_warps, nullptr};
        std::vector<SimulatedBlock> blocks(static_cast<size_t>(shape.num_blocks));
        std::vector<SimulatedWarp> warps;
        warps.reserve(static_cast<size_t>(num_warps));
        for (int block_idx = 0; block_idx < shape.num_blocks; ++block_idx) {
            SimulatedBlock& block = blocks[static_cast<size_t>(block_idx)];
            block.shared = ZeroedMemory(shape.shared_bytes, kSharedAlignment);
            std::memset(block.shared.data(), kStaleByte, shape.shared_bytes);
            for (int warp_idx = 0; warp_idx < shape.warps_per_block; ++warp_idx) {
                SimulatedWarp& warp = warps.emplace_back(launch, block);
                warp.block_idx = block_idx;
                warp.num_blocks = shape.num_blocks;
                warp.warp_idx = warp_idx;
                warp.num_warps = shape.warps_per_block;
            }
        }
        std::vector<Task*> tasks;
        tasks.reserve(warps.size());
        scheduler_->reserve(warps.size(), kWarpStackBytes);
        for (SimulatedWarp& warp : warps) {
            tasks.push_back(&scheduler_->spawn(rank_, kWarpStackBytes, &SimulatedWarp::run, &warp));
            tasks.back()->warp = &warp;
        }
        // The warps live in this frame: it stays until all of them have returned, deadlock or not.
        launcher.unwinds_on_deadlock = false;
        while (launch.num_running > 0) scheduler_->block();
        launcher.unwinds_on_deadlock = true;
        for (Task* task : tasks) scheduler_->release(*task);
        if (launch.exception != nullptr) std::rethrow_exception(launch.exception);
        require_alive();
    }

    bool wait(const std::function<bool()>& ready, uint64_t deadline_ns) override {
        scheduler_->yield();  // also where other ranks may come first
        while (!ready()) {
            if (scheduler_->is_killed(rank_) || scheduler_->now_ns() >= deadline_ns) return false;
            scheduler_->poll(deadline_ns);
        }
        scheduler_->note_progress();
        return true;
    }

    uint64_t now_ns() override { return scheduler_->now_ns(); }
    Scheduler* scheduler() override { return scheduler_; }

  private:
    void require_alive() const {
        require(!scheduler_->is_killed(rank_), ncclRemoteError, "rank {} was killed by fault injection at step {}",
                rank_, scheduler_->config().killed_at_step);
    }

    Scheduler* scheduler_;
    SlotChecker* checker_;
    int rank_;
};

struct Program {
    const std::function<void(int)>* body;
    int rank;
    static void run(void* self) {
        auto* program = static_cast<Program*>(self);
        (*program->body)(program->rank);
    }
};

}  // namespace

Simulation::Simulation(int num_ranks, const SimulationConfig& config)
    : scheduler_(num_ranks, config), checker_(scheduler_) {
    for (int rank = 0; rank < num_ranks; ++rank) {
        executors_.push_back(std::make_unique<SimulatedExecutor>(scheduler_, checker_, rank));
    }
}

Simulation::~Simulation() = default;

Executor& Simulation::executor(int rank) { return *executors_[static_cast<size_t>(rank)]; }

void Simulation::run(const std::function<void(int)>& program) {
    std::vector<Program> programs;
    for (int rank = 0; rank < static_cast<int>(executors_.size()); ++rank) programs.push_back({&program, rank});
    std::vector<Task*> tasks;
    scheduler_.reserve(programs.size(), kProgramStackBytes);
    for (Program& each : programs) {
        tasks.push_back(&scheduler_.spawn(each.rank, kProgramStackBytes, &Program::run, &each));
    }
    scheduler_.run();
    std::exception_ptr thrown;
    for (Task* task : tasks) {
        if (auto exception = task->fiber.take_exception(); thrown == nullptr) thrown = exception;
    }
    if (!checker_.violation().empty()) throw Error(ncclInternalError, checker_.violation());
    if (!scheduler_.finding().empty()) throw Error(ncclInternalError, scheduler_.finding());
    if (!scheduler_.deadlock().empty()) throw Error(ncclInternalError, scheduler_.deadlock());
    if (thrown != nullptr) std::rethrow_exception(thrown);
}

}  // namespace crossdock::cpu
