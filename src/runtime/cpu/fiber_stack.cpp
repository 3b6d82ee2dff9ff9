// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/fiber_stack.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "runtime/cpu/sanitizer.h"

namespace crossdock::cpu {
namespace {

constexpr size_t kGuardBytes = 4096;
constexpr size_t kMaxPooled = 512;  // per thread; others are unmapped

struct PooledStack {
    std::byte* stack;
    size_t bytes;
};

void unmap(std::byte* stack, size_t stack_bytes) noexcept { munmap(stack - kGuardBytes, stack_bytes + kGuardBytes); }

// Fibers in other thread-local objects may be destroyed after the pool, and must not use it then.
thread_local bool t_pool_is_gone = false;

struct Pool {
    std::vector<PooledStack> stacks;
    Pool() { stacks.reserve(kMaxPooled); }
    ~Pool() {
        t_pool_is_gone = true;
        for (const PooledStack& pooled : stacks) unmap(pooled.stack, pooled.bytes);
    }
};

Pool& pool() {
    thread_local Pool t_pool;
    return t_pool;
}

}  // namespace

std::byte* acquire_stack(size_t stack_bytes) {
    if (!t_pool_is_gone) {
        auto& stacks = pool().stacks;
        for (size_t i = stacks.size(); i-- > 0;) {
            if (stacks[i].bytes != stack_bytes) continue;
            std::byte* stack = stacks[i].stack;
            stacks[i] = stacks.back();
            stacks.pop_back();
            return stack;
        }
    }
    void* mapped = mmap(nullptr, stack_bytes + kGuardBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
    require(mapped != MAP_FAILED, ncclSystemError, "no memory for a fiber's stack of {} bytes: {}", stack_bytes,
            std::strerror(errno));
    if (mprotect(mapped, kGuardBytes, PROT_NONE) != 0) {
        const int reason = errno;
        munmap(mapped, stack_bytes + kGuardBytes);
        fail(ncclSystemError, "no guard page for a fiber's stack: {}", std::strerror(reason));
    }
    return static_cast<std::byte*>(mapped) + kGuardBytes;
}

void release_stack(std::byte* stack, size_t stack_bytes) noexcept {
    // Frames that never returned leave AddressSanitizer's red zones behind.
    sanitizer::unpoison(stack, stack_bytes);
    if (!t_pool_is_gone && pool().stacks.size() < kMaxPooled) {
        pool().stacks.push_back({stack, stack_bytes});
    } else {
        unmap(stack, stack_bytes);
    }
}

}  // namespace crossdock::cpu
