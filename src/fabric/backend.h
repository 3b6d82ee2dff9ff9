// SPDX-License-Identifier: Apache-2.0
// What the planners of memory and launches must know about a backend. Plain values, so that only a backend's own code
// knows which one it is.
#pragma once

#include <cstdint>

namespace crossdock {

struct BackendTraits {
    const char* name;
    bool is_cpu = true;
    bool has_links = false;  // ranks may have a device each, with links between them

    // Launches. 0: chosen per operation from the GPU's properties.
    uint32_t blocks = 1;
    uint32_t most_blocks = 0;     // HT: more than `blocks`, if a handle asks for them
    uint32_t warps = 1;           // per block, if all warps have the same role
    uint32_t warps_per_role = 1;  // if a block's warps have roles; 1: one warp does all steps of a pipeline
    uint32_t stages = 1;          // per warp
    uint32_t pipeline_stages = 1;
    uint32_t lanes = 1;          // per warp
    uint32_t paired_blocks = 0;  // number of leading blocks of a grid that share a TPC and so run slower
    bool splits_rows = false;    // rows pass through stages in parts

    // Memory.
    uint32_t ring_slots = 0;             // HT; 0: as many as fit into the rings' bytes
    bool has_deep_rings = false;         // HT: rings may be larger than the caches
    bool own_expert_rows_stay = false;   // LL: ranks of one device send themselves no expert-major rows in a combine
    uint32_t ll128_tokens = 0;           // LL: rows are LL128 rows up to this number of tokens per rank
    uint32_t dispatch_ll128_tokens = 0;  // the same for dispatch, which may also send plain rows
    uint32_t sent_own_rows = 0;  // combine: up to this number of rows, own ones are sent, too, not summed in place
};

// A rank is one thread, so more warps would only add context switches. Rows are plain, never LL128 rows.
inline constexpr BackendTraits kThreadsBackend{.name = "threads"};
inline constexpr BackendTraits kProcessesBackend{.name = "processes"};

// Several blocks and warps, to simulate their interleavings; few slots and stages, so that rings are often full and
// pipelines have fewer stages than a sum has rows; both forms of rows.
inline constexpr BackendTraits kSimulationBackend{
    .name = "simulation",
    .blocks = 2,
    .most_blocks = 3,
    .warps = 3,
    .warps_per_role = 2,
    .stages = 2,
    .pipeline_stages = 3,
    .ring_slots = 2,
    .ll128_tokens = 4,
    .dispatch_ll128_tokens = 1,
    .sent_own_rows = 4,
};

// An H200 puts a grid's first 8 blocks on the 8 SMs that cannot hold clusters: on four TPCs in pairs, while all others
// have a TPC of their own.
inline constexpr BackendTraits kCudaBackend{
    .name = "cuda",
    .is_cpu = false,
    .has_links = true,
    .blocks = 0,
    .warps = 0,
    .warps_per_role = 0,
    .stages = 0,
    .pipeline_stages = 0,
    .lanes = 32,
    .paired_blocks = 8,
    .splits_rows = true,
    .has_deep_rings = true,
    .own_expert_rows_stay = true,
    .ll128_tokens = UINT32_MAX,
    .dispatch_ll128_tokens = UINT32_MAX,
    .sent_own_rows = 64,
};

}  // namespace crossdock
