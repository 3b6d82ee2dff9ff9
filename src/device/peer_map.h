// SPDX-License-Identifier: Apache-2.0
// The addresses of all ranks' pieces of one symmetric allocation or window in this rank's address space.
#pragma once

#include "device/layout.h"

namespace crossdock {

// Trivially copyable: hosts make it, kernels receive it by value. NCCL lays the LSA team out at one stride, the
// CPU backends give a table; a null result means that the rank is outside the LSA team.
struct PeerMap {
    std::byte* base = nullptr;
    uint64_t stride = 0;
    std::byte* const* table = nullptr;
    uint64_t offset = 0;  // added within every rank's piece

    CROSSDOCK_HOST_DEVICE std::byte* at(uint32_t rank, uint64_t bytes) const {
#if !defined(__CUDA_ARCH__)  // GPUs have no tables
        if (table != nullptr) return table[rank] + offset + bytes;
#endif
        return base + uint64_t{rank} * stride + offset + bytes;
    }
    template <typename T>
    CROSSDOCK_HOST_DEVICE T* at(uint32_t rank, const Region<T>& region) const {
        return reinterpret_cast<T*>(at(rank, region.offset));
    }
};

}  // namespace crossdock
