// SPDX-License-Identifier: Apache-2.0
// Common to the routing kernels: expert ids of either type, and the division of work among warps. These kernels access
// only a rank's own memory.
#pragma once

#include "crossdock.h"
#include "device/context.h"
#include "device/numeric.h"

namespace crossdock {
namespace {

CROSSDOCK_DEVICE int64_t load_id(const void* ids, ncclDataType_t type, int64_t index) {
    if (type == ncclInt64) return static_cast<const int64_t*>(ids)[index];
    return static_cast<const int32_t*>(ids)[index];
}

CROSSDOCK_DEVICE void store_id(void* ids, ncclDataType_t type, uint64_t index, int32_t id) {
    if (type == ncclInt64) {
        static_cast<int64_t*>(ids)[index] = id;
    } else {
        static_cast<int32_t*>(ids)[index] = id;
    }
}

// Of the whole launch.
CROSSDOCK_DEVICE uint64_t first_warp(const Ctx& ctx) {
    return static_cast<uint64_t>(ctx.block_idx()) * static_cast<uint64_t>(ctx.num_warps()) +
           static_cast<uint64_t>(ctx.warp_idx());
}
CROSSDOCK_DEVICE uint64_t num_all_warps(const Ctx& ctx) {
    return static_cast<uint64_t>(ctx.num_blocks()) * static_cast<uint64_t>(ctx.num_warps());
}

}  // namespace
}  // namespace crossdock
