// SPDX-License-Identifier: Apache-2.0
// crossdockMemAlloc's memory: ordinary memory of this process that other processes of a communicator can map.
#pragma once

#include <optional>

#include "runtime/cpu/memory_file.h"

namespace crossdock::cpu {

// Zeroed and page aligned. Throws ncclSystemError.
void* allocate_window_memory(size_t bytes);
// Returns false if memory was not returned by allocate_window_memory, or has been freed.
bool free_window_memory(void* memory);

struct FilePart {
    int fd;  // valid until the memory is freed
    size_t file_bytes;
    size_t offset;
};
// The file part of [memory, memory + bytes); nullopt unless it lies in one allocation.
std::optional<FilePart> find_window_memory(const void* memory, size_t bytes);

}  // namespace crossdock::cpu
