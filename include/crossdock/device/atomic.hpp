// SPDX-License-Identifier: Apache-2.0
// atomicAdd and its kin (relaxed), cuda::atomic_ref, orders and scopes. Scopes are accepted and all treated as system.
#pragma once

#include <atomic>
#include <type_traits>

#include "crossdock/device/words.hpp"

namespace cuda {

enum memory_order {
    memory_order_relaxed,
    memory_order_consume,
    memory_order_acquire,
    memory_order_release,
    memory_order_acq_rel,
    memory_order_seq_cst
};
enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread };

}  // namespace cuda

namespace crossdock::device {

constexpr bool acquires(cuda::memory_order order) {
    return order != cuda::memory_order_relaxed && order != cuda::memory_order_release;
}
constexpr bool releases(cuda::memory_order order) {
    return order == cuda::memory_order_release || order == cuda::memory_order_acq_rel ||
           order == cuda::memory_order_seq_cst;
}

// Values travel as bits of an unsigned integer, so that float and double have atomics too.
template <size_t kBytes>
using Bits =
    std::conditional_t<kBytes == 1, uint8_t,
                       std::conditional_t<kBytes == 2, uint16_t, std::conditional_t<kBytes == 4, uint32_t, uint64_t>>>;
template <typename T>
Bits<sizeof(T)> bits_of(T value) {
    Bits<sizeof(T)> bits;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <typename T>
T from_bits(Bits<sizeof(T)> bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

// The accesses themselves, which the simulator's watch on plain accesses is not to see.
#define CROSSDOCK_UNWATCHED __attribute__((no_sanitize("thread"), noinline))

template <typename T>
CROSSDOCK_UNWATCHED T load_bits(const T* address) {
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "atomics have 1 to 8 bytes");
    return from_bits<T>(__atomic_load_n(reinterpret_cast<const Bits<sizeof(T)>*>(address), __ATOMIC_SEQ_CST));
}
template <typename T>
CROSSDOCK_UNWATCHED void store_bits(T* address, T value) {
    __atomic_store_n(reinterpret_cast<Bits<sizeof(T)>*>(address), bits_of(value), __ATOMIC_SEQ_CST);
}
template <typename T>
CROSSDOCK_UNWATCHED bool swap_bits(T* address, T& expected, T desired) {
    auto bits = bits_of(expected);
    const bool swapped = __atomic_compare_exchange_n(reinterpret_cast<Bits<sizeof(T)>*>(address), &bits,
                                                     bits_of(desired), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    expected = from_bits<T>(bits);
    return swapped;
}

template <typename T>
T atomic_load(const T* address, cuda::memory_order order) {
    crossdockBeforeAtomic(address, sizeof(T), false, false);
    const T value = load_bits(address);
    crossdockAfterAtomic(address, acquires(order), true);
    return value;
}
template <typename T>
void atomic_store(T* address, T value, cuda::memory_order order) {
    crossdockBeforeAtomic(address, sizeof(T), true, releases(order));
    store_bits(address, value);
    crossdockAfterAtomic(address, false, false);
}
// *address becomes change(*address); returns what was there.
template <typename T, typename Change>
T atomic_update(T* address, cuda::memory_order order, Change change) {
    crossdockBeforeAtomic(address, sizeof(T), true, releases(order));
    T before = load_bits(address);
    while (!swap_bits(address, before, static_cast<T>(change(before)))) {
    }
    crossdockAfterAtomic(address, acquires(order), false);
    return before;
}
template <typename T>
bool atomic_compare_exchange(T* address, T& expected, T desired, cuda::memory_order order) {
    crossdockBeforeAtomic(address, sizeof(T), true, releases(order));
    const bool swapped = swap_bits(address, expected, desired);
    crossdockAfterAtomic(address, acquires(order), !swapped);
    return swapped;
}

}  // namespace crossdock::device

namespace cuda {

template <typename T, thread_scope kScope = thread_scope_system>
class atomic_ref {
  public:
    explicit atomic_ref(T& object) : address_(&object) {}

    T load(memory_order order = memory_order_seq_cst) const { return crossdock::device::atomic_load(address_, order); }
    void store(T value, memory_order order = memory_order_seq_cst) const {
        crossdock::device::atomic_store(address_, value, order);
    }
    T exchange(T value, memory_order order = memory_order_seq_cst) const {
        return crossdock::device::atomic_update(address_, order, [&](T) { return value; });
    }
    bool compare_exchange_strong(T& expected, T desired, memory_order order = memory_order_seq_cst) const {
        return crossdock::device::atomic_compare_exchange(address_, expected, desired, order);
    }
    bool compare_exchange_weak(T& expected, T desired, memory_order order = memory_order_seq_cst) const {
        return compare_exchange_strong(expected, desired, order);
    }
    T fetch_add(T value, memory_order order = memory_order_seq_cst) const {
        return crossdock::device::atomic_update(address_, order, [&](T before) { return before + value; });
    }
    T fetch_sub(T value, memory_order order = memory_order_seq_cst) const {
        return crossdock::device::atomic_update(address_, order, [&](T before) { return before - value; });
    }
    T fetch_max(T value, memory_order order = memory_order_seq_cst) const {
        return crossdock::device::atomic_update(address_, order, [&](T before) { return std::max(before, value); });
    }
    T fetch_min(T value, memory_order order = memory_order_seq_cst) const {
        return crossdock::device::atomic_update(address_, order, [&](T before) { return std::min(before, value); });
    }
    T fetch_and(T value, memory_order order = memory_order_seq_cst) const {
        return crossdock::device::atomic_update(address_, order, [&](T before) { return before & value; });
    }
    T fetch_or(T value, memory_order order = memory_order_seq_cst) const {
        return crossdock::device::atomic_update(address_, order, [&](T before) { return before | value; });
    }

  private:
    T* address_;
};

// A fence of relaxed order is none.
inline void atomic_thread_fence(memory_order order, thread_scope = thread_scope_system) {
    if (order != memory_order_relaxed) crossdockFenceMemory(crossdockFenceSystem);
}

}  // namespace cuda

#define CROSSDOCK_ATOMIC(name, expression)                                                              \
    template <typename T>                                                                               \
    T name(T* address, std::type_identity_t<T> value) {                                                 \
        return crossdock::device::atomic_update(address, cuda::memory_order_relaxed,                    \
                                                [&]([[maybe_unused]] T before) { return expression; }); \
    }
CROSSDOCK_ATOMIC(atomicAdd, before + value)
CROSSDOCK_ATOMIC(atomicSub, before - value)
CROSSDOCK_ATOMIC(atomicExch, value)
CROSSDOCK_ATOMIC(atomicMax, std::max(before, value))
CROSSDOCK_ATOMIC(atomicMin, std::min(before, value))
CROSSDOCK_ATOMIC(atomicAnd, before& value)
CROSSDOCK_ATOMIC(atomicOr, before | value)
CROSSDOCK_ATOMIC(atomicXor, before ^ value)
#undef CROSSDOCK_ATOMIC
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
    crossdock::device::atomic_compare_exchange(address, expected, desired, cuda::memory_order_relaxed);
    return expected;
}
