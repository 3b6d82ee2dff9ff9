// SPDX-License-Identifier: Apache-2.0
#include "tools/common/device.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace crossdock::tools {
namespace {

class CpuDevice : public Device {
  public:
    void* allocate(size_t bytes) override {
        const size_t rounded = (bytes + kAlignment) / kAlignment * kAlignment;
        void* memory = std::aligned_alloc(kAlignment, rounded);
        if (memory == nullptr) {
            throw std::bad_alloc();
        }
        return std::memset(memory, 0, rounded);
    }
    void free(void* memory) override { std::free(memory); }

    void to_device(void* target, const void* source, size_t bytes) override { copy(target, source, bytes); }
    void to_host(void* target, const void* source, size_t bytes) override { copy(target, source, bytes); }

    cudaStream_t stream() override { return nullptr; }
    void synchronize() override {}

  private:
    static constexpr size_t kAlignment = 4096;

    static void copy(void* target, const void* source, size_t bytes) {
        if (bytes > 0) {
            std::memcpy(target, source, bytes);
        }
    }
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() { return std::make_unique<CpuDevice>(); }

}  // namespace crossdock::tools
