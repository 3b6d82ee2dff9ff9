// SPDX-License-Identifier: Apache-2.0
#include "fabric/cpu/in_process_communicator.h"

#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "fabric/cpu/joining.h"
#include "fabric/cpu/mailbox.h"
#include "fabric/cpu/registry.h"
#include "runtime/cpu/local_executor.h"
#include "runtime/cpu/simulation.h"
#include "runtime/cpu/zeroed_memory.h"

namespace crossdock::cpu {
namespace {

constexpr size_t kPieceAlignment = 4096;

// Every rank's piece of one symmetric allocation. It lives until the last rank releases it, so memory of a rank that
// fails early stays valid for peers that still write to it.
struct Allocation {
    explicit Allocation(Simulation* owner) : simulation(owner) {}
    ~Allocation() {
        for (const ZeroedMemory& piece : pieces) {
            if (simulation == nullptr) break;
            simulation->network().forget(piece.data(), piece.bytes());
            simulation->garbage().forget(piece.data());
        }
    }
    Allocation(const Allocation&) = delete;
    Allocation& operator=(const Allocation&) = delete;

    Simulation* simulation;
    std::vector<ZeroedMemory> pieces;
};

// State that the ranks of one communicator share.
struct SharedState {
    // simulation: null with the threads backend.
    SharedState(int num_ranks, Simulation* of_simulation)
        : control_memory(ControlSegment::bytes(num_ranks), kPieceAlignment), simulation(of_simulation) {}

    // The number-th symmetric allocation, created by the first rank that calls this.
    std::shared_ptr<Allocation> allocation(uint64_t number, int num_ranks, size_t bytes) {
        const std::lock_guard lock(mutex);
        std::erase_if(allocations, [](const auto& entry) { return entry.second.expired(); });
        auto& entry = allocations[number];
        auto allocation = entry.lock();
        if (allocation == nullptr) {
            allocation = std::make_shared<Allocation>(simulation);
            for (int rank = 0; rank < num_ranks; ++rank) {
                const ZeroedMemory& piece = allocation->pieces.emplace_back(bytes, kPieceAlignment);
                if (simulation == nullptr) continue;
                simulation->checker().memory_is_new(piece.data());
                simulation->garbage().reach(rank, piece.data(), bytes);
            }
            entry = allocation;
        }
        return allocation;
    }

    ZeroedMemory control_memory;
    Simulation* simulation;
    std::mutex mutex;
    std::map<uint64_t, std::weak_ptr<Allocation>> allocations;
};

class PeerTable final : public SymmetricMemory {
  public:
    PeerTable(std::vector<std::byte*> addresses, int rank, size_t num_bytes, std::shared_ptr<Allocation> allocation)
        : addresses_(std::move(addresses)), allocation_(std::move(allocation)) {
        local = addresses_[static_cast<size_t>(rank)];
        bytes = num_bytes;
        peers.table = addresses_.data();
    }

  private:
    std::vector<std::byte*> addresses_;
    std::shared_ptr<Allocation> allocation_;  // null: the user's memory
};

std::shared_ptr<ControlSegment> control_of(const std::shared_ptr<SharedState>& shared) {
    return {shared, reinterpret_cast<ControlSegment*>(shared->control_memory.data())};
}

class InProcessCommunicator final : public CpuCommunicator {
  public:
    InProcessCommunicator(const BackendTraits& backend, int rank, int num_ranks, std::shared_ptr<SharedState> shared,
                          std::shared_ptr<Executor> executor)
        : CpuCommunicator(backend, rank, num_ranks, std::make_unique<MailboxExchange>(control_of(shared), rank),
                          std::move(executor)),
          shared_(std::move(shared)) {}
    // Kernels' waits end when the peer has ended, as between processes. executor: this communicator's.
    void watch_peers(Executor& executor) { executor.watch_peers(num_ranks(), *this); }

    std::string why_gone(int rank) override {
        const bool has_ended = shared_->simulation != nullptr && shared_->simulation->has_ended(rank);
        return has_ended ? "its process has ended" : "";
    }

    std::unique_ptr<SymmetricMemory> allocate_symmetric(size_t bytes, uint64_t timeout_ns) override {
        // Simulated ranks touch little of their memory.
        if (shared_->simulation == nullptr) expect_room(bytes);
        auto allocation = shared_->allocation(++num_allocations_, num_ranks(), bytes);
        std::vector<uint64_t> sizes(static_cast<size_t>(num_ranks()));
        const uint64_t own_size = bytes;
        all_gather(&own_size, sizes.data(), sizeof(uint64_t), "symmetric allocation", timeout_ns);
        require_same_size(sizes, "symmetric allocation");
        std::vector<std::byte*> addresses;
        for (const ZeroedMemory& piece : allocation->pieces) addresses.push_back(piece.data());
        return std::make_unique<PeerTable>(std::move(addresses), rank(), bytes, std::move(allocation));
    }

    bool is_killed() const override { return shared_->simulation != nullptr && shared_->simulation->is_killed(rank()); }

  protected:
    std::unique_ptr<SymmetricMemory> map_window(void* memory, size_t bytes, uint64_t timeout_ns) override {
        struct Offer {
            std::byte* memory;
            uint64_t bytes;
        };
        const Offer own{static_cast<std::byte*>(memory), bytes};
        std::vector<Offer> offers(static_cast<size_t>(num_ranks()));
        all_gather(&own, offers.data(), sizeof(Offer), "window registration", timeout_ns);
        std::vector<std::byte*> addresses;
        std::vector<uint64_t> sizes;
        for (const Offer& offer : offers) {
            addresses.push_back(offer.memory);
            sizes.push_back(offer.bytes);
        }
        require_same_size(sizes, "window registration");
        return std::make_unique<PeerTable>(std::move(addresses), rank(), bytes, nullptr);
    }

  private:
    std::shared_ptr<SharedState> shared_;
    uint64_t num_allocations_ = 0;
};

// The ranks of a simulation as processes.
class SimulatedProcesses final : public JoiningProcesses {
  public:
    SimulatedProcesses(const Simulation& simulation, int rank) : simulation_(simulation), rank_(rank) {}
    uint64_t own() override { return static_cast<uint64_t>(rank_) + 1; }
    bool has_ended(uint64_t process) override { return simulation_.has_ended(static_cast<int>(process) - 1); }
    int64_t name(uint64_t process) override { return static_cast<int64_t>(process); }

  private:
    const Simulation& simulation_;
    int rank_;
};

}  // namespace

std::vector<std::shared_ptr<CpuCommunicator>> make_thread_communicators(int num_ranks) {
    auto shared = std::make_shared<SharedState>(num_ranks, nullptr);
    auto executor = std::make_shared<LocalExecutor>(num_ranks);
    std::vector<std::shared_ptr<CpuCommunicator>> communicators;
    for (int rank = 0; rank < num_ranks; ++rank) {
        communicators.push_back(
            std::make_shared<InProcessCommunicator>(kThreadsBackend, rank, num_ranks, shared, executor));
    }
    return communicators;
}

SimulationRun run_simulation(int num_ranks, const SimulationConfig& config,
                             const std::function<void(ncclComm_t, int)>& program) {
    auto simulation = std::make_shared<Simulation>(num_ranks, config);
    auto shared = std::make_shared<SharedState>(num_ranks, simulation.get());
    std::vector<ncclComm_t> handles;
    struct Withdrawal {
        std::vector<ncclComm_t>& handles;
        ~Withdrawal() {
            for (ncclComm_t handle : handles) withdraw(handle);
        }
    } withdrawal{handles};
    for (int rank = 0; rank < num_ranks; ++rank) {
        // A group that outlives the run keeps the simulation alive through its executor.
        std::shared_ptr<Executor> executor(simulation, &simulation->executor(rank));
        auto communicator =
            std::make_shared<InProcessCommunicator>(kSimulationBackend, rank, num_ranks, shared, executor);
        if (config.are_processes) communicator->watch_peers(*executor);
        handles.push_back(publish(std::move(communicator)));
    }
    const auto joins = [&](int rank) {
        SimulatedProcesses processes(*simulation, rank);
        try {
            join(*control_of(shared), num_ranks, rank, processes, simulation->executor(rank), join_timeout_ns());
            return true;
        } catch (const Error& error) {
            report_failure(error.code(), error.what());
            return false;
        }
    };
    simulation->run([&](int rank) {
        const bool has_joined = !config.are_processes || joins(rank);
        program(has_joined ? handles[static_cast<size_t>(rank)] : nullptr, rank);
    });
    return {simulation->num_steps(), simulation->trace_hash()};
}

}  // namespace crossdock::cpu
