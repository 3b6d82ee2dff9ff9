// SPDX-License-Identifier: Apache-2.0
// Memory that all ranks registered. They register in the same order, so a region has the same number on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
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
    // Ranges of words of device memory that only signals write: the offset of a range's first word, and the value of
    // each word, so that adding need not read the device. nullopt: the next signal reads it.
    std::map<uint64_t, std::vector<std::optional<uint64_t>>> words;
    std::vector<RemoteRegion> remote;  // per rank
    uint64_t last_step_in = 0;         // its last copy or word to the device
    uint64_t num_operations = 0;       // started here
    uint32_t uses = 0;                 // pending steps that access it
    bool is_leaving = false;           // being deregistered: no new uses

    // Null: the word has other writers.
    std::optional<uint64_t>* word_at(uint64_t offset) {
        const auto next = words.upper_bound(offset);
        if (next == words.begin()) return nullptr;
        auto& [first, values] = *std::prev(next);
        const uint64_t number = (offset - first) / sizeof(uint64_t);
        return number < values.size() ? &values[number] : nullptr;
    }
};

inline bool fits(uint64_t offset, uint64_t bytes, uint64_t region_bytes) {
    return offset <= region_bytes && bytes <= region_bytes - offset;
}

}  // namespace crossdock::network
