// SPDX-License-Identifier: Apache-2.0
// Runs a kernel's program over ranks that are processes, of one host or of several, and posts directly or by the proxy.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "run.h"
#include "tools/common/processes.h"

struct Way {
    const char* backend;   // threads, processes, hosts
    const char* gin_type;  // of NCCL_GIN_TYPE
    std::string name() const { return backend + std::string(*gin_type == '2' ? "_proxy" : "_direct"); }
};
inline const Way kWays[] = {
    {"threads", "4"}, {"threads", "2"}, {"processes", "4"}, {"processes", "2"},
#if defined(DEVICE_API_HAS_HOSTS)
    {"hosts", "4"},   {"hosts", "2"},
#endif
};

struct GinType {
    explicit GinType(const char* type) { setenv("NCCL_GIN_TYPE", type, 1); }
    ~GinType() { unsetenv("NCCL_GIN_TYPE"); }
};

// join(comm, rank) makes the communicator in each rank's process. The ranks' failures.
template <typename Join>
std::string in_processes(const Setup& setup, const Body& body, Join join) {
    crossdock::Processes processes;
    for (int rank = 0; rank < setup.ranks; ++rank) {
        processes.start([&] {
            ncclComm_t comm = nullptr;
            std::string failure;
            if (join(&comm, rank) != ncclSuccess) failure = crossdockGetLastError();
            if (failure.empty()) failure = run_rank(setup, {comm, rank, setup.ranks}, body);
            if (failure.empty() && crossdockCommDestroy(comm) != ncclSuccess) failure = crossdockGetLastError();
            return failure;
        });
    }
    processes.wait();
    std::string all;
    for (size_t rank = 0; rank < static_cast<size_t>(setup.ranks); ++rank) {
        std::string failure = processes.report(rank);
        if (failure.empty()) failure = processes.how_it_ended(rank);
        if (!failure.empty()) all += (all.empty() ? "" : "; ") + failure;
    }
    return all;
}

inline std::string on_processes(const Setup& setup, const Body& body) {
    const LsaTeam team(setup.lsa_team);
    ncclUniqueId id;
    if (crossdockGetUniqueId(&id) != ncclSuccess) return crossdockGetLastError();
    return in_processes(setup, body,
                        [&](ncclComm_t* comm, int rank) { return crossdockCommInitRank(comm, setup.ranks, id, rank); });
}

// A host has setup.lsa_team ranks, or one.
inline std::string on_hosts(const Setup& setup, const Body& body) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(address);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    const bool is_bound = bind(fd, reinterpret_cast<sockaddr*>(&address), bytes) == 0 &&
                          getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes) == 0;
    close(fd);
    if (!is_bound) return "no free port";
    const std::string first = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
    const int ranks_per_host = std::max(setup.lsa_team, 1);
    return in_processes(setup, body, [&](ncclComm_t* comm, int rank) {
        setenv("CROSSDOCK_HOST", ("host" + std::to_string(rank / ranks_per_host)).c_str(), 1);
        return crossdockCommInitHosts(comm, setup.ranks, rank, first.c_str());
    });
}

inline std::string on(const Way& way, const Setup& setup, const Body& body) {
    const GinType type(way.gin_type);
    const std::string backend = way.backend;
    return (backend == "threads" ? on_threads : backend == "processes" ? on_processes : on_hosts)(setup, body);
}
