// SPDX-License-Identifier: Apache-2.0
// The symmetric memory of a group's LL operations. If a handle needs more than the existing arenas have, the group
// makes another one: live handles, operations in flight and captured graphs keep theirs.
#pragma once

#include <memory>
#include <vector>

#include "core/memory.h"
#include "core/team_view.h"
#include "kernels/ll/arguments.h"

namespace crossdock {

struct LlArena {
    LlGeometry geometry;
    std::unique_ptr<SymmetricMemory> memory;
    DeviceMemory state;  // LlArenaState
    TeamView team;
    uint32_t pending_splits = 0;

    // Collective.
    LlArena(Communicator& communicator, const GroupConfig& config, const LlGeometry& geometry);

    bool fits(const LlGeometry& needed) const {
        return geometry.topk >= needed.topk && geometry.cells_per_token >= needed.cells_per_token;
    }
};

// Ranks with at most this many tokens may send LL128 rows: on GPUs that are linked by NVLink all, in threads and
// processes none, since there is no latency to save; in the simulation both forms are common.
uint32_t ll128_tokens_of(const Communicator& communicator, const GroupConfig& config);

// The arena that handles of this layout and top-k need. InvalidArgument if sizes exceed what kernels can number.
LlGeometry ll_geometry(const GroupConfig& config, uint32_t ll128_tokens, ncclEpLayout_t layout, uint32_t topk);

// Whether the caller's explicit rdma_buffer_size is enough for such handles: what this library or what NVIDIA's needs.
bool ll_size_is_enough(const GroupConfig& config, uint32_t ll128_tokens, ncclEpLayout_t layout, uint32_t topk);

}  // namespace crossdock
