// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/host_memory.h"

#include <cstring>
#include <utility>
#include <vector>

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

// memory: on the device, for the own bytes, a multiple of kGatheredBytes, and then all ranks' bytes.
std::vector<std::byte> gather_on_device(const NcclRank& self, const std::vector<std::byte>& own, std::byte* memory,
                                        Deadline deadline) {
    DeviceGuard guard(self.device);
    const size_t bytes = own.size();
    std::vector<std::byte> all(bytes * static_cast<size_t>(self.num_ranks));
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check_cuda(cudaMemcpyAsync(memory, own.data(), bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    const ncclResult_t result = self.nccl->ncclAllGather(memory, memory + bytes, bytes, ncclUint8, self.comm, stream);
    self.nccl->complete(result, self.comm, "ncclAllGather", deadline);
    check_cuda(cudaMemcpyAsync(all.data(), memory + bytes, all.size(), cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
    return all;
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
    const size_t padded_bytes = align_up(bytes, kGatheredBytes);
    std::vector<std::byte> padded(padded_bytes);
    std::memcpy(padded.data(), own, bytes);
    // After a failure it stays, because NCCL may still use it.
    auto* memory = static_cast<std::byte*>(runtime.allocate(padded_bytes * (static_cast<size_t>(self.num_ranks) + 1)));
    const std::vector<std::byte> gathered = run_bounded(
        [self, memory, deadline, padded = std::move(padded)] {
            return gather_on_device(self, padded, memory, deadline);
        },
        deadline,
        fmt::format("{}: some rank did not come to NCCL's all-gather in time; its kernel waits on the GPU until the "
                    "communicator is aborted",
                    what));
    runtime.free(memory);
    for (size_t rank = 0; rank < static_cast<size_t>(self.num_ranks); ++rank)
        std::memcpy(static_cast<std::byte*>(all) + rank * bytes, gathered.data() + rank * padded_bytes, bytes);
}

}  // namespace crossdock
