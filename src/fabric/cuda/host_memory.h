// SPDX-License-Identifier: Apache-2.0
// Symmetric memory in the memory of the host, for GPUs of one host that cannot reach each other's memory: all ranks map
// one file, and every GPU loads and stores in it over PCIe, so its ranks are one LSA team.
#pragma once

#include "fabric/cuda/bounded.h"
#include "fabric/cuda/registered_memory.h"
#include "fabric/shared_file.h"
#include "runtime/cuda/cuda_runtime.h"

namespace crossdock {

// Collective: share_file(), whose file is registered with CUDA.
SharedHostMemory share_host_memory(const NcclRank& self, size_t bytes, bool is_wanted, const GatherHostBytes& gather);

// Gathers with NCCL's own all-gather, over whatever NCCL has between the ranks: for the ranks' first exchange, before
// they share memory. At the deadline it throws ncclRemoteError that mentions `what`. NCCL's kernel then stays on the
// GPU until the communicator is aborted.
void gather_by_nccl(const NcclRank& self, CudaRuntime& runtime, const void* own, void* all, size_t bytes,
                    const char* what, Deadline deadline);

}  // namespace crossdock
