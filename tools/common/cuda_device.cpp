// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cstdlib>
#include <stdexcept>

#include "crossdock/error.hpp"
#include "tools/common/device.h"
#include "tools/common/nccl_library.h"

namespace crossdock::tools {
namespace {

class CudaDevice : public Device {
  public:
    explicit CudaDevice(int index) {
        check_cuda(cudaSetDevice(index), "cudaSetDevice");
        check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    }
    ~CudaDevice() override { cudaStreamDestroy(stream_); }

    void* allocate(size_t bytes) override {
        void* memory = nullptr;
        check_cuda(cudaMalloc(&memory, bytes > 0 ? bytes : 1), "cudaMalloc");
        check_cuda(cudaMemsetAsync(memory, 0, bytes, stream_), "cudaMemsetAsync");
        synchronize();
        return memory;
    }
    void free(void* memory) override { cudaFree(memory); }

    void to_device(void* target, const void* source, size_t bytes) override {
        check_cuda(cudaMemcpyAsync(target, source, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
        synchronize();
    }
    void to_host(void* target, const void* source, size_t bytes) override {
        check_cuda(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
        synchronize();
    }

    cudaStream_t stream() override { return stream_; }
    void synchronize() override { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  private:
    cudaStream_t stream_ = nullptr;
};

// Before CUDA is used first. A kernel that is loaded at its first launch may have to wait for all that run; if one of
// those is another rank's, waiting for this rank, both wait for ever.
cudaError_t count_devices(int& count) {
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    return cudaGetDeviceCount(&count);
}

}  // namespace

int num_cuda_devices() {
    int count = 0;
    return count_devices(count) == cudaSuccess ? count : 0;
}

std::string why_no_cuda() {
    int count = 0;
    const cudaError_t result = count_devices(count);
    return fmt::format("there is no GPU that CUDA can use here ({})",
                       result == cudaSuccess ? "none is installed" : cudaGetErrorString(result));
}

std::unique_ptr<Device> make_cuda_device(int index) {
    const int num_devices = num_cuda_devices();
    if (num_devices == 0) {
        throw std::runtime_error(why_no_cuda());
    }
    return std::make_unique<CudaDevice>(index % num_devices);
}

ncclComm_t make_nccl_communicator(const RankContext& context) {
    ncclUniqueId own{};
    if (context.rank == 0) {
        check_nccl(nccl_library().get_unique_id(&own), "ncclGetUniqueId");
    }
    std::vector<ncclUniqueId> all(static_cast<size_t>(context.num_ranks));
    check(crossdockCommAllGather(context.host, &own, all.data(), sizeof own));
    ncclComm_t comm = nullptr;
    check_nccl(nccl_library().comm_init_rank(&comm, context.num_ranks, all[0], context.rank), "ncclCommInitRank");
    return comm;
}

void destroy_nccl_communicator(ncclComm_t comm) {
    if (comm != nullptr) {
        nccl_library().comm_destroy(comm);
    }
}

}  // namespace crossdock::tools
