// SPDX-License-Identifier: Apache-2.0
// NCCL, found at run time: the library is not linked, so that one binary also serves machines without it.
#pragma once

#include <nccl.h>
#include <nccl_device/core.h>

#include <string>

#include "core/error.h"

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
    X(ncclMemAlloc)                 \
    X(ncclMemFree)                  \
    X(ncclCommWindowRegister)       \
    X(ncclCommWindowDeregister)     \
    X(ncclWinGetUserPtr)            \
    X(ncclGetLsaDevicePointer)      \
    X(ncclDevCommCreate)            \
    X(ncclDevCommDestroy)

inline constexpr int kMinNcclVersion = NCCL_VERSION(2, 30, 4);

// NCCL's functions by their own names, and where they came from.
struct NcclApi {
#define CROSSDOCK_NCCL_MEMBER(name) decltype(&::name) name = nullptr;
    CROSSDOCK_NCCL_FUNCTIONS(CROSSDOCK_NCCL_MEMBER)
#undef CROSSDOCK_NCCL_MEMBER
    int version = 0;
    std::string file;

    // Throws an Error with NCCL's code that names the call and carries NCCL's own words.
    void check(ncclResult_t result, ncclComm_t comm, const char* call) const;
};

// Resolved at the first call, by the first that is there: an NCCL already loaded in this process (a communicator came
// from it), the file that CROSSDOCK_NCCL_LIBRARY names, libnccl.so.2. Error with ncclInvalidUsage where there is none
// or where it is older than kMinNcclVersion; the next call looks again.
const NcclApi& nccl_api();

// "2.30.4" for 23004.
std::string nccl_version_text(int version);

}  // namespace crossdock
