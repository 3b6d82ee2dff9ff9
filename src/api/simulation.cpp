// SPDX-License-Identifier: Apache-2.0
#include "api/simulation.h"

#include "core/boundary.h"
#include "fabric/cpu/in_process_communicator.h"
#include "runtime/cpu/executor.h"

namespace crossdock {
namespace {

cpu::SimulationConfig checked_config(const crossdockSimulationConfig_t& config, int num_ranks) {
    require(config.size == sizeof(config) && config.magic == NCCL_EP_MAGIC, ncclInvalidArgument,
            "config has size {} and magic {:#x}, expected {} and {:#x} (start from CROSSDOCK_SIMULATION_CONFIG_INIT)",
            config.size, config.magic, sizeof(config), NCCL_EP_MAGIC);
    require(config.killed_rank >= -1 && config.killed_rank < num_ranks, ncclInvalidArgument,
            "config->killed_rank is {}, allowed: -1..{}", config.killed_rank, num_ranks - 1);
    require(config.cut_rank >= -1 && config.cut_rank < num_ranks, ncclInvalidArgument,
            "config->cut_rank is {}, allowed: -1..{}", config.cut_rank, num_ranks - 1);
    require(config.are_processes == 0 || config.are_processes == 1, ncclInvalidArgument,
            "config->are_processes is {}, allowed: 0, 1", config.are_processes);
    cpu::SimulationConfig checked;
    checked.are_processes = config.are_processes == 1;
    if (config.max_start_delay_ns != 0) checked.max_start_delay_ns = config.max_start_delay_ns;
    checked.seed = config.seed;
    if (config.max_copy_delay_ns != 0) checked.max_copy_delay_ns = config.max_copy_delay_ns;
    checked.killed_rank = config.killed_rank;
    checked.killed_at_step = config.killed_at_step;
    checked.network.cut_rank = config.cut_rank;
    checked.network.cut_at_step = config.cut_at_step;
    if (config.max_put_delay_ns != 0) checked.network.max_delay_ns = config.max_put_delay_ns;
    if (config.put_ns_per_kib != 0) checked.network.ns_per_kib = config.put_ns_per_kib;
    return checked;
}

cpu::Scheduler& scheduler_of(ncclComm_t comm) {
    cpu::Executor* const executor = communicator_of(comm)->runtime().cpu_executor();
    require(executor != nullptr && executor->scheduler() != nullptr, ncclInvalidUsage,
            "the communicator is not one of a simulation");
    return *executor->scheduler();
}

}  // namespace

struct SimulatedTask::State {
    cpu::Scheduler& scheduler;
    std::function<void()> body;
    cpu::Task* task = nullptr;
    cpu::Task* joining = nullptr;
    bool has_ended = false;

    State(cpu::Scheduler& of, std::function<void()> what) : scheduler(of), body(std::move(what)) {}

    static void run(void* self) {
        struct End {
            State& state;
            ~End() {
                state.has_ended = true;
                if (state.joining != nullptr) state.scheduler.wake(*state.joining);
            }
        } end{*static_cast<State*>(self)};
        end.state.body();
    }
};

SimulatedTask::SimulatedTask(ncclComm_t comm, std::function<void()> body)
    : state_(std::make_unique<State>(scheduler_of(comm), std::move(body))) {
    cpu::Scheduler& scheduler = state_->scheduler;
    scheduler.reserve(1, cpu::kProgramStackBytes);
    state_->task = &scheduler.spawn(scheduler.current().rank, cpu::kProgramStackBytes, &State::run, state_.get());
}

SimulatedTask::~SimulatedTask() {
    try {
        join();
    } catch (...) {  // only join() passes it on
    }
}

void SimulatedTask::join() {
    if (state_ == nullptr) return;
    const std::unique_ptr<State> state = std::move(state_);
    cpu::Scheduler& scheduler = state->scheduler;
    state->joining = &scheduler.current();
    scheduler.block_until([&] { return state->has_ended; });
    const std::exception_ptr thrown = state->task->fiber.take_exception();
    scheduler.release(*state->task);
    if (thrown != nullptr) std::rethrow_exception(thrown);
}

void SimulatedTask::pause(ncclComm_t comm) { scheduler_of(comm).poll(UINT64_MAX); }
void SimulatedTask::yield(ncclComm_t comm) { scheduler_of(comm).yield(); }

ncclResult_t run_simulation_with_fault(cpu::Fault fault, int num_ranks, const crossdockSimulationConfig_t* config,
                                       crossdockRankProgram_t program, void* context, uint64_t* num_steps) {
    return boundary([&] {
        cpu::require_num_ranks(num_ranks);
        require(program != nullptr, ncclInvalidArgument, "program is NULL");
        cpu::SimulationConfig checked =
            config == nullptr ? cpu::SimulationConfig() : checked_config(*config, num_ranks);
        checked.fault = fault;
        const cpu::SimulationRun run =
            cpu::run_simulation(num_ranks, checked, [&](ncclComm_t comm, int rank) { program(comm, rank, context); });
        if (num_steps != nullptr) *num_steps = run.num_steps;
    });
}

}  // namespace crossdock

ncclResult_t crossdockRunSimulation(int num_ranks, const crossdockSimulationConfig_t* config,
                                    crossdockRankProgram_t program, void* context, uint64_t* num_steps) {
    return crossdock::run_simulation_with_fault(crossdock::cpu::Fault::kNone, num_ranks, config, program, context,
                                                num_steps);
}
