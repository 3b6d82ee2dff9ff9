// SPDX-License-Identifier: Apache-2.0
// What the programs of this folder share: run once per rank, and buffers that are windows. Without options ranks are
// threads. Under nvcc they share the GPUs that are there.
// --help lists the options.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "crossdock/device/kernel.hpp"

#define CHECK(call)                                                                             \
    do {                                                                                        \
        const ncclResult_t result = (call);                                                     \
        if (result != ncclSuccess) {                                                            \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, ncclGetLastError(nullptr)); \
            return false;                                                                       \
        }                                                                                       \
    } while (false)

struct Rank {
    ncclComm_t comm;
    int rank, num_ranks;
};

// All ranks have come here.
bool meet_on_host(const Rank& self);

// What a program needs on each rank: zeroed memory that is registered as a window, a device communicator, and zeroed
// memory of the rank's own.
struct Session {
    void* memory = nullptr;
    ncclWindow_t window = nullptr;
    ncclDevComm comm;
    void* own = nullptr;
    bool open(const Rank& self, size_t bytes, const ncclDevCommRequirements& reqs, size_t own_bytes = 8) {
        // All of it before the collective calls: after them a peer may already write here, and while its kernel waits
        // for this rank, CUDA may not allocate.
        CHECK(ncclMemAlloc(&memory, bytes));
        if (cudaMalloc(&own, own_bytes) != cudaSuccess || cudaMemset(own, 0, own_bytes) != cudaSuccess ||
            cudaMemset(memory, 0, bytes) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) {
            return false;
        }
        CHECK(ncclCommWindowRegister(self.comm, memory, bytes, &window, NCCL_WIN_DEFAULT));
        CHECK(ncclDevCommCreate(self.comm, &reqs, &comm));
        return true;
    }
    bool close(const Rank& self) {
        if (!meet_on_host(self)) return false;
        cudaFree(own);
        CHECK(ncclDevCommDestroy(self.comm, &comm));
        CHECK(ncclCommWindowDeregister(self.comm, window));
        CHECK(ncclMemFree(memory));
        return true;
    }
};

template <typename T>
bool upload(void* memory, const std::vector<T>& values) {
    return cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess;
}
template <typename T>
std::vector<T> download(const void* memory, size_t count) {
    std::vector<T> values(count);
    if (cudaMemcpy(values.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost) != cudaSuccess) values.clear();
    return values;
}

using Program = bool (*)(const Rank&);

// Numbers of ranks that a program runs with.
struct RankLimits {
    int least = 1;
    int most = 64;
    int usual = 4;
};

struct Options {
    int num_ranks;
    std::string backend = "threads";
    bool simulate = false;
    uint64_t seed = 0;
    uint64_t num_seeds = 1;
};

inline void print_help(const char* program, RankLimits limits) {
    std::printf("%s [OPTIONS]: a kernel against NCCL's Device API, on every rank; checks its results\n\n", program);
    if (limits.least == limits.most) {
        std::printf("  --ranks N         number of ranks; this program runs with %d\n", limits.usual);
    } else {
        std::printf("  --ranks N         number of ranks, %d..%d (%d)\n", limits.least, limits.most, limits.usual);
    }
#if !defined(__CUDACC__)
    std::printf(
        "  --backend NAME    threads, processes, or hosts: processes without shared memory; of an even number of more\n"
        "                    than two ranks each two share memory (threads)\n"
        "  --processes       the same as --backend processes\n"
        "  --seed S          run in the simulator, with seed S\n"
        "  --seeds N         run in the simulator, with N seeds from S on (S: 0)\n");
#endif
}

// The program ends here after --help, and with status 2 after an option that it does not know.
inline Options parse(int argc, char** argv, RankLimits limits) {
    const auto refuse = [&](const std::string& message) {
        std::fprintf(stderr, "%s: %s; --help lists the options\n", argv[0], message.c_str());
        std::exit(2);
    };
    Options options{limits.usual};
    for (int i = 1; i < argc; ++i) {
        const std::string option = argv[i];
        const auto value = [&]() -> std::string {
            if (i + 1 == argc) refuse(option + " needs a value");
            return argv[++i];
        };
        const auto number = [&](uint64_t least, uint64_t most) {
            const std::string text = value();
            char* end = nullptr;
            const uint64_t result = std::strtoull(text.c_str(), &end, 10);
            if (text.empty() || text[0] < '0' || text[0] > '9' || *end != '\0' || result < least || result > most) {
                refuse(option + " is '" + text + "', allowed: " + std::to_string(least) + ".." + std::to_string(most));
            }
            return result;
        };
        if (option == "--help" || option == "-h") {
            print_help(argv[0], limits);
            std::exit(0);
        } else if (option == "--ranks") {
            options.num_ranks =
                static_cast<int>(number(static_cast<uint64_t>(limits.least), static_cast<uint64_t>(limits.most)));
#if !defined(__CUDACC__)
        } else if (option == "--backend") {
            options.backend = value();
            if (options.backend != "threads" && options.backend != "processes" && options.backend != "hosts") {
                refuse("--backend is '" + options.backend + "', allowed: threads, processes, hosts");
            }
        } else if (option == "--processes") {
            options.backend = "processes";
        } else if (option == "--seed") {
            options.simulate = true;
            options.seed = number(0, UINT64_MAX);
        } else if (option == "--seeds") {
            options.simulate = true;
            options.num_seeds = number(1, UINT32_MAX);
#endif
        } else {
            refuse("there is no option '" + option + "'");
        }
    }
    return options;
}

inline int report(const char* program, int num_ranks, const char* how, bool passed) {
    const char* slash = std::strrchr(program, '/');
    std::printf("%s, %d ranks, %s: %s\n", slash == nullptr ? program : slash + 1, num_ranks, how,
                passed ? "the results are right" : "FAILED");
    return passed ? 0 : 1;
}

#if defined(__CUDACC__)

#include <barrier>

inline std::barrier<>* all_ranks = nullptr;

inline bool meet_on_host(const Rank&) {
    all_ranks->arrive_and_wait();
    return true;
}

// Compiled with --default-stream per-thread: each rank has a stream of its own.
inline int run_ranks(int argc, char** argv, Program program, RankLimits limits = {}) {
    const int num_ranks = parse(argc, argv, limits).num_ranks;
    // Nothing is loaded or allocated while kernels wait for each other.
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    int num_devices = 0;
    if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) {
        std::printf("no GPU: nothing was run\n");
        return 77;
    }
    std::barrier<> meeting(num_ranks);
    all_ranks = &meeting;
    ncclUniqueId id;
    if (ncclGetUniqueId(&id) != ncclSuccess) return report(argv[0], num_ranks, "GPU", false);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) {
        threads.emplace_back([&, rank] {
            ncclComm_t comm = nullptr;
            const bool joined = cudaSetDevice(rank % num_devices) == cudaSuccess &&
                                ncclCommInitRank(&comm, num_ranks, id, rank) == ncclSuccess;
            if (!joined || !program({comm, rank, num_ranks}) || ncclCommDestroy(comm) != ncclSuccess) {
                std::fprintf(stderr, "rank %d: %s; %s\n", rank, ncclGetLastError(comm),
                             cudaGetErrorString(cudaGetLastError()));
                report(argv[0], num_ranks, "GPU", false);
                std::fflush(nullptr);
                std::_Exit(1);  // the others wait for this one
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    return report(argv[0], num_ranks, "GPU", true);
}

#else

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

inline bool meet_on_host(const Rank& self) {
    CHECK(crossdockCommBarrier(self.comm));
    return true;
}

inline bool run_threads(int num_ranks, Program program) {
    std::vector<ncclComm_t> comms(static_cast<size_t>(num_ranks));
    CHECK(crossdockCommInitAll(comms.data(), num_ranks));
    std::vector<std::thread> threads;
    std::vector<char> passed(comms.size());
    for (int rank = 0; rank < num_ranks; ++rank) {
        const auto i = static_cast<size_t>(rank);
        threads.emplace_back([&, rank, i] { passed[i] = program({comms[i], rank, num_ranks}); });
    }
    for (std::thread& thread : threads) thread.join();
    bool all_passed = true;
    for (size_t i = 0; i < comms.size(); ++i) {
        all_passed = all_passed && passed[i];
        CHECK(crossdockCommDestroy(comms[i]));
    }
    return all_passed;
}

// join(comm, rank) makes the communicator in each rank's process.
template <typename Join>
bool run_in_processes(int num_ranks, Program program, Join join) {
    std::vector<pid_t> children;
    for (int rank = 0; rank < num_ranks; ++rank) {
        const pid_t child = fork();
        if (child == 0) {
            ncclComm_t comm;
            const bool joined = join(&comm, rank) == ncclSuccess;
            if (!joined) std::fprintf(stderr, "%s\n", ncclGetLastError(nullptr));
            const bool passed = joined && program({comm, rank, num_ranks});
            std::fflush(nullptr);
            _exit(passed && crossdockCommDestroy(comm) == ncclSuccess ? 0 : 1);
        }
        children.push_back(child);
    }
    bool all_passed = true;
    for (const pid_t child : children) {
        int status = 0;
        all_passed = waitpid(child, &status, 0) == child && status == 0 && all_passed;
    }
    return all_passed;
}

inline bool run_processes(int num_ranks, Program program) {
    ncclUniqueId id;
    CHECK(crossdockGetUniqueId(&id));
    return run_in_processes(num_ranks, program, [&](ncclComm_t* comm, int rank) {
        return crossdockCommInitRank(comm, num_ranks, id, rank);
    });
}

// CROSSDOCK_HOST makes processes of one machine play hosts.
inline bool run_hosts(int num_ranks, Program program) {
    // A port that is free now.
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(address);
    const int socket_fd = socket(AF_INET, SOCK_STREAM, 0);
    const bool found = bind(socket_fd, reinterpret_cast<sockaddr*>(&address), bytes) == 0 &&
                       getsockname(socket_fd, reinterpret_cast<sockaddr*>(&address), &bytes) == 0;
    close(socket_fd);
    if (!found) return false;
    const std::string first = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
    const int ranks_per_host = num_ranks > 2 && num_ranks % 2 == 0 ? 2 : 1;
    return run_in_processes(num_ranks, program, [&](ncclComm_t* comm, int rank) {
        setenv("CROSSDOCK_HOST", ("host" + std::to_string(rank / ranks_per_host)).c_str(), 1);
        return crossdockCommInitHosts(comm, num_ranks, rank, first.c_str());
    });
}

inline bool run_seed(int num_ranks, uint64_t seed, Program program) {
    struct Run {
        Program program;
        int num_ranks;
        int num_passed;
    } run{program, num_ranks, 0};
    crossdockSimulationConfig_t config = CROSSDOCK_SIMULATION_CONFIG_INIT;
    config.seed = seed;
    CHECK(crossdockRunSimulation(
        num_ranks, &config,
        [](ncclComm_t comm, int rank, void* context) {
            Run& its_run = *static_cast<Run*>(context);
            its_run.num_passed += its_run.program({comm, rank, its_run.num_ranks});
        },
        &run, nullptr));
    return run.num_passed == num_ranks;
}

inline int run_ranks(int argc, char** argv, Program program, RankLimits limits = {}) {
    const Options options = parse(argc, argv, limits);
    if (!options.simulate) {
        const auto run = options.backend == "hosts"       ? run_hosts
                         : options.backend == "processes" ? run_processes
                                                          : run_threads;
        return report(argv[0], options.num_ranks, options.backend.c_str(), run(options.num_ranks, program));
    }
    bool passed = true;
    for (uint64_t i = 0; i < options.num_seeds && passed; ++i) {
        passed = run_seed(options.num_ranks, options.seed + i, program);
    }
    const std::string how = "simulated, " + std::to_string(options.num_seeds) + " seeds";
    return report(argv[0], options.num_ranks, how.c_str(), passed);
}

#endif
