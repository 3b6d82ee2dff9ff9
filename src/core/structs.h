// SPDX-License-Identifier: Apache-2.0
// Copies of the caller's structs: any size from the first release's on; fields that the caller's size does not cover
// completely are zero; nothing is kept by reference.
#pragma once

#include <cstring>

#include "core/error.h"
#include "nccl_ep.h"

namespace crossdock {

// Fields appended by later versions are pointers or four-byte numbers: a size that ends within one does not cover it.
template <typename Struct>
inline constexpr unsigned int kAppendedFieldBytes = sizeof(unsigned int);
template <>
inline constexpr unsigned int kAppendedFieldBytes<ncclEpCombineInputs_t> = sizeof(ncclEpTensor_t*);

// A copy of *caller, which is not null. InvalidArgument if size or magic is wrong.
template <typename Struct>
Struct copy_struct(const void* caller, unsigned int smallest_size, const char* name) {
    unsigned int head[2];
    std::memcpy(head, caller, sizeof(head));
    require(head[0] >= smallest_size, ncclInvalidArgument,
            "{}->size is {}, the struct has at least {} bytes: use its INIT macro", name, head[0], smallest_size);
    require(head[1] == NCCL_EP_MAGIC, ncclInvalidArgument,
            "{}->magic is {:#x}, expected {:#x}: use the struct's INIT macro", name, head[1], NCCL_EP_MAGIC);
    Struct copy{};
    const unsigned int whole_fields = head[0] - head[0] % kAppendedFieldBytes<Struct>;
    std::memcpy(&copy, caller, whole_fields < sizeof(Struct) ? whole_fields : sizeof(Struct));
    return copy;
}

template <typename Struct>
Struct mandatory_struct(const Struct* caller, unsigned int smallest_size, const char* name) {
    require(caller != nullptr, ncclInvalidArgument, "{} is NULL", name);
    return copy_struct<Struct>(caller, smallest_size, name);
}

// All zero if the caller passed NULL.
template <typename Struct>
Struct optional_struct(const Struct* caller, unsigned int smallest_size, const char* name) {
    return caller == nullptr ? Struct{} : copy_struct<Struct>(caller, smallest_size, name);
}

// An enumerator as a number: a caller's struct may hold any bits there.
template <typename Enum>
unsigned int enum_bits(const Enum& value) {
    static_assert(sizeof(Enum) == sizeof(unsigned int), "the contract's enums are four bytes");
    unsigned int bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

}  // namespace crossdock
