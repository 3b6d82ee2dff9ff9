// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/simulation.h"

#include <cstring>

#include "core/error.h"
#include "runtime/cpu/stack_overflow.h"
#include "runtime/cpu/zeroed_memory.h"

namespace crossdock::cpu {
namespace {

constexpr uint64_t kSwitchOneIn = 4;        // a warp is interrupted at one scheduling point in 4
constexpr unsigned char kStaleByte = 0xcd;  // a GPU's shared memory is not zeroed either

struct SimulatedLaunch {
    Scheduler* scheduler;
    SlotChecker* checker;
    const std::function<void(Warp&)>* kernel;
    Task* launcher;
    EndedPeers* peers;  // may be null
    int rank;
    int num_running;
    bool is_users;
    std::exception_ptr exception;  // the first one thrown by a warp
};

struct SimulatedBlock {
    ZeroedMemory shared;
    std::vector<Task*> at_barrier[Warp::kNumBarriers];
};

// Calls of a kernel into the simulation run outside of the kernel's context.
class SimulatedWarp final : public Warp, private ProtocolChecker {
  public:
    SimulatedWarp(SimulatedLaunch& launch, SimulatedBlock& block) : launch_(&launch), block_(&block) {
        shared_memory = block.shared.data();
    }
    void assign(Task& task) {
        task_ = &task;
        task.warp = this;
    }

    // A task's body.
    static void run(void* self) { static_cast<SimulatedWarp*>(self)->run(); }

    void meet(int barrier, int warps) override {
        std::vector<Task*>& waiting = block_->at_barrier[barrier];
        release(&waiting);
        arrive_and_wait(waiting, warps);
        acquire(&waiting);
    }

    uint64_t now_ns() override {
        const ExecutorsWork work(kernel());
        return scheduler().now_ns();
    }
    void pause(uint64_t deadline_ns) override {
        const ExecutorsWork work(kernel());
        if (launch_->peers != nullptr) launch_->peers->look();
        scheduler().poll(deadline_ns);
    }

    int rank_to_name(int peer) override {
        const ExecutorsWork work(kernel());
        return launch_->peers == nullptr ? -1 : launch_->peers->rank_to_name(peer, told_of_ended_);
    }
    void report_loss(int rank) override {
        const ExecutorsWork work(kernel());
        if (launch_->peers != nullptr && !scheduler().is_killed(launch_->rank)) launch_->peers->report_loss(rank);
    }

    void scheduling_point() override {
        const ExecutorsWork work(kernel());
        may_switch();
    }
    void polling_point() override {
        const ExecutorsWork work(kernel());
        if (scheduler().random().one_in(kSwitchOneIn)) scheduler().give_way();
    }

    void copy_async(void* target, const void* source, size_t bytes, bool) override {
        task_->copies.release();
        const ExecutorsWork work(kernel());
        const auto* first = static_cast<const std::byte*>(target);
        const bool stays = first >= shared_memory && first < shared_memory + block_->shared.bytes();
        scheduler().copy_async(target, source, bytes, !stays);
        may_switch();
    }
    void wait_copies(int max_pending) override {
        await([&] { scheduler().wait_copies(max_pending); });
    }
    void wait_copies_to(const void* target, size_t bytes) override {
        await([&] { scheduler().wait_copies_to(target, bytes); });
    }
    void wait_sources_read() override {
        await([&] { scheduler().read_sources(); });
    }
    bool is_lazy() const override { return true; }

    void put(int peer, void* target, const void* source, size_t bytes) override {
        post(peer, [&] { scheduler().put(peer, target, source, bytes); });
    }
    void put_value(int peer, uint64_t* target, uint64_t value) override {
        post(peer, [&] { scheduler().put_value(peer, target, value); });
    }
    void signal(int peer, uint64_t* word, uint64_t increase) override {
        post(peer, [&] { scheduler().signal(peer, word, increase); });
    }
    void flush_puts() override {
        {
            const ExecutorsWork work(kernel());
            scheduler().flush_puts();
        }
        scheduler().network().acquire(launch_->rank);
    }

    bool is_killed() const override {
        const ExecutorsWork work(kernel());
        return scheduler().is_killed(launch_->rank);
    }
    Fault fault() const override { return scheduler().config().fault; }
    ProtocolChecker* checker() override { return this; }

  private:
    void slot_written(int writer, int owner, const void* memory, int buffer, uint64_t slot, uint64_t epoch) override {
        const ExecutorsWork work(kernel());
        launch_->checker->slot_written(writer, owner, memory, buffer, slot, epoch);
    }
    void slot_read(int owner, const void* memory, int buffer, uint64_t slot, uint64_t epoch) override {
        const ExecutorsWork work(kernel());
        launch_->checker->slot_read(owner, memory, buffer, slot, epoch);
    }
    void operation_read(int owner, uint64_t epoch, uint64_t rows_announced, uint64_t rows_read) override {
        const ExecutorsWork work(kernel());
        launch_->checker->operation_read(owner, epoch, rows_announced, rows_read);
    }
    void unread_slots_allowed() override {
        const ExecutorsWork work(kernel());
        launch_->checker->unread_slots_allowed();
    }

    Scheduler& scheduler() const { return *launch_->scheduler; }
    VirtualThread* kernel() const { return launch_->is_users ? nullptr : &task_->fiber.kernel(); }

    void may_switch() {
        scheduler().note_progress();
        if (scheduler().random().one_in(kSwitchOneIn)) scheduler().yield();
    }

    void arrive_and_wait(std::vector<Task*>& waiting, int warps) {
        const ExecutorsWork work(kernel());
        if (static_cast<int>(waiting.size()) + 1 < warps) {
            waiting.push_back(task_);
            scheduler().block();
            return;
        }
        for (Task* task : waiting) scheduler().wake(*task);
        waiting.clear();
        may_switch();
    }

    template <typename Wait>
    void await(Wait wait) {
        {
            const ExecutorsWork work(kernel());
            wait();
        }
        task_->copies.acquire();
    }

    template <typename Post>
    void post(int peer, Post post) {
        scheduler().network().link(launch_->rank, peer).release();
        const ExecutorsWork work(kernel());
        post();
        may_switch();
    }

    void run() {
        try {
            const RunAs scope(kernel(), launch_);
            (*launch_->kernel)(*this);
        } catch (...) {
            if (launch_->exception == nullptr) launch_->exception = std::current_exception();
        }
        // Copies that a kernel did not wait for land in their time, before the launch's memory is freed.
        scheduler().wait_copies(0);
        task_->copies.acquire();
        if (--launch_->num_running == 0) scheduler().wake(*launch_->launcher);
    }

    SimulatedLaunch* launch_;
    SimulatedBlock* block_;
    Task* task_ = nullptr;
    uint32_t told_of_ended_ = 0;
};

class SimulatedExecutor final : public Executor {
  public:
    SimulatedExecutor(Scheduler& scheduler, SlotChecker& checker, int rank)
        : scheduler_(&scheduler), checker_(&checker), rank_(rank) {}

    void run(const LaunchShape& shape, const std::function<void(Warp&)>& kernel) override {
        require_alive();
        Task& launcher = scheduler_->current();
        const int num_warps = shape.num_blocks * shape.warps_per_block;
        SimulatedLaunch launch{scheduler_, checker_,  &kernel,        &launcher, peers_.get(),
                               rank_,      num_warps, shape.is_users, nullptr};
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
        const size_t stack_bytes = shape.stack_bytes == 0 ? kWarpStackBytes : shape.stack_bytes;
        scheduler_->reserve(warps.size(), stack_bytes);
        for (SimulatedWarp& warp : warps) {
            tasks.push_back(&scheduler_->spawn(rank_, stack_bytes, &SimulatedWarp::run, &warp));
            warp.assign(*tasks.back());
        }
        release(&launch);
        scheduler_->block_until([&] { return launch.num_running == 0; });  // the warps live in this frame
        for (Task* task : tasks) scheduler_->release(*task);
        if (launch.exception != nullptr) std::rethrow_exception(launch.exception);
        require_alive();
    }

    bool wait(const std::function<bool()>& ready, uint64_t deadline_ns) override {
        scheduler_->yield();  // other ranks may run first
        // A killed rank does not act on what it would have seen.
        while (!scheduler_->is_killed(rank_)) {
            if (ready()) {
                scheduler_->note_progress();
                return true;
            }
            if (scheduler_->now_ns() >= deadline_ns) break;
            scheduler_->poll(deadline_ns);
        }
        return false;
    }

    uint64_t now_ns() override { return scheduler_->now_ns(); }
    // To look costs nothing here, and a later look would depend on real time.
    void watch_peers(int num_ranks, PeerLosses& losses) override {
        peers_ = std::make_unique<EndedPeers>(num_ranks, losses, 0);
    }
    uint64_t liveness_interval_ns() const override { return 0; }
    Scheduler* scheduler() override { return scheduler_; }

  private:
    void require_alive() const {
        require(!scheduler_->is_killed(rank_), ncclRemoteError, "rank {} was killed by fault injection at step {}",
                rank_, scheduler_->config().killed_at_step);
    }

    Scheduler* scheduler_;
    SlotChecker* checker_;
    int rank_;
    std::unique_ptr<EndedPeers> peers_;  // null: ends are not seen
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
    : scheduler_(num_ranks, config), checker_(scheduler_), has_returned_(static_cast<size_t>(num_ranks), false) {
    for (int rank = 0; rank < num_ranks; ++rank) {
        executors_.push_back(std::make_unique<SimulatedExecutor>(scheduler_, checker_, rank));
    }
}

Simulation::~Simulation() = default;

bool Simulation::has_ended(int rank) const {
    return scheduler_.config().are_processes && (is_killed(rank) || has_returned_[static_cast<size_t>(rank)]);
}

Executor& Simulation::executor(int rank) { return *executors_[static_cast<size_t>(rank)]; }

void Simulation::run(const std::function<void(int)>& body) {
    report_stack_overflows(nullptr);
    const std::function<void(int)> as_process = [&](int rank) {
        const uint64_t delay_ns = scheduler_.random().below(scheduler_.config().max_start_delay_ns + 1);
        scheduler_.sleep(scheduler_.now_ns() + delay_ns);
        struct Return {
            Simulation& simulation;
            int rank;
            ~Return() { simulation.has_returned_[static_cast<size_t>(rank)] = true; }
        } at_the_end{*this, rank};
        if (is_killed(rank)) return;
        body(rank);
        // What it has sent comes before its end is seen.
        scheduler_.sleep(network().last_arrival_ns(rank));
    };
    const std::function<void(int)>& program = scheduler_.config().are_processes ? as_process : body;
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
