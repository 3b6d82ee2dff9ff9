// SPDX-License-Identifier: Apache-2.0
// NCCL, resolved at run time: the library is not linked, so that one binary also runs on machines without it.
#pragma once

#include <nccl.h>
#include <nccl_device/core.h>

#include <string>

#include "core/error.h"
#include "fabric/cuda/bounded.h"

namespace crossdock {

#define CROSSDOCK_NCCL_FUNCTIONS(X) \
    X(ncclGetVersion)               \
    X(ncclGetErrorString)           \
    X(ncclGetLastError)             \
    X(ncclCommCount)                \
    X(ncclCommUserRank)             \
    X(ncclCommCuDevice)             \
    X(ncclCommGetAsyncError)        \
    X(ncclCommQueryProperties)      \
    X(ncclAllGather)                \
    X(ncclMemAlloc)                 \
    X(ncclMemFree)                  \
    X(ncclCommWindowRegister)       \
    X(ncclCommWindowDeregister)     \
    X(ncclWinGetUserPtr)            \
    X(ncclGetLsaDevicePointer)      \
    X(ncclDevCommCreate)            \
    X(ncclDevCommDestroy)

inline constexpr int kMinNcclVersion = NCCL_VERSION(2, 30, 4);

// NCCL's functions by their own names, and the file that has them.
struct NcclApi {
#define CROSSDOCK_NCCL_MEMBER(name) decltype(&::name) name = nullptr;
    CROSSDOCK_NCCL_FUNCTIONS(CROSSDOCK_NCCL_MEMBER)
#undef CROSSDOCK_NCCL_MEMBER
    int version = 0;
    std::string file;

    // Throws NCCL's code with a message that names the call and contains NCCL's message.
    void check(ncclResult_t result, ncclComm_t comm, const char* call) const;
    // The same when the call has completed, which one of a communicator with config.blocking = 0 does later. Throws
    // ncclInProgress at the deadline, though NCCL may go on with the call.
    void complete(ncclResult_t result, ncclComm_t comm, const char* call, Deadline deadline) const;
};

// Resolved at the first call: an NCCL already loaded in this process (which created the communicator), the file that
// CROSSDOCK_NCCL_LIBRARY names, or libnccl.so.2. Throws ncclInvalidUsage if there is none or it is older than
// kMinNcclVersion; the next call tries again.
const NcclApi& nccl_api();

// "2.30.4" for 23004.
std::string nccl_version_text(int version);

}  // namespace crossdock
