// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/host_memory.h"

#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "runtime/cuda/cuda_check.h"

namespace crossdock {
namespace {

class HostMemory final : public SymmetricMemory {
  public:
    HostMemory(const NcclRank& self, size_t num_bytes, cpu::Mapping file, size_t piece_bytes)
        : device_(self.device), file_(std::move(file)) {
        DeviceGuard guard(device_);
        check_cuda(
            cudaHostRegister(file_.data(), piece_bytes * static_cast<size_t>(self.num_ranks), cudaHostRegisterMapped),
            "cudaHostRegister");
        is_registered_ = true;
        void* address = nullptr;
        const cudaError_t result = cudaHostGetDevicePointer(&address, file_.data(), 0);
        if (result != cudaSuccess) release();
        check_cuda(result, "cudaHostGetDevicePointer");
        peers.base = static_cast<std::byte*>(address);
        peers.stride = piece_bytes;
        local = peers.at(static_cast<uint32_t>(self.rank), 0);
        bytes = num_bytes;
    }
    ~HostMemory() override { release(); }

  private:
    void release() noexcept {
        if (!is_registered_) return;
        try {
            DeviceGuard guard(device_);
            check_cuda(cudaHostUnregister(file_.data()), "cudaHostUnregister");
        } catch (const std::exception& error) {
            debug(error.what());
        }
        is_registered_ = false;
    }

    int device_;
    cpu::Mapping file_;
    bool is_registered_ = false;
};

// NCCL's kernel reads whole words.
constexpr size_t kGatheredBytes = 16;

// For the own bytes, and then all ranks'.
struct GatherMemory {
    std::byte* device;
    std::byte* host;  // pinned: a copy to other memory would keep the context locked until the gather ends, and another
                      // rank's thread may have to launch its part in that context
};

// Gathers on the device and copies to the host. bytes: a multiple of kGatheredBytes.
void gather_on_device(const NcclRank& self, const GatherMemory& memory, size_t bytes, Deadline deadline) {
    DeviceGuard guard(self.device);
    std::byte* const gathered = memory.device + bytes;
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check_cuda(cudaMemcpyAsync(memory.device, memory.host, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    const ncclResult_t result = self.nccl->ncclAllGather(memory.device, gathered, bytes, ncclUint8, self.comm, stream);
    self.nccl->complete(result, self.comm, "ncclAllGather", deadline);
    const size_t all_bytes = bytes * static_cast<size_t>(self.num_ranks);
    check_cuda(cudaMemcpyAsync(memory.host + bytes, gathered, all_bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

}  // namespace

SharedHostMemory share_host_memory(const NcclRank& self, size_t bytes, bool is_wanted, const GatherHostBytes& gather) {
    const auto use = [&](cpu::Mapping file, size_t piece_bytes) {
        return std::make_unique<HostMemory>(self, bytes, std::move(file), piece_bytes);
    };
    return share_file(self.rank, self.num_ranks, bytes, is_wanted, use, gather);
}

void gather_by_nccl(const NcclRank& self, CudaRuntime& runtime, const void* own, void* all, size_t bytes,
                    const char* what, Deadline deadline) {
    const size_t padded = align_up(bytes, kGatheredBytes);
    const size_t memory_bytes = padded * (static_cast<size_t>(self.num_ranks) + 1);
    // After a failure it stays, because NCCL may still use it.
    const GatherMemory memory{static_cast<std::byte*>(runtime.allocate(memory_bytes)),
                              static_cast<std::byte*>(runtime.allocate_host_visible(memory_bytes))};
    std::memcpy(memory.host, own, bytes);
    run_bounded(
        [self, memory, padded, deadline] { gather_on_device(self, memory, padded, deadline); }, deadline,
        fmt::format("{}: some rank did not come to NCCL's all-gather in time; its kernel waits on the GPU until "
                    "the communicator is aborted",
                    what));
    for (size_t rank = 0; rank < static_cast<size_t>(self.num_ranks); ++rank)
        std::memcpy(static_cast<std::byte*>(all) + rank * bytes, memory.host + (rank + 1) * padded, bytes);
    runtime.free(memory.device);
    runtime.free(memory.host);
}

}  // namespace crossdock
