// SPDX-License-Identifier: Apache-2.0
// Annotations of memory and stacks for the address and thread sanitizers; empty in ordinary builds.
#pragma once

#include <cstddef>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CROSSDOCK_ASAN 1
#endif
#if __has_feature(thread_sanitizer)
#define CROSSDOCK_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define CROSSDOCK_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__)
#define CROSSDOCK_TSAN 1
#endif

#if defined(CROSSDOCK_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(CROSSDOCK_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace crossdock::cpu::sanitizer {

#if defined(CROSSDOCK_ASAN)
inline void poison(const void* memory, size_t bytes) { __asan_poison_memory_region(memory, bytes); }
inline void unpoison(const void* memory, size_t bytes) { __asan_unpoison_memory_region(memory, bytes); }
inline void start_switch(void** fake_stack, const void* target_stack, size_t target_bytes) {
    __sanitizer_start_switch_fiber(fake_stack, target_stack, target_bytes);
}
inline void finish_switch(void* fake_stack, const void** left_stack, size_t* left_bytes) {
    __sanitizer_finish_switch_fiber(fake_stack, left_stack, left_bytes);
}
#else
inline void poison(const void*, size_t) {}
inline void unpoison(const void*, size_t) {}
inline void start_switch(void**, const void*, size_t) {}
inline void finish_switch(void*, const void**, size_t*) {}
#endif

#if defined(CROSSDOCK_TSAN)
inline void* create_fiber() { return __tsan_create_fiber(0); }
inline void destroy_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void* current_fiber() { return __tsan_get_current_fiber(); }
inline void switch_to_fiber(void* fiber) { __tsan_switch_to_fiber(fiber, 0); }
#else
inline void* create_fiber() { return nullptr; }
inline void destroy_fiber(void*) {}
inline void* current_fiber() { return nullptr; }
inline void switch_to_fiber(void*) {}
#endif

}  // namespace crossdock::cpu::sanitizer
