// SPDX-License-Identifier: Apache-2.0
// Ranks on GPUs: as threads of this process, whose NCCL communicators are kept from run to run, or as processes. Rank r
// uses device r % number of GPUs, so one GPU is enough.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>

#include "gpu_rank.h"
#include "internal.h"
#include "nccl_library.h"

namespace crossdock::testing {
namespace {

// What several ranks on a GPU need, unless the user has set it otherwise.
void set_environment() {
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
    setenv("NCCL_NVLS_ENABLE", "0", 0);
}

// 0: fine; else the number of what is missing.
int probe() {
    set_environment();
    int num_devices = 0;
    if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) return 1;
    try {
        nccl_library();
    } catch (const std::exception&) {
        return 2;
    }
    return 0;
}

void use_device_of(int rank) {
    int num_devices = 0;
    check_cuda(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
    check_cuda(cudaSetDevice(rank % num_devices), "cudaSetDevice");
}

ncclComm_t join(const ncclUniqueId& id, int rank, int num_ranks) {
    ncclComm_t comm = nullptr;
    const ncclResult_t result = nccl_library().comm_init_rank(&comm, num_ranks, id, rank);
    if (result != ncclSuccess)
        throw std::runtime_error(fmt::format("ncclCommInitRank answered {}", result_name(result)));
    return comm;
}

// Communicators of threads, by number of ranks. They are expensive, so runs share them, until one fails: it may have
// left them in any state.
class CommunicatorCache {
  public:
    // Collective: each rank's thread calls it, with its device current.
    ncclComm_t get(int num_ranks, int index, int rank) {
        ncclUniqueId id{};
        {
            const std::lock_guard lock(mutex_);
            Set& set = sets_[{num_ranks, index}];
            if (set.comms.empty()) {
                set.comms.resize(num_ranks);
                if (nccl_library().get_unique_id(&set.id) != ncclSuccess)
                    throw std::runtime_error("ncclGetUniqueId failed");
            }
            if (set.comms[rank] != nullptr) return set.comms[rank];
            id = set.id;
        }
        const ncclComm_t comm = join(id, rank, num_ranks);
        const std::lock_guard lock(mutex_);
        return sets_[{num_ranks, index}].comms[rank] = comm;
    }
    void forget() {
        const std::lock_guard lock(mutex_);
        sets_.clear();
    }
    // Of all that are kept. NCCL wants one thread per rank.
    void destroy() {
        const std::lock_guard lock(mutex_);
        for (const auto& [key, set] : sets_) {
            std::vector<std::thread> threads;
            for (const ncclComm_t comm : set.comms) {
                if (comm != nullptr) threads.emplace_back([comm] { nccl_library().comm_destroy(comm); });
            }
            for (std::thread& thread : threads) thread.join();
        }
        sets_.clear();
    }

  private:
    struct Set {
        ncclUniqueId id{};
        std::vector<ncclComm_t> comms;
    };
    std::mutex mutex_;
    std::map<std::pair<int, int>, Set> sets_;
};

CommunicatorCache& kept_communicators() {
    static CommunicatorCache cache;
    return cache;
}

RunReport run_threads(int num_ranks, const RankProgram& program) {
    set_environment();
    CommunicatorCache& cache = kept_communicators();
    RunReport report;
    report.digests.resize(num_ranks);
    std::mutex report_mutex;
    HostExchange exchange(num_ranks);
    const auto one_rank = [&](int rank) {
        std::vector<std::string> failures;
        try {
            use_device_of(rank);
            const auto make_comm = [&](int index) { return cache.get(num_ranks, index, rank); };
            GpuRank context(make_comm(0), rank, num_ranks, false, exchange, make_comm);
            // No rank launches while another one still allocates, here and at the end.
            exchange.barrier();
            run_guarded(context, program);
            failures = context.failures();
            report.digests[rank] = context.digest();
            context.synchronize_all();
            exchange.barrier();
        } catch (const std::exception& error) {
            failures.push_back(fmt::format("rank {}: {}", rank, error.what()));
        }
        const std::lock_guard lock(report_mutex);
        report.failures.insert(report.failures.end(), failures.begin(), failures.end());
    };
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(one_rank, rank);
    for (std::thread& thread : threads) thread.join();
    if (!report.ok()) cache.forget();
    return report;
}

RunReport run_processes(const BackendSpec& spec, int num_ranks, const RankProgram& program) {
    set_environment();
    HostExchange exchange(num_ranks);
    return fork_ranks(spec, num_ranks, [&](int rank) -> ChildReport {
        try {
            use_device_of(rank);
            std::vector<ncclComm_t> comms;
            const auto make_comm = [&](int) {
                ncclUniqueId id{};
                if (rank == 0) nccl_library().get_unique_id(&id);
                std::vector<ncclUniqueId> ids(num_ranks);
                exchange.all_gather(rank, &id, ids.data(), sizeof id);
                comms.push_back(join(ids[0], rank, num_ranks));
                return comms.back();
            };
            ChildReport report;
            {
                GpuRank context(make_comm(0), rank, num_ranks, true, exchange, make_comm);
                exchange.barrier();
                run_guarded(context, program);
                report = {context.failures(), context.digest()};
                context.synchronize_all();
                exchange.barrier();
            }
            for (const ncclComm_t comm : comms) nccl_library().comm_destroy(comm);
            return report;
        } catch (const std::exception& error) {
            return {{fmt::format("rank {}: {}", rank, error.what())}, 0};
        }
    });
}

}  // namespace

std::string why_no_gpu() {
    // Asked in a child: this process may still want to fork ranks, which CUDA does not survive.
    static const int missing = [] {
        const pid_t pid = fork();
        if (pid == 0) _exit(probe());
        int status = 0;
        waitpid(pid, &status, 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
    }();
    switch (missing) {
        case 0:
            return "";
        case 1:
            return "there is no GPU here";
        case 2:
            return "no NCCL was found (libnccl.so.2, or what CROSSDOCK_NCCL_LIBRARY names)";
        default:
            return "asking CUDA for its devices ended in a crash";
    }
}

void free_kept_communicators() { kept_communicators().destroy(); }

RunReport run_on_gpus(const BackendSpec& spec, int num_ranks, const RankProgram& program) {
    return has_processes(spec.kind) ? run_processes(spec, num_ranks, program) : run_threads(num_ranks, program);
}

}  // namespace crossdock::testing
