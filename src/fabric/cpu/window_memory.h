// SPDX-License-Identifier: Apache-2.0
// crossdockMemAlloc's memory: of this process like any other, and ready to be mapped by the processes of a
// communicator.
#pragma once

#include <optional>

#include "fabric/cpu/memory_file.h"

namespace crossdock::cpu {

// Zeroed and page aligned. Error with ncclSystemError.
void* allocate_window_memory(size_t bytes);
// False if memory was not returned by allocate_window_memory, or is freed already.
bool free_window_memory(void* memory);

struct FilePart {
    int fd;  // valid until the memory is freed
    size_t file_bytes;
    size_t offset;
};
// Where [memory, memory + bytes) lies; nothing unless it lies in one allocation.
std::optional<FilePart> find_window_memory(const void* memory, size_t bytes);

}  // namespace crossdock::cpu
