// SPDX-License-Identifier: Apache-2.0
// One rank on a CPU that says it is a GPU.
#pragma once

#include <memory>

#include "fabric/cpu/in_process_communicator.h"
#include "runtime/cpu/cpu_runtime.h"

namespace crossdock {

struct PretendedDevice {
    int num_sms = 132;
    int compute_capability = 90;
    size_t max_shared_bytes = 232448;
    bool overlaps_kernels = true;
    bool shares_host_memory = false;
};

class PretendedGpu : public Communicator {
  public:
    explicit PretendedGpu(const PretendedDevice& device)
        : own_(cpu::make_thread_communicators(1).front()),
          traits_(kCudaBackend),
          runtime_(*own_->runtime().cpu_executor(), device) {}

    const BackendTraits& backend() const override { return traits_; }
    int rank() const override { return 0; }
    int num_ranks() const override { return 1; }
    Runtime& runtime() override { return runtime_; }
    void all_gather(const void* own, void* all, size_t bytes, const char* what, uint64_t timeout_ns) override {
        own_->all_gather(own, all, bytes, what, timeout_ns);
    }
    uint64_t setup_timeout_ns(uint64_t timeout_ns) const override { return own_->setup_timeout_ns(timeout_ns); }
    std::unique_ptr<SymmetricMemory> allocate_symmetric(size_t bytes, uint64_t timeout_ns) override {
        return own_->allocate_symmetric(bytes, timeout_ns);
    }
    WindowView window(ncclWindow_t handle) override { return own_->window(handle); }
    NetworkHandle network_of(const SymmetricMemory& memory) override { return own_->network_of(memory); }
    bool shares_host_memory() const override { return runtime_.device.shares_host_memory; }

  private:
    struct GpuRuntime : cpu::CpuRuntime {
        GpuRuntime(cpu::Executor& executor, const PretendedDevice& of) : CpuRuntime(executor), device(of) {}
        int num_sms() const override { return device.num_sms; }
        size_t max_shared_bytes() const override { return device.max_shared_bytes; }
        int compute_capability() const override { return device.compute_capability; }
        bool overlaps_kernels() const override { return device.overlaps_kernels; }
        PretendedDevice device;
    };

    std::shared_ptr<Communicator> own_;
    BackendTraits traits_;
    GpuRuntime runtime_;
};

}  // namespace crossdock
