// SPDX-License-Identifier: Apache-2.0
#include "tools/common/device.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <unordered_map>

namespace crossdock::tools {
namespace {

// Fresh pages: zero, and without memory behind them before they are touched. Receive tensors are mostly never touched.
class CpuDevice : public Device {
  public:
    void* allocate(size_t bytes) override {
        const size_t length = bytes > 0 ? bytes : 1;
        void* memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            throw std::bad_alloc();
        }
        lengths_[memory] = length;
        return memory;
    }
    void free(void* memory) override {
        if (const auto entry = lengths_.find(memory); entry != lengths_.end()) {
            munmap(memory, entry->second);
            lengths_.erase(entry);
        }
    }

    void to_device(void* target, const void* source, size_t bytes) override { copy(target, source, bytes); }
    void to_host(void* target, const void* source, size_t bytes) override { copy(target, source, bytes); }

    cudaStream_t stream() override { return nullptr; }
    void synchronize() override {}

  private:
    static void copy(void* target, const void* source, size_t bytes) {
        if (bytes > 0) {
            std::memcpy(target, source, bytes);
        }
    }

    std::unordered_map<void*, size_t> lengths_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() { return std::make_unique<CpuDevice>(); }

}  // namespace crossdock::tools
