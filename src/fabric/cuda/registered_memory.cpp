// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/registered_memory.h"

#include <algorithm>

#include "core/error.h"
#include "core/log.h"
#include "runtime/cuda/cuda_check.h"

namespace crossdock {

ncclCommProperties_t properties_of(const NcclRank& self) {
    ncclCommProperties_t properties = {};
    properties.size = sizeof(properties);
    properties.magic = NCCL_API_MAGIC;
    // NCCL refuses structs of a newer version than its own; all versions of 2.30 share this struct.
    properties.version = static_cast<unsigned>(std::min(NCCL_VERSION_CODE, self.nccl->version));
    self.nccl->check(self.nccl->ncclCommQueryProperties(self.comm, &properties), self.comm, "ncclCommQueryProperties");
    return properties;
}

std::byte* address_in_window(const NcclRank& self, ncclWindow_t window, int rank) {
    void* pointer = nullptr;
    const int lsa_rank = rank - self.first_of_team();
    self.nccl->check(self.nccl->ncclGetLsaDevicePointer(window, 0, lsa_rank, &pointer), self.comm,
                     "ncclGetLsaDevicePointer");
    return static_cast<std::byte*>(pointer);
}

PeerMap peers_of_window(const NcclRank& self, ncclWindow_t window) {
    PeerMap peers;
    const int first = self.first_of_team();
    peers.base = address_in_window(self, window, first);
    if (self.lsa_team_size == 1) return {peers.base, 0};
    peers.stride = static_cast<uint64_t>(address_in_window(self, window, first + 1) - peers.base);
    peers.base -= static_cast<uint64_t>(first) * peers.stride;
    // NCCL's own kernels find a peer by base and stride, too, so this fails only if NCCL's design changes.
    const int last_rank = first + self.lsa_team_size - 1;
    require(peers.at(last_rank, 0) == address_in_window(self, window, last_rank), ncclInternalError,
            "NCCL {} maps the window of rank {} away from the regular stride of {} bytes",
            nccl_version_text(self.nccl->version), last_rank, peers.stride);
    return peers;
}

RegisteredMemory::RegisteredMemory(const NcclRank& self, size_t num_bytes, cudaStream_t stream) : self_(self) {
    DeviceGuard guard(self_.device);
    bytes = (num_bytes + NCCL_WIN_REQUIRED_ALIGNMENT - 1) / NCCL_WIN_REQUIRED_ALIGNMENT * NCCL_WIN_REQUIRED_ALIGNMENT;
    self_.nccl->check(self_.nccl->ncclMemAlloc(&allocation_, bytes), self_.comm, "ncclMemAlloc");
    try {
        check_cuda(cudaMemsetAsync(allocation_, 0, bytes, stream), "cudaMemsetAsync");
        check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    } catch (...) {
        (void)self_.nccl->ncclMemFree(allocation_);
        throw;
    }
}

RegisteredMemory::~RegisteredMemory() {
    try {
        DeviceGuard guard(self_.device);
        if (window_ != nullptr) {
            self_.nccl->check(self_.nccl->ncclCommWindowDeregister(self_.comm, window_), self_.comm,
                              "ncclCommWindowDeregister");
        }
        self_.nccl->check(self_.nccl->ncclMemFree(allocation_), self_.comm, "ncclMemFree");
    } catch (const std::exception& error) {
        debug(error.what());
    }
}

void RegisteredMemory::map() {
    DeviceGuard guard(self_.device);
    const ncclResult_t result =
        self_.nccl->ncclCommWindowRegister(self_.comm, allocation_, bytes, &window_, NCCL_WIN_DEFAULT);
    // Without a deadline: the memory must live until NCCL has registered it.
    self_.nccl->complete(result, self_.comm, "ncclCommWindowRegister", Deadline::max());
    require(window_ != nullptr, ncclInvalidUsage,
            "NCCL gave no window for {} bytes: it allows no symmetric memory here; do not set NCCL_CUMEM_ENABLE or "
            "NCCL_WIN_ENABLE to 0",
            bytes);
    // No barrier is needed: a peer can map this memory only after this rank has zeroed and registered it.
    peers = peers_of_window(self_, window_);
    // The window maps the memory a second time. Kernels use this address for their own piece, too, as peers on the same
    // GPU do: two addresses of the same bytes in one kernel would need alias fences.
    local = peers.at(self_.rank, 0);
}

std::unique_ptr<RegisteredMemory> register_memory(std::unique_ptr<RegisteredMemory> memory, const char* what,
                                                  Deadline deadline) {
    return run_bounded(
        [memory = std::move(memory)]() mutable {
            memory->map();
            return std::move(memory);
        },
        deadline, fmt::format("{}: some rank did not register its memory with NCCL in time", what));
}

}  // namespace crossdock
