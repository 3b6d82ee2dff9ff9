// SPDX-License-Identifier: Apache-2.0
// Memory that is divided into parts. One function takes the parts one after the other, and so says all of it: where
// each part begins, of what it consists, and how many bytes there are.
//
// Memory that several ranks or kernels address is described by regions, which a Cursor lays out. What a kernel only
// looks at in its own shared memory is a view: a struct of pointers that takes its parts itself, in
// `lay_out(memory, numbers...)`.
#pragma once

#include "device/platform.h"

namespace crossdock {

CROSSDOCK_HOST_DEVICE constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

// Elements of type T, from this byte of a memory on.
template <typename T, typename Offset>
struct RegionOf {
    Offset offset;
    CROSSDOCK_HOST_DEVICE T* in(std::byte* memory) const { return reinterpret_cast<T*>(memory + offset); }
    CROSSDOCK_HOST_DEVICE const T* in(const std::byte* memory) const {
        return reinterpret_cast<const T*>(memory + offset);
    }
};
template <typename T>
using Region = RegionOf<T, uint64_t>;
template <typename T>
using SharedRegion = RegionOf<T, uint32_t>;  // of a block's shared memory

// Gives each part the bytes after the parts before it.
template <typename Number>
class CursorOf {
  public:
    // Parts begin at multiples of `alignment`.
    CROSSDOCK_HOST_DEVICE constexpr explicit CursorOf(Number alignment, Number begin = 0)
        : alignment_(alignment), end_(begin) {}

    template <typename T, typename Offset>
    CROSSDOCK_HOST_DEVICE constexpr void take(RegionOf<T, Offset>& part, Number count, Number stride = sizeof(T)) {
        const Number begin = static_cast<Number>(align_up(end_, alignment_));
        part.offset = static_cast<Offset>(begin);
        end_ = begin + count * stride;
    }
    // A part of a view: only its bytes count.
    template <typename T>
    CROSSDOCK_HOST_DEVICE constexpr void take(T*&, Number count) {
        RegionOf<T, Number> part{};
        take(part, count);
    }
    // From here on.
    CROSSDOCK_HOST_DEVICE constexpr void align(Number alignment) { alignment_ = alignment; }
    CROSSDOCK_HOST_DEVICE constexpr Number end() const { return end_; }

  private:
    Number alignment_;
    Number end_;
};
using Cursor = CursorOf<uint64_t>;

// Gives a view's pointers their places.
template <typename Number>
class ViewCursor {
  public:
    CROSSDOCK_HOST_DEVICE constexpr explicit ViewCursor(std::byte* memory) : memory_(memory) {}

    template <typename T>
    CROSSDOCK_HOST_DEVICE void take(T*& part, Number count) {
        RegionOf<T, Number> region{};
        cursor_.take(region, count);
        part = region.in(memory_);
    }
    CROSSDOCK_HOST_DEVICE constexpr void align(Number alignment) { cursor_.align(alignment); }

  private:
    std::byte* memory_;
    CursorOf<Number> cursor_{1};
};

// The view of a memory, whose parts follow each other without gaps unless it asks for an alignment. Number: a type that
// holds its bytes.
template <typename View, typename Number = uint32_t>
CROSSDOCK_HOST_DEVICE View view_of(std::byte* memory, const auto&... numbers) {
    ViewCursor<Number> cursor(memory);
    View view{};
    view.lay_out(cursor, numbers...);
    return view;
}
// The bytes between one such memory and the next.
template <typename View, typename Number = uint32_t>
CROSSDOCK_HOST_DEVICE constexpr Number view_bytes(const auto&... numbers) {
    CursorOf<Number> cursor(1);
    View view{};
    view.lay_out(cursor, numbers...);
    return static_cast<Number>(align_up(cursor.end(), 16));
}

}  // namespace crossdock
