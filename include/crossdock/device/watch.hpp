// SPDX-License-Identifier: Apache-2.0
// Shows the simulator every load and store of the kernels: compile them with -fsanitize=thread and
// -DCROSSDOCK_WATCH_ACCESSES, and link without -fsanitize=thread. The compiler then calls the functions below where it
// would call ThreadSanitizer's. (Copies by memcpy that the compiler does not expand are not seen.)
#pragma once

#include "crossdock/device/words.hpp"

#define CROSSDOCK_HOOK extern "C" __attribute__((weak, visibility("default"), no_sanitize("thread"), noinline, used))

#define CROSSDOCK_ACCESS(name, bytes, is_write)                                     \
    CROSSDOCK_HOOK void name(void* address) {                                       \
        if (crossdock::device::running != nullptr) {                                \
            crossdockAccess(address, bytes, is_write, __builtin_return_address(0)); \
        }                                                                           \
    }
#define CROSSDOCK_ACCESSES(bytes)                                \
    CROSSDOCK_ACCESS(__tsan_read##bytes, bytes, false)           \
    CROSSDOCK_ACCESS(__tsan_write##bytes, bytes, true)           \
    CROSSDOCK_ACCESS(__tsan_unaligned_read##bytes, bytes, false) \
    CROSSDOCK_ACCESS(__tsan_unaligned_write##bytes, bytes, true) \
    CROSSDOCK_ACCESS(__tsan_volatile_read##bytes, bytes, false)  \
    CROSSDOCK_ACCESS(__tsan_volatile_write##bytes, bytes, true)
CROSSDOCK_ACCESSES(1)
CROSSDOCK_ACCESSES(2)
CROSSDOCK_ACCESSES(4)
CROSSDOCK_ACCESSES(8)
CROSSDOCK_ACCESSES(16)
#undef CROSSDOCK_ACCESSES
#undef CROSSDOCK_ACCESS

CROSSDOCK_HOOK void __tsan_read_range(void* address, long bytes) {
    if (crossdock::device::running != nullptr) {
        crossdockAccess(address, static_cast<size_t>(bytes), false, __builtin_return_address(0));
    }
}
CROSSDOCK_HOOK void __tsan_write_range(void* address, long bytes) {
    if (crossdock::device::running != nullptr)
        crossdockAccess(address, static_cast<size_t>(bytes), true, __builtin_return_address(0));
}
CROSSDOCK_HOOK void __tsan_init() {}
CROSSDOCK_HOOK void __tsan_func_entry(void*) {}
CROSSDOCK_HOOK void __tsan_func_exit(void*) {}
CROSSDOCK_HOOK void __tsan_vptr_update(void*, void*) {}
CROSSDOCK_HOOK void __tsan_vptr_read(void*) {}

// Atomics of the host's code in the same file; kernels' go through atomic.hpp.
#define CROSSDOCK_ATOMICS(bits, type)                                                                                \
    CROSSDOCK_HOOK type __tsan_atomic##bits##_load(const volatile void* a, int) {                                    \
        return __atomic_load_n(static_cast<const volatile type*>(a), __ATOMIC_SEQ_CST);                              \
    }                                                                                                                \
    CROSSDOCK_HOOK void __tsan_atomic##bits##_store(volatile void* a, type v, int) {                                 \
        __atomic_store_n(static_cast<volatile type*>(a), v, __ATOMIC_SEQ_CST);                                       \
    }                                                                                                                \
    CROSSDOCK_HOOK type __tsan_atomic##bits##_exchange(volatile void* a, type v, int) {                              \
        return __atomic_exchange_n(static_cast<volatile type*>(a), v, __ATOMIC_SEQ_CST);                             \
    }                                                                                                                \
    CROSSDOCK_HOOK type __tsan_atomic##bits##_fetch_add(volatile void* a, type v, int) {                             \
        return __atomic_fetch_add(static_cast<volatile type*>(a), v, __ATOMIC_SEQ_CST);                              \
    }                                                                                                                \
    CROSSDOCK_HOOK type __tsan_atomic##bits##_fetch_sub(volatile void* a, type v, int) {                             \
        return __atomic_fetch_sub(static_cast<volatile type*>(a), v, __ATOMIC_SEQ_CST);                              \
    }                                                                                                                \
    CROSSDOCK_HOOK type __tsan_atomic##bits##_fetch_and(volatile void* a, type v, int) {                             \
        return __atomic_fetch_and(static_cast<volatile type*>(a), v, __ATOMIC_SEQ_CST);                              \
    }                                                                                                                \
    CROSSDOCK_HOOK type __tsan_atomic##bits##_fetch_or(volatile void* a, type v, int) {                              \
        return __atomic_fetch_or(static_cast<volatile type*>(a), v, __ATOMIC_SEQ_CST);                               \
    }                                                                                                                \
    CROSSDOCK_HOOK bool __tsan_atomic##bits##_compare_exchange_strong(volatile void* a, void* e, type d, int, int) { \
        return __atomic_compare_exchange_n(static_cast<volatile type*>(a), static_cast<type*>(e), d, false,          \
                                           __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                                      \
    }                                                                                                                \
    CROSSDOCK_HOOK bool __tsan_atomic##bits##_compare_exchange_weak(volatile void* a, void* e, type d, int, int) {   \
        return __atomic_compare_exchange_n(static_cast<volatile type*>(a), static_cast<type*>(e), d, false,          \
                                           __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                                      \
    }
CROSSDOCK_ATOMICS(8, uint8_t)
CROSSDOCK_ATOMICS(16, uint16_t)
CROSSDOCK_ATOMICS(32, uint32_t)
CROSSDOCK_ATOMICS(64, uint64_t)
#undef CROSSDOCK_ATOMICS
CROSSDOCK_HOOK void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
CROSSDOCK_HOOK void __tsan_atomic_signal_fence(int) {}
