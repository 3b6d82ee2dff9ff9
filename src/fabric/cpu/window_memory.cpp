// SPDX-License-Identifier: Apache-2.0
#include "fabric/cpu/window_memory.h"

#include <map>
#include <mutex>

#include "core/process.h"

namespace crossdock::cpu {
namespace {

struct Allocation {
    FileDescriptor file;
    Mapping mapping;
};

struct Allocations {
    ForkSafeMutex mutex;
    std::map<uintptr_t, Allocation> by_address;
};

// Never destroyed: memory may be in use until the process has ended.
Allocations& allocations() {
    static auto* instance = new Allocations;
    return *instance;
}
const MadeAtLoad allocations_made_at_load(allocations);

}  // namespace

void* allocate_window_memory(size_t bytes) {
    FileDescriptor file = make_memory_file(bytes);
    Mapping mapping(file.get(), bytes);
    void* memory = mapping.data();
    const std::lock_guard lock(allocations().mutex);
    allocations().by_address.emplace(reinterpret_cast<uintptr_t>(memory),
                                     Allocation{std::move(file), std::move(mapping)});
    return memory;
}

bool free_window_memory(void* memory) {
    const std::lock_guard lock(allocations().mutex);
    return allocations().by_address.erase(reinterpret_cast<uintptr_t>(memory)) == 1;
}

std::optional<FilePart> find_window_memory(const void* memory, size_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    const std::lock_guard lock(allocations().mutex);
    auto found = allocations().by_address.upper_bound(address);
    if (found == allocations().by_address.begin()) return std::nullopt;
    --found;
    const size_t offset = address - found->first;
    const size_t file_bytes = found->second.mapping.bytes();
    if (offset > file_bytes || bytes > file_bytes - offset) return std::nullopt;
    return FilePart{found->second.file.get(), file_bytes, offset};
}

}  // namespace crossdock::cpu
