// SPDX-License-Identifier: Apache-2.0
// The runtime of CPU ranks: device memory is ordinary memory, all calls are synchronous, streams are ignored.
#pragma once

#include "runtime/cpu/executor.h"

namespace crossdock::cpu {

class CpuRuntime : public Runtime {
  public:
    // The executor must outlive the runtime.
    explicit CpuRuntime(Executor& executor) : executor_(&executor) {}

    void* allocate(size_t bytes) override;
    void free(void* memory) noexcept override;
    void* allocate_host_visible(size_t bytes) override { return allocate(bytes); }
    void free_host_visible(void* memory) noexcept override { free(memory); }

    void copy_to_device(void* target, const void* host_source, size_t bytes, cudaStream_t) override;
    void copy_on_device(void* target, const void* source, size_t bytes, cudaStream_t) override;
    void copy_to_host(void* host_target, const void* source, size_t bytes, cudaStream_t) override;
    void look_at_words(uint64_t* host_target, const uint64_t* source, size_t count) override;
    void synchronize(cudaStream_t) override {}
    void synchronize_device() noexcept override {}
    bool is_capturing(cudaStream_t) override { return false; }

    int num_sms() const override { return 1; }
    size_t max_shared_bytes() const override { return 16 << 20; }
    int compute_capability() const override { return 0; }

    Executor* cpu_executor() override { return executor_; }

  private:
    Executor* executor_;
};

}  // namespace crossdock::cpu
