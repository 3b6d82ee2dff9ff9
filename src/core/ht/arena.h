// SPDX-License-Identifier: Apache-2.0
// The symmetric memory of a group in high-throughput mode, for all its handles.
#pragma once

#include <memory>
#include <optional>

#include "core/group_config.h"
#include "core/memory.h"
#include "core/team_view.h"
#include "kernels/ht/arguments.h"

namespace crossdock {

// Bytes of a rank's rings, if they are enough for the fewest slots. Rings of the first size stay in a GPU's caches.
inline constexpr uint64_t kHtCachedRingBytes = uint64_t{34} << 20;
inline constexpr uint64_t kHtDeepRingBytes = uint64_t{68} << 20;
inline constexpr uint64_t kHtChoicesRingBytes = uint64_t{192} << 20;  // invariant groups
inline constexpr uint32_t kHtFewestSlots = 2;
// The same for rows between teams, each of whose slots exists twice.
inline constexpr uint64_t kHtGinRingBytes = uint64_t{64} << 20;
inline constexpr uint64_t kHtFewestGinSlots = 4;
inline constexpr uint64_t kHtMostGinSlots = 16;
inline constexpr uint32_t kHtMostCachedSlots = 32;

// Slots of a ring between teams on a backend that has a fixed number of slots: so many that rows are put together
// there, too, two or three of them.
constexpr uint32_t fixed_gin_slots(const BackendTraits& backend, const GroupConfig& config) {
    return backend.ring_slots * (config.lsa_team_size == 1 ? 2 : 3);
}

// channels: blocks per operation, unless a handle asks for more: then up to most_channels, as far as rings of the
// fewest slots fit into the same memory.
HtGeometry ht_geometry(const BackendTraits& backend, const GroupConfig& config, uint32_t channels,
                       uint32_t most_channels);

// Blocks per operation, the same on every rank.
struct HtBlocks {
    uint32_t dispatch;  // expert-major
    uint32_t combine;
    uint32_t flat_dispatch;
    uint32_t flat_combine;
    uint32_t mxfp8_combine;
    uint32_t most_dispatch;  // that a handle may ask for
    uint32_t most_combine;
};

struct HtArena {
    HtGeometry geometry;
    HtBlocks blocks;
    uint32_t update_blocks;  // this rank's
    HtOutbox outbox;         // several teams
    std::unique_ptr<SymmetricMemory> memory;
    std::optional<TeamView> team;
    DeviceMemory state;  // HtState

    // Collective.
    HtArena(Communicator& communicator, const GroupConfig& config);
};

}  // namespace crossdock
