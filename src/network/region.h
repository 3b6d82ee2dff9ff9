// SPDX-License-Identifier: Apache-2.0
// Memory that ranks registered together. All register in the same order, so a number means the same everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace crossdock::network {

enum class MemoryKind : uint8_t { kHost = 1, kDevice = 2 };

struct RemoteRegion {
    bool is_known = false;
    MemoryKind kind = MemoryKind::kHost;
    uint64_t bytes = 0;
};

struct Region {
    uint32_t id;
    std::byte* base;
    uint64_t bytes;
    MemoryKind kind;
    // What the words of device memory hold, where only signals write them: adding needs no look at the device then.
    std::vector<uint64_t> words;
    std::vector<RemoteRegion> remote;  // a rank each
    uint64_t last_step_in = 0;         // the last copy or word that the device was given for it
    uint64_t num_operations = 0;       // that have named it here
    uint32_t uses = 0;                 // steps under way that touch it
    bool is_leaving = false;           // nothing new may touch it
};

inline bool fits(uint64_t offset, uint64_t bytes, uint64_t region_bytes) {
    return offset <= region_bytes && bytes <= region_bytes - offset;
}

}  // namespace crossdock::network
