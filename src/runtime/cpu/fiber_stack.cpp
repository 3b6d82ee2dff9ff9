// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/fiber_stack.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <vector>

#include "core/error.h"
#include "runtime/cpu/sanitizer.h"

namespace crossdock::cpu {
namespace {

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

// Without allocating much: the process may be at its limit. 0: unknown.
uint64_t num_mappings() {
    const int fd = ::open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    uint64_t count = 0;
    char text[4096];
    for (ssize_t bytes; (bytes = ::read(fd, text, sizeof(text))) > 0;) {
        count += static_cast<uint64_t>(std::count(text, text + bytes, '\n'));
    }
    ::close(fd);
    return count;
}
uint64_t max_mappings() {
    uint64_t most = 0;
    std::ifstream("/proc/sys/vm/max_map_count") >> most;
    return most;
}

// Throws unless so many stacks more leave room for mappings of others.
void expect_mappings(size_t num_stacks) {
    constexpr uint64_t kOfOthers = 512;
    const uint64_t most = max_mappings(), present = num_mappings();
    require(most == 0 || present + 2 * num_stacks + kOfOthers <= most, ncclSystemError,
            "no room for the stacks of {} more threads or warps: each takes two memory mappings, and the process has "
            "{}, allowed: {} (vm.max_map_count); launch fewer at once, or raise it: sysctl -w vm.max_map_count={}",
            num_stacks, present, most, std::bit_ceil(2 * (present + 2 * num_stacks)));
}

[[noreturn]] void fail_for_want_of_memory(size_t stack_bytes, int reason) {
    if (reason == ENOMEM) expect_mappings(1);
    fail(ncclSystemError,
         "no memory for a stack of {} bytes with a guard of {} MiB: {}; if the address space is limited (ulimit -v), "
         "raise the limit",
         stack_bytes, kGuardBytes >> 20, std::strerror(reason));
}

}  // namespace

void expect_room_for_stacks(size_t count) {
    constexpr size_t kFew = 1024;  // for fewer it is not worth a look
    if (count >= kFew) expect_mappings(count);
}

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
    const size_t bytes = stack_bytes + kGuardBytes;
    void* mapped = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) fail_for_want_of_memory(stack_bytes, errno);
    std::byte* stack = static_cast<std::byte*>(mapped) + kGuardBytes;
    if (mprotect(stack, stack_bytes, PROT_READ | PROT_WRITE) != 0) {
        const int reason = errno;
        munmap(mapped, bytes);
        fail_for_want_of_memory(stack_bytes, reason);
    }
    return stack;
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
