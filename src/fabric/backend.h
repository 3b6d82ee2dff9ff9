// SPDX-License-Identifier: Apache-2.0
// What differs between backends for who plans memory and launches: plain facts, so that only a backend's own code knows
// which one it is.
#pragma once

#include <cstdint>

namespace crossdock {

struct BackendTraits {
    const char* name;
    bool is_cpu = true;
    bool has_links = false;  // ranks may have a device each, with links between them

    // Launches. 0: chosen for each operation, out of what a GPU has.
    uint32_t blocks = 1;
    uint32_t warps = 1;           // of a block whose warps all do the same
    uint32_t warps_per_role = 1;  // of a block whose warps have roles; 1: one warp does all that a pipeline would
    uint32_t stages = 1;          // of those warps
    uint32_t pipeline_stages = 1;
    uint32_t lanes = 1;          // of a warp
    uint32_t paired_blocks = 0;  // so many first blocks of a grid run slower than all others
    bool splits_rows = false;    // rows pass through stages in parts

    // Memory.
    uint32_t ring_slots = 0;             // HT; 0: as many as fit the rings' bytes
    bool has_deep_rings = false;         // HT: rings may have more bytes than caches have
    bool own_expert_rows_stay = false;   // LL: ranks of one device send themselves no expert-major rows in a combine
    uint32_t ll128_tokens = 0;           // LL: with at most so many tokens per rank rows are LL128 rows
    uint32_t dispatch_ll128_tokens = 0;  // those of a dispatch, which may also send plain rows
    uint32_t sent_own_rows = 0;  // of a combine: if no more rows return to a rank, it sends itself its own ones, too
};

// A rank is one thread, so more warps would only add switches. Rows are copied, never in lines.
inline constexpr BackendTraits kThreadsBackend{.name = "threads"};
inline constexpr BackendTraits kProcessesBackend{.name = "processes"};

// Several of everything, for their interleavings, and little room, for rings that are often full, pipelines with fewer
// stages than rows have terms, and both forms of rows.
inline constexpr BackendTraits kSimulationBackend{
    .name = "simulation",
    .blocks = 2,
    .warps = 3,
    .warps_per_role = 2,
    .stages = 2,
    .pipeline_stages = 3,
    .ring_slots = 2,
    .ll128_tokens = 4,
    .dispatch_ll128_tokens = 2,
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
