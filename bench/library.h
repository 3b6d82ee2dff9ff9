// SPDX-License-Identifier: Apache-2.0
// The library under test as a table of functions: the one that is linked in, or any other with the same C API.
#pragma once

#include <string>

#include "crossdock.h"

namespace crossdock::bench {

struct EpLibrary {
    std::string name;
    decltype(&ncclEpGetVersion) get_version;
    decltype(&ncclEpCreateGroup) create_group;
    decltype(&ncclEpGroupDestroy) group_destroy;
    decltype(&ncclEpInitHandle) init_handle;
    decltype(&ncclEpUpdateHandle) update_handle;
    decltype(&ncclEpHandleDestroy) handle_destroy;
    decltype(&ncclEpDispatch) dispatch;
    decltype(&ncclEpCombine) combine;
    decltype(&ncclEpComplete) complete;

    // Crossdock's own; null in other libraries.
    decltype(&crossdockGetLastError) get_last_error;
    decltype(&crossdockCommInitAll) comm_init_all;
    decltype(&crossdockGetUniqueId) get_unique_id;
    decltype(&crossdockCommInitRank) comm_init_rank;
    decltype(&crossdockCommDestroy) comm_destroy;
    decltype(&crossdockMemAlloc) mem_alloc;
    decltype(&crossdockMemFree) mem_free;
    decltype(&crossdockCommWindowRegister) window_register;
    decltype(&crossdockCommWindowDeregister) window_deregister;
    decltype(&crossdockGroupMemory) group_memory;
    decltype(&crossdockCreateGroup) create_group_with_options;
    decltype(&crossdockHandleSetSums) set_sums;
    decltype(&crossdockElasticDispatch) elastic_dispatch;
    decltype(&crossdockElasticCombine) elastic_combine;

    // Throws a message that names the library and the call, with the library's own where it has one.
    void check(ncclResult_t result, const char* call) const;

    // Whether it is one of this project, of whatever version.
    bool is_crossdock() const { return get_last_error != nullptr; }

    // Whether it has communicators for CPUs.
    bool has_cpu_backends() const { return comm_init_all != nullptr; }
};

EpLibrary own_library();

// Opens a library so that none of its symbols meets ours. Throws with a message where it cannot be opened or lacks a
// function.
EpLibrary open_library(const std::string& path);

}  // namespace crossdock::bench
