// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/cpu_runtime.h"

#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "runtime/cpu/machine_memory.h"

namespace crossdock::cpu {
namespace {

constexpr size_t kAlignment = 256;  // as GPU allocations have

}  // namespace

void* CpuRuntime::allocate(size_t bytes) {
    // The kernel would grant more than that, and kill the process when it is zeroed.
    require(bytes <= machine_memory(), ncclSystemError,
            "no memory for {} bytes: the machine has {} bytes for this process", bytes, machine_memory());
    const size_t rounded_bytes = bytes == 0 ? kAlignment : (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, rounded_bytes);
    require(memory != nullptr, ncclSystemError, "no memory for {} bytes", bytes);
    std::memset(memory, 0, rounded_bytes);
    return memory;
}

void CpuRuntime::free(void* memory) noexcept { std::free(memory); }

void CpuRuntime::copy_to_device(void* target, const void* host_source, size_t bytes, cudaStream_t) {
    if (bytes > 0) std::memmove(target, host_source, bytes);
}

void CpuRuntime::copy_on_device(void* target, const void* source, size_t bytes, cudaStream_t) {
    if (bytes > 0) std::memmove(target, source, bytes);
}

void CpuRuntime::copy_to_host(void* host_target, const void* source, size_t bytes, cudaStream_t) {
    if (bytes > 0) std::memmove(host_target, source, bytes);
}

void CpuRuntime::look_at_words(uint64_t* host_target, const uint64_t* source, size_t count) {
    for (size_t i = 0; i < count; ++i) host_target[i] = __atomic_load_n(source + i, __ATOMIC_ACQUIRE);
}

}  // namespace crossdock::cpu
