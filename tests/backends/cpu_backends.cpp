// SPDX-License-Identifier: Apache-2.0
// Ranks on CPUs: threads, processes, processes without shared memory (hosts), and the simulation.
#include <cstdlib>
#include <thread>

#include "api/simulation.h"
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

ChildReport run_process(ncclComm_t comm, int rank, int num_ranks, const CpuRank::MakeComm& make_comm,
                        const RankProgram& program) {
    std::vector<std::string> failures;
    uint64_t digest = 0;
    PatientClock::start(rank);
    {
        CpuRank context(comm, rank, num_ranks, make_comm);
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
        ranks.push_back(std::make_unique<CpuRank>(
            comms[rank], rank, num_ranks, [&sets](CpuRank& own, size_t index) { return sets.get(index, own.rank()); }));
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

ncclComm_t join_processes(CpuRank& rank, size_t) {
    ncclUniqueId id{};
    if (rank.rank() == 0) RANK_OK(rank, crossdockGetUniqueId(&id));
    std::vector<ncclUniqueId> ids(rank.num_ranks());
    rank.all_gather(&id, ids.data(), sizeof id);
    ncclComm_t comm = nullptr;
    RANK_OK(rank, crossdockCommInitRank(&comm, rank.num_ranks(), ids[0], rank.rank()));
    return rank.keep(comm);
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
        return run_process(comm, rank, num_ranks, join_processes, program);
    });
}

ncclComm_t join_hosts(CpuRank& rank, size_t) {
    char address[32] = {};
    if (rank.rank() == 0) free_address().copy(address, sizeof address - 1);
    std::vector<char> addresses(sizeof address * static_cast<size_t>(rank.num_ranks()));
    rank.all_gather(address, addresses.data(), sizeof address);
    ncclComm_t comm = nullptr;
    RANK_OK(rank, crossdockCommInitHosts(&comm, rank.num_ranks(), rank.rank(), addresses.data()));
    return rank.keep(comm);
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
        return run_process(comm, rank, num_ranks, join_hosts, program);
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
        const auto own = std::make_unique<CpuRank>(comm, rank, shared.num_ranks, nullptr);
        run_guarded(*own, *shared.program);
        gather(*own, shared.report);
    };
    const ncclResult_t result =
        run_simulation_with_fault(spec.fault, num_ranks, &spec.simulation, one_rank, &run, &run.report.num_steps);
    if (result != ncclSuccess) {
        run.report.failures.push_back(
            fmt::format("crossdockRunSimulation answered {}: {}", result_name(result), crossdockGetLastError()));
    }
    return std::move(run.report);
}

}  // namespace

RunReport run_on_cpus(const BackendSpec& spec, int num_ranks, const RankProgram& program) {
    switch (spec.kind) {
        case Backend::kThreads:
            return run_as_threads(num_ranks, program);
        case Backend::kProcesses:
            return run_as_processes(spec, num_ranks, program);
        case Backend::kHosts:
            return run_as_hosts(spec, num_ranks, program);
        case Backend::kSimulation:
            return run_simulated(spec, num_ranks, program);
        case Backend::kCuda:
        case Backend::kCudaProcesses:
            break;
    }
    throw std::logic_error("no backend of CPUs");
}

std::string why_not_on_cpus(Backend kind) { return kind == Backend::kHosts ? why_no_hosts() : ""; }

}  // namespace crossdock::testing
