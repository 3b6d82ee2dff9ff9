// SPDX-License-Identifier: Apache-2.0
// A queued put, get or signal to one peer in one context. Fields for peers whose memory is mapped come first; the rest
// is for peers on other hosts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/platform.h"  // before any header that opens the namespace cpu

namespace crossdock::cpu {
class RemoteMemory;
}

namespace crossdock::device_api {

struct Descriptor {
    uint64_t bytes = 0;     // 0: only the signal
    bool is_value = false;  // puts `value` instead of a source
    bool has_signal = false;
    bool is_strong = false;  // the signal
    bool is_remote = false;
    bool is_get = false;  // the source is the peer's
    union {
        const std::byte* source = nullptr;
        uint64_t value;  // of at most 8 bytes
    };
    uint64_t increase = 0;        // of the signal
    uint64_t* counter = nullptr;  // incremented when the source has been read; null: none
    std::byte* target = nullptr;
    uint64_t* signal = nullptr;

    cpu::RemoteMemory* target_memory = nullptr;
    uint64_t target_offset = 0;
    cpu::RemoteMemory* source_memory = nullptr;
    uint64_t source_offset = 0;
    cpu::RemoteMemory* signal_memory = nullptr;
    uint64_t signal_offset = 0;
};
inline constexpr size_t kLocalDescriptorBytes = offsetof(Descriptor, target_memory);
static_assert(kLocalDescriptorBytes <= 56 && sizeof(Descriptor) <= 120);

// Executes a descriptor whose peer's memory is mapped here.
void carry_out_local(const Descriptor& descriptor);

// Writes a value, with a single store if the target is aligned, because its reader may poll it.
void store_value(std::byte* target, uint64_t value, size_t bytes);

}  // namespace crossdock::device_api
