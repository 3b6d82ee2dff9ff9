// SPDX-License-Identifier: Apache-2.0
// crossdock.h: CPU communicators, their memory and windows.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "core/boundary.h"
#include "crossdock.h"
#include "device_api/device_comm.h"
#include "fabric/cpu/in_process_communicator.h"
#include "fabric/cpu/process_communicator.h"
#include "fabric/cpu/registry.h"
#include "fabric/cpu/rendezvous.h"
#include "fabric/cpu/window_memory.h"
#include "fabric/hosts/communicator.h"
#include "fabric/hosts/launcher.h"
#include "runtime/cpu/machine_memory.h"

namespace crossdock {
namespace {

using cpu::CpuCommunicator;
using cpu::require_num_ranks;

// Takes the pointer as void*, so that it serves every type.
void require_not_null(const void* pointer, const char* name) {
    require(pointer != nullptr, ncclInvalidArgument, "{} is NULL", name);
}

std::shared_ptr<CpuCommunicator> cpu_communicator_of(ncclComm_t comm, const char* use_instead) {
    const auto communicator = communicator_of(comm);
    auto cpu_communicator = std::dynamic_pointer_cast<CpuCommunicator>(communicator);
    require(cpu_communicator != nullptr, ncclInvalidUsage, "comm is an NCCL communicator; use {}", use_instead);
    return cpu_communicator;
}

}  // namespace
}  // namespace crossdock

using namespace crossdock;

ncclResult_t crossdockCommInitAll(ncclComm_t* comms, int num_ranks) {
    return boundary([&] {
        require_not_null(comms, "comms");
        require_num_ranks(num_ranks);
        std::vector<ncclComm_t> handles;
        for (auto& communicator : cpu::make_thread_communicators(num_ranks))
            handles.push_back(cpu::publish(std::move(communicator)));
        std::copy(handles.begin(), handles.end(), comms);
    });
}

ncclResult_t crossdockGetUniqueId(ncclUniqueId* id) {
    return boundary([&] {
        require_not_null(id, "id");
        *id = cpu::make_unique_id();
    });
}

ncclResult_t crossdockReleaseUniqueId(ncclUniqueId id) {
    return boundary([&] { cpu::release_unique_id(id); });
}

ncclResult_t crossdockCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank) {
    return boundary([&] {
        require_not_null(comm, "comm");
        require_num_ranks(num_ranks);
        require(rank >= 0 && rank < num_ranks, ncclInvalidArgument, "rank is {}, allowed: 0..{}", rank, num_ranks - 1);
        *comm = cpu::publish(cpu::join_processes(id, num_ranks, rank));
    });
}

ncclResult_t crossdockCommInitHosts(ncclComm_t* comm, int num_ranks, int rank, const char* address) {
    return boundary([&] {
        require_not_null(comm, "comm");
        require_not_null(address, "address");
        require_num_ranks(num_ranks);
        require(rank >= 0 && rank < num_ranks, ncclInvalidArgument, "rank is {}, allowed: 0..{}", rank, num_ranks - 1);
        const std::string job = hosts::given_job([](const char* name) { return std::getenv(name); });
        *comm = cpu::publish(hosts::join_hosts({rank, num_ranks, address, std::nullopt, "", job}));
    });
}

ncclResult_t crossdockCommInitFromEnvironment(ncclComm_t* comm) {
    return boundary([&] {
        require_not_null(comm, "comm");
        *comm = cpu::publish(hosts::join_hosts(hosts::read_launch([](const char* name) { return std::getenv(name); })));
    });
}

ncclResult_t crossdockCommDestroy(ncclComm_t comm) {
    return boundary([&] {
        cpu_communicator_of(comm, "ncclCommDestroy");
        require(cpu::withdraw(comm), ncclInvalidArgument, "comm is being destroyed by another thread");
    });
}

ncclResult_t crossdockCommUserRank(ncclComm_t comm, int* rank) {
    return boundary([&] {
        require_not_null(rank, "rank");
        *rank = communicator_of(comm)->rank();
    });
}

ncclResult_t crossdockCommCount(ncclComm_t comm, int* num_ranks) {
    return boundary([&] {
        require_not_null(num_ranks, "num_ranks");
        *num_ranks = communicator_of(comm)->num_ranks();
    });
}

ncclResult_t crossdockCommIsCpu(ncclComm_t comm, int* is_cpu) {
    return boundary([&] {
        require_not_null(is_cpu, "is_cpu");
        *is_cpu = communicator_of(comm)->backend().is_cpu ? 1 : 0;
    });
}

ncclResult_t crossdockCommAllGather(ncclComm_t comm, const void* own_bytes, void* all_bytes, size_t bytes) {
    return boundary([&] {
        if (bytes > 0) {
            require_not_null(own_bytes, "own_bytes");
            require_not_null(all_bytes, "all_bytes");
        }
        const auto communicator = cpu_communicator_of(comm, "ncclAllGather");
        // Peers' bytes come in one after the other: outputs are written once all are there.
        const auto num_ranks = static_cast<size_t>(communicator->num_ranks());
        require(bytes <= cpu::machine_memory() / num_ranks, ncclInvalidArgument,
                "bytes is {}, allowed with {} ranks: at most {}, since all of them must fit into the {} bytes that the "
                "machine has for this process",
                bytes, num_ranks, cpu::machine_memory() / num_ranks, cpu::machine_memory());
        std::vector<std::byte> gathered(bytes * num_ranks);
        communicator->all_gather(own_bytes, gathered.data(), bytes, "crossdockCommAllGather", cpu::join_timeout_ns());
        std::copy(gathered.begin(), gathered.end(), static_cast<std::byte*>(all_bytes));
    });
}

ncclResult_t crossdockCommBarrier(ncclComm_t comm) {
    return boundary([&] {
        cpu_communicator_of(comm, "an ncclAllReduce")->barrier("crossdockCommBarrier", cpu::join_timeout_ns());
    });
}

ncclResult_t crossdockMemAlloc(void** memory, size_t size) {
    return boundary([&] {
        require_not_null(memory, "memory");
        require(size > 0, ncclInvalidArgument, "size is 0, allowed: 1 and more");
        *memory = cpu::allocate_window_memory(size);
    });
}

ncclResult_t crossdockMemFree(void* memory) {
    return boundary([&] {
        require(memory == nullptr || cpu::free_window_memory(memory), ncclInvalidArgument,
                "memory {} was not allocated by crossdockMemAlloc, or is freed already", memory);
    });
}

ncclResult_t crossdockCommWindowRegister(ncclComm_t comm, void* memory, size_t size, ncclWindow_t* window, int flags) {
    return boundary([&] {
        require_not_null(memory, "memory");
        require_not_null(window, "window");
        require(size > 0, ncclInvalidArgument, "size is 0, allowed: 1 and more");
        require(flags == 0, ncclInvalidArgument, "flags is {}, expected 0", flags);
        const auto communicator = cpu_communicator_of(comm, "ncclCommWindowRegister");
        *window = communicator->register_window(memory, size, cpu::join_timeout_ns());
    });
}

ncclResult_t crossdockCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    return boundary([&] {
        const auto communicator = cpu_communicator_of(comm, "ncclCommWindowDeregister");
        device_api::drain(*communicator);
        communicator->deregister_window(window, cpu::join_timeout_ns());
    });
}
