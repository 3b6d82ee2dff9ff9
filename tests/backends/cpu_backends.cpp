// SPDX-License-Identifier: Apache-2.0
// Ranks on CPUs: threads, processes, processes without shared memory (hosts), and the simulation.
#include <cstdlib>
#include <thread>

#include "cpu_rank.h"
#include "host_network.h"
#include "internal.h"
#include "patient_clock.h"

namespace crossdock::testing {
namespace {

void gather(const RankContext& context, RunReport& report) {
    report.failures.insert(report.failures.end(), context.failures().begin(), context.failures().end());
    report.digests[context.rank()] = context.digest();
}

ChildReport run_process(Backend backend, ncclComm_t comm, int rank, int num_ranks, const RankProgram& program) {
    std::vector<std::string> failures;
    uint64_t digest = 0;
    PatientClock::start(rank);
    {
        CpuRank context(backend, comm, rank, num_ranks, nullptr);
        run_guarded(context, program);
        failures = context.failures();
        digest = context.digest();
    }
    if (crossdockCommDestroy(comm) != ncclSuccess) {
        failures.push_back(fmt::format("rank {}: crossdockCommDestroy: {}", rank, crossdockGetLastError()));
    }
    PatientClock::end(rank);
    return {failures, digest};
}

}  // namespace

RunReport run_as_threads(int num_ranks, const RankProgram& program) {
    RunReport report;
    report.digests.resize(num_ranks);
    std::vector<ncclComm_t> comms(num_ranks);
    if (crossdockCommInitAll(comms.data(), num_ranks) != ncclSuccess) {
        report.failures.push_back(fmt::format("crossdockCommInitAll: {}", crossdockGetLastError()));
        return report;
    }
    CommunicatorSets sets(num_ranks);
    std::vector<std::unique_ptr<CpuRank>> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {
        ranks.push_back(std::make_unique<CpuRank>(Backend::kThreads, comms[rank], rank, num_ranks, &sets));
    }
    const PatientClock clock(num_ranks);
    std::vector<std::thread> threads;
    for (const auto& rank : ranks) {
        threads.emplace_back([&program, &rank] {
            PatientClock::start(rank->rank());
            run_guarded(*rank, program);
            PatientClock::end(rank->rank());
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& rank : ranks) gather(*rank, report);
    for (const ncclComm_t comm : comms) {
        if (crossdockCommDestroy(comm) == ncclSuccess) continue;
        report.failures.push_back(fmt::format("crossdockCommDestroy: {}", crossdockGetLastError()));
    }
    return report;
}

RunReport run_as_processes(const BackendSpec& spec, int num_ranks, const RankProgram& program) {
    ncclUniqueId id{};
    if (crossdockGetUniqueId(&id) != ncclSuccess) {
        return {.failures = {fmt::format("crossdockGetUniqueId: {}", crossdockGetLastError())}, .digests = {}};
    }
    const PatientClock clock(num_ranks);
    return fork_ranks(spec, num_ranks, [&](int rank) -> ChildReport {
        ncclComm_t comm = nullptr;
        if (crossdockCommInitRank(&comm, num_ranks, id, rank) != ncclSuccess) {
            return {{fmt::format("rank {}: crossdockCommInitRank: {}", rank, crossdockGetLastError())}, 0};
        }
        return run_process(Backend::kProcesses, comm, rank, num_ranks, program);
    });
}

RunReport run_as_hosts(const BackendSpec& spec, int num_ranks, const RankProgram& program) {
    const std::string address = spec.network != nullptr ? spec.network->address() : free_address();
    const int ranks_per_host = spec.ranks_per_host > 0 ? spec.ranks_per_host : num_ranks;
    const PatientClock clock(num_ranks);
    return fork_ranks(spec, num_ranks, [&](int rank) -> ChildReport {
        const int host = rank / ranks_per_host;
        if (spec.network != nullptr) {
            spec.network->enter(host);
        } else {
            setenv("CROSSDOCK_HOST", fmt::format("host{}", host).c_str(), 1);
        }
        ncclComm_t comm = nullptr;
        if (crossdockCommInitHosts(&comm, num_ranks, rank, address.c_str()) != ncclSuccess) {
            return {{fmt::format("rank {}: crossdockCommInitHosts: {}", rank, crossdockGetLastError())}, 0};
        }
        return run_process(Backend::kHosts, comm, rank, num_ranks, program);
    });
}

// Asked in a process of its own: what the answer opens must not be forked with ranks.
std::string why_no_hosts() {
    const std::string address = free_address();
    const RunReport report = fork_ranks({}, 1, [&](int) -> ChildReport {
        ncclComm_t comm = nullptr;
        if (crossdockCommInitHosts(&comm, 1, 0, address.c_str()) != ncclSuccess) return {{crossdockGetLastError()}, 0};
        crossdockCommDestroy(comm);
        return {};
    });
    return report.ok() ? "" : report.failures.front();
}

RunReport run_simulated(const BackendSpec& spec, int num_ranks, const RankProgram& program) {
    struct Run {
        RunReport report;
        const RankProgram* program;
        int num_ranks;
    };
    Run run{{}, &program, num_ranks};
    run.report.digests.resize(num_ranks);
    const crossdockRankProgram_t one_rank = [](ncclComm_t comm, int rank, void* context) {
        Run& shared = *static_cast<Run*>(context);
        // On the heap: a fiber's stack is small.
        const auto own = std::make_unique<CpuRank>(Backend::kSimulation, comm, rank, shared.num_ranks, nullptr);
        run_guarded(*own, *shared.program);
        gather(*own, shared.report);
    };
    const ncclResult_t result =
        crossdockRunSimulation(num_ranks, &spec.simulation, one_rank, &run, &run.report.num_steps);
    if (result != ncclSuccess) {
        run.report.failures.push_back(
            fmt::format("crossdockRunSimulation answered {}: {}", result_name(result), crossdockGetLastError()));
    }
    return std::move(run.report);
}

}  // namespace crossdock::testing
