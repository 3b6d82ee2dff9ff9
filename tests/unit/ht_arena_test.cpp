// SPDX-License-Identifier: Apache-2.0
// What high throughput's shared memory takes on GPUs, without one: there rings are many, one per block.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "core/error.h"
#include "core/ht/arena.h"

namespace crossdock {
namespace {

constexpr uint32_t kRowBytes = 14336;
constexpr uint32_t kDeviceSms = 132;

GroupConfig config_of(uint32_t num_ranks, ncclEpZeroCopyMode_t zero_copy = NCCL_EP_ZERO_COPY_AUTO) {
    GroupConfig config;
    config.zero_copy = zero_copy;
    config.num_ranks = config.lsa_team_size = num_ranks;
    config.num_experts = 256;
    config.max_tokens = 4096;
    config.max_token_bytes = kRowBytes;
    return config;
}

HtGeometry geometry_on_gpus(const GroupConfig& config, uint32_t channels) {
    return ht_geometry(kCudaBackend, config, channels, kDeviceSms);
}

uint64_t bytes_on_gpus(uint32_t num_ranks, uint32_t channels, ncclEpZeroCopyMode_t zero_copy = NCCL_EP_ZERO_COPY_AUTO) {
    return HtArenaLayout::of(geometry_on_gpus(config_of(num_ranks, zero_copy), channels)).bytes;
}

// For 4096 tokens per rank, with the SMs that are taken unless told otherwise.
TEST(HtArena, NeedsAtMost40MiBWhereWindowsArePromised) {
    for (const uint32_t num_ranks : {4u, 8u}) {
        EXPECT_LE(bytes_on_gpus(num_ranks, 64, NCCL_EP_ZERO_COPY_ON), uint64_t{40} << 20) << num_ranks << " ranks";
        EXPECT_LE(bytes_on_gpus(num_ranks, 64), uint64_t{80} << 20) << num_ranks << " ranks";
    }
}

// Many ranks and blocks have rings of a few rows, not more memory in proportion.
TEST(HtArena, GrowsSlowlyWithRanks) {
    EXPECT_LE(bytes_on_gpus(64, 24), 2 * bytes_on_gpus(8, 24) + (uint64_t{64} << 20));
}

// A handle may ask for more blocks than the default, as far as rings of two rows fit into the memory of the default's.
TEST(HtArena, ServesMoreBlocksFromTheSameMemory) {
    constexpr uint32_t kDefault = 32;
    for (const auto& [num_ranks, most] : {std::pair{2u, kDeviceSms}, {4u, kDeviceSms}, {8u, kDeviceSms}, {128u, 32u}}) {
        const HtGeometry arena = geometry_on_gpus(config_of(num_ranks), kDefault);
        EXPECT_EQ(arena.most_channels, most) << num_ranks << " ranks";
        // What the words of the additional blocks take.
        const HtGeometry without = ht_geometry(kCudaBackend, config_of(num_ranks), kDefault, kDefault);
        EXPECT_LE(HtArenaLayout::of(arena).bytes, HtArenaLayout::of(without).bytes + (uint64_t{4} << 20))
            << num_ranks << " ranks";
        for (uint32_t channels = 1; channels <= most; ++channels) {
            const HtGeometry divided = arena.with_channels(channels);
            SCOPED_TRACE(channels);
            EXPECT_EQ(divided.channels, channels);
            // No number of blocks leaves memory of the rings unused.
            EXPECT_GT(divided.num_rings() * (divided.ring_bytes + kWeightRingBytes + uint64_t{128}), arena.rings_bytes);
            EXPECT_GE(divided.ring_bytes, kHtFewestSlots * kRowBytes);
            EXPECT_EQ(divided.ring_bytes % 128, 0u);
            const HtArenaLayout before = HtArenaLayout::of(arena), after = HtArenaLayout::of(divided);
            const HtRings &rows = before.offsets.rows, &rows_after = after.offsets.rows;
            EXPECT_EQ(after.bytes, before.bytes);
            EXPECT_LE(rows_after.packets.offset + divided.num_rings() * divided.ring_bytes, before.bytes);
            // No word lies where an operation with another number of blocks has rows, or words of another kind.
            const auto words_of = [](const HtArenaLayout& layout) {
                const HtOffsets& parts = layout.offsets;
                return std::array{parts.rows.flags.offset,    parts.rows.credits.offset,
                                  parts.weights.flags.offset, parts.weights.credits.offset,
                                  parts.done.offset,          parts.weights.packets.offset};
            };
            EXPECT_EQ(words_of(after), words_of(before));
            EXPECT_LE(rows_after.flags.offset + 8 * divided.num_rings() * kMaxRingSlots, rows.credits.offset);
        }
    }
}

// Where a masked rank may still write, and between LSA teams, rings stay where they are.
TEST(HtArena, ServesNoMoreBlocksWithMasksOrTeams) {
    GroupConfig masked = config_of(8), teams = config_of(8);
    masked.masking = true;
    teams.lsa_team_size = 4;
    for (const GroupConfig& config : {masked, teams}) {
        const HtGeometry geometry = geometry_on_gpus(config, 32);
        EXPECT_EQ(geometry.most_channels, 32u);
        EXPECT_EQ(geometry.with_channels(24).ring_bytes, geometry.ring_bytes);
    }
}

// A packet between teams can have the rows of a team's ranks; two must fit into a ring.
TEST(HtArena, RefusesPacketsBetweenTeamsThatFitNoRing) {
    GroupConfig teams = config_of(8);
    teams.lsa_team_size = 4;
    teams.invariant = true;
    teams.num_topk = 64;
    teams.num_experts = 32;
    teams.max_token_bytes = 64u << 20;
    try {
        geometry_on_gpus(teams, 1);
        ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("invariant group of LSA teams of 4 ranks"), std::string::npos)
            << error.what();
    }
}

}  // namespace
}  // namespace crossdock
