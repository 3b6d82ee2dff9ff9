// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/gin_connection.h"

#include <nccl_device.h>

#include <algorithm>

#include "core/error.h"
#include "core/log.h"
#include "fabric/cuda/gin_advice.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/driver_function.h"

namespace crossdock {
namespace {

bool lacks_attribute(int device) {
    const auto query = driver_function<decltype(cuDeviceGetAttribute)>("cuDeviceGetAttribute", 11020);
    int has_it = 1;
    return query != nullptr &&
           query(&has_it, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device) == CUDA_SUCCESS &&
           has_it == 0;
}
bool loads_lazily() {
    const auto query = driver_function<decltype(cuModuleGetLoadingMode)>("cuModuleGetLoadingMode", 11070);
    CUmoduleLoadingMode mode = CU_MODULE_EAGER_LOADING;
    return query != nullptr && query(&mode) == CUDA_SUCCESS && mode == CU_MODULE_LAZY_LOADING;
}

void expect_gin(const NcclRank& self) {
    const ncclCommProperties_t properties = properties_of(self);
    require(properties.ginType != NCCL_GIN_TYPE_NONE, ncclInvalidUsage,
            "several LSA teams on GPUs need NCCL's GPU-initiated networking, which is off for this "
            "communicator of {} ranks: {}",
            self.num_ranks, gin_advice_for(self));
    require(properties.ginType == NCCL_GIN_TYPE_PROXY, ncclInvalidUsage,
            "NCCL has chosen a network of type {} for kernels, this build speaks type {} (proxy): set NCCL_GIN_TYPE={}",
            static_cast<int>(properties.ginType), static_cast<int>(NCCL_GIN_TYPE_PROXY),
            static_cast<int>(NCCL_GIN_TYPE_PROXY));
}

class Connection final : public GinConnection {
  public:
    explicit Connection(const NcclRank& self) : self_(self) {
        DeviceGuard guard(self_.device);
        ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
        needs.version = static_cast<unsigned>(std::min(NCCL_VERSION_CODE, self_.nccl->version));
        needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
        const ncclResult_t result = self_.nccl->ncclDevCommCreate(self_.comm, &needs, &comm_);
        require(result == ncclSuccess, ncclInvalidUsage, "NCCL gives kernels no network between LSA teams ({}): {}",
                self_.nccl->ncclGetLastError(self_.comm), gin_advice_for(self_));
        for (const std::string& said : {gin_fallback(), gin_loading_advice(loads_lazily())}) {
            if (!said.empty()) warn(said);
        }
        try {
            check_cuda(cudaMalloc(&device_comm_, sizeof(comm_)), "cudaMalloc");
            const size_t queue_bytes = sizeof(PostQueue) * static_cast<size_t>(self_.num_ranks);
            check_cuda(cudaMalloc(&queues_, queue_bytes), "cudaMalloc");
            check_cuda(cudaMemset(queues_, 0, queue_bytes), "cudaMemset");
            check_cuda(cudaMemcpy(device_comm_, &comm_, sizeof(comm_), cudaMemcpyHostToDevice), "cudaMemcpy");
        } catch (...) {
            release();
            throw;
        }
    }
    ~Connection() override { release(); }

  private:
    void release() noexcept {
        try {
            DeviceGuard guard(self_.device);
            if (device_comm_ != nullptr) (void)cudaFree(device_comm_);
            if (queues_ != nullptr) (void)cudaFree(queues_);
            device_comm_ = nullptr;
            queues_ = nullptr;
            self_.nccl->check(self_.nccl->ncclDevCommDestroy(self_.comm, &comm_), self_.comm, "ncclDevCommDestroy");
        } catch (const std::exception& error) {
            debug(error.what());
        }
    }

    NcclRank self_;
    ncclDevComm comm_ = {};
};

}  // namespace

std::string gin_advice_for(const NcclRank& self) {
    return gin_advice(self.nccl->version, lacks_attribute(self.device) ? self.device : kGpuFits);
}

std::unique_ptr<GinConnection> GinConnection::make(const NcclRank& self, Deadline deadline) {
    expect_gin(self);
    return run_bounded([self]() -> std::unique_ptr<GinConnection> { return std::make_unique<Connection>(self); },
                       deadline, "connecting LSA teams: some rank did not come to NCCL's network in time");
}

}  // namespace crossdock
