// SPDX-License-Identifier: Apache-2.0
// The few NCCL functions that the GPU backends call themselves, from the library that is found at run time.
#pragma once

#include <nccl.h>

namespace crossdock::testing {

struct NcclLibrary {
    decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
    decltype(&::ncclCommInitRank) comm_init_rank = nullptr;
    decltype(&::ncclCommDestroy) comm_destroy = nullptr;
    decltype(&::ncclMemAlloc) mem_alloc = nullptr;
    decltype(&::ncclMemFree) mem_free = nullptr;
    decltype(&::ncclCommWindowRegister) window_register = nullptr;
    decltype(&::ncclCommWindowDeregister) window_deregister = nullptr;
    decltype(&::ncclGetLastError) get_last_error = nullptr;
};

// Opened at the first call: the file that CROSSDOCK_NCCL_LIBRARY names, else libnccl.so.2. Throws with the loader's
// words.
const NcclLibrary& nccl_library();

}  // namespace crossdock::testing
