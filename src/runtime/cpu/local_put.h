// SPDX-License-Identifier: Apache-2.0
// A put to memory that is mapped in this process: a copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace crossdock::cpu {

// Short puts are copied word by word, in order: their reader may poll the target instead of a signal.
inline bool goes_by_words(const void* target, const void* source, size_t bytes) {
    constexpr size_t kPolledBytes = 64;
    const auto is_aligned = [](const void* place) { return reinterpret_cast<uintptr_t>(place) % 8 == 0; };
    return bytes <= kPolledBytes && bytes % 8 == 0 && is_aligned(target) && is_aligned(source);
}

inline void put_local(void* target, const void* source, size_t bytes) {
    if (!goes_by_words(target, source, bytes)) {
        std::memcpy(target, source, bytes);
        return;
    }
    auto* words = static_cast<uint64_t*>(target);
    const auto* values = static_cast<const uint64_t*>(source);
    for (size_t i = 0; i < bytes / 8; ++i)
        __atomic_store_n(words + i, __atomic_load_n(values + i, __ATOMIC_RELAXED), __ATOMIC_RELEASE);
}

}  // namespace crossdock::cpu
