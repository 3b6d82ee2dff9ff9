// SPDX-License-Identifier: Apache-2.0
// Copies that bypass the caches, for operations whose rows do not fit into the caches anyway. Saves the read of each
// cache line that a cached write begins with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "runtime/cpu/sanitizer.h"

#if defined(__SSE2__) && !defined(CROSSDOCK_TSAN) && !defined(CROSSDOCK_ASAN)
#define CROSSDOCK_STREAMS 1  // the sanitizers do not see such writes
#include <emmintrin.h>
#endif

namespace crossdock::cpu {

// Visible to other threads after finish_stream_copies() and a release store.
inline void stream_copy(void* target, const void* source, size_t bytes) {
#if defined(CROSSDOCK_STREAMS)
    constexpr size_t kLine = 64;
    if (reinterpret_cast<uintptr_t>(target) % 16 == 0 && bytes % kLine == 0) {
        auto* out = static_cast<__m128i*>(target);
        const auto* in = static_cast<const __m128i*>(source);
        for (size_t i = 0; i < bytes / 16; i += kLine / 16) {
            const __m128i a = _mm_loadu_si128(in + i);
            const __m128i b = _mm_loadu_si128(in + i + 1);
            const __m128i c = _mm_loadu_si128(in + i + 2);
            const __m128i d = _mm_loadu_si128(in + i + 3);
            _mm_stream_si128(out + i, a);
            _mm_stream_si128(out + i + 1, b);
            _mm_stream_si128(out + i + 2, c);
            _mm_stream_si128(out + i + 3, d);
        }
        return;
    }
#endif
    std::memcpy(target, source, bytes);
}

inline void finish_stream_copies() {
#if defined(CROSSDOCK_STREAMS)
    _mm_sfence();
#endif
}

}  // namespace crossdock::cpu
