// SPDX-License-Identifier: Apache-2.0
// What the programs of this folder share: run once per rank, and buffers that are windows. Without options ranks are
// threads, each with a GPU of its own under nvcc. On CPUs:
//   --ranks N         so many ranks (4)
//   --backend NAME    threads, processes, or hosts: processes that share no memory, or only with their neighbour
//                     where they are even in number and more than two
//   --processes       the same as --backend processes
//   --seed S          the simulator, with this seed
//   --seeds N         ... and the N - 1 after it
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

// What a program needs on each rank: zeroed memory that is registered as a window, and a device communicator.
struct Session {
    void* memory = nullptr;
    ncclWindow_t window = nullptr;
    ncclDevComm comm;
    bool open(const Rank& self, size_t bytes, const ncclDevCommRequirements& reqs) {
        CHECK(ncclMemAlloc(&memory, bytes));
        // Before the collective calls: after them a peer may already write here.
        if (cudaMemset(memory, 0, bytes) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) return false;
        CHECK(ncclCommWindowRegister(self.comm, memory, bytes, &window, NCCL_WIN_DEFAULT));
        CHECK(ncclDevCommCreate(self.comm, &reqs, &comm));
        return true;
    }
    bool close(const Rank& self) {
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

#if defined(__CUDACC__)

// All ranks have come here.
inline bool meet_on_host(const Rank& self) {
    void* word = nullptr;
    if (cudaMalloc(&word, sizeof(int)) != cudaSuccess) return false;
    CHECK(ncclAllReduce(word, word, 1, ncclInt, ncclSum, self.comm, nullptr));
    return cudaStreamSynchronize(nullptr) == cudaSuccess && cudaFree(word) == cudaSuccess;
}

inline int run_ranks(int argc, char** argv, Program program) {
    int num_ranks = 0;
    if (cudaGetDeviceCount(&num_ranks) != cudaSuccess || num_ranks == 0) return 77;
    if (argc == 3 && std::strcmp(argv[1], "--ranks") == 0) num_ranks = std::atoi(argv[2]);
    std::vector<ncclComm_t> comms(static_cast<size_t>(num_ranks));
    if (ncclCommInitAll(comms.data(), num_ranks, nullptr) != ncclSuccess) return 1;
    std::vector<std::thread> threads;
    std::vector<char> passed(comms.size());
    for (int rank = 0; rank < num_ranks; ++rank) {
        threads.emplace_back([&, rank] {
            const auto i = static_cast<size_t>(rank);
            passed[i] = cudaSetDevice(rank) == cudaSuccess && program({comms[i], rank, num_ranks});
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const char each : passed) {
        if (!each) return 1;
    }
    return 0;
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
    crossdockDeterministicConfig_t config = CROSSDOCK_DETERMINISTIC_CONFIG_INIT;
    config.seed = seed;
    CHECK(crossdockRunDeterministic(
        num_ranks, &config,
        [](ncclComm_t comm, int rank, void* context) {
            Run& its_run = *static_cast<Run*>(context);
            its_run.num_passed += its_run.program({comm, rank, its_run.num_ranks});
        },
        &run, nullptr));
    return run.num_passed == num_ranks;
}

inline int run_ranks(int argc, char** argv, Program program) {
    int num_ranks = 4;
    std::string backend = "threads";
    bool simulate = false;
    uint64_t seed = 0;
    uint64_t num_seeds = 1;
    for (int i = 1; i < argc; ++i) {
        const std::string option = argv[i];
        const char* value = i + 1 < argc ? argv[i + 1] : "";
        if (option == "--ranks") num_ranks = std::atoi(value), ++i;
        if (option == "--backend") backend = value, ++i;
        if (option == "--processes") backend = "processes";
        if (option == "--seed") simulate = true, seed = std::strtoull(value, nullptr, 10), ++i;
        if (option == "--seeds") simulate = true, num_seeds = std::strtoull(value, nullptr, 10), ++i;
    }
    if (!simulate && backend == "hosts") return run_hosts(num_ranks, program) ? 0 : 1;
    if (!simulate) return (backend == "processes" ? run_processes : run_threads)(num_ranks, program) ? 0 : 1;
    for (uint64_t i = 0; i < num_seeds; ++i) {
        if (!run_seed(num_ranks, seed + i, program)) return 1;
    }
    return 0;
}

#endif
