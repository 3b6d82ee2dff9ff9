// SPDX-License-Identifier: Apache-2.0
// NCCL, opened at run time, so that a program with CUDA starts on machines without it.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>

#include <string>

namespace crossdock::tools {

struct NcclLibrary {
    decltype(&ncclGetErrorString) get_error_string;
    decltype(&ncclGetVersion) get_version;
    decltype(&ncclGetUniqueId) get_unique_id;
    decltype(&ncclCommInitRank) comm_init_rank;
    decltype(&ncclCommDestroy) comm_destroy;
    decltype(&ncclMemAlloc) mem_alloc;
    decltype(&ncclMemFree) mem_free;
    decltype(&ncclCommWindowRegister) window_register;
    decltype(&ncclCommWindowDeregister) window_deregister;
    decltype(&ncclGetLsaDevicePointer) get_lsa_device_pointer;
    decltype(&ncclCommQueryProperties) comm_query_properties;
};

// Opened at the first call: libnccl.so.2, or what CROSSDOCK_NCCL_LIBRARY names. Throws with a message.
const NcclLibrary& nccl_library();

// Ranks per LSA team, which are neighbours.
int lsa_team_size(ncclComm_t comm, int num_ranks);

// Throw a message that names the call.
void check_nccl(ncclResult_t result, const char* call);
void check_cuda(cudaError_t result, const char* call);

}  // namespace crossdock::tools
