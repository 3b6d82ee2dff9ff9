// SPDX-License-Identifier: Apache-2.0
#include "core/ht/arena.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "runtime/runtime.h"

namespace crossdock {
namespace {

// Blocks per operation on this rank. Kernels of ranks that share a device must all be resident at once.
uint32_t blocks_for(const Communicator& communicator, uint32_t device_sms, uint32_t sms) {
    if (const uint32_t blocks = communicator.backend().blocks; blocks > 0) return blocks;
    return std::max(1u, std::min(sms, device_sms / static_cast<uint32_t>(communicator.ranks_on_device())));
}

uint32_t slots_for(const BackendTraits& backend, const GroupConfig& config, uint64_t rings, uint64_t packet_bytes) {
    if (backend.ring_slots > 0) return backend.ring_slots;
    const bool is_deep =
        backend.has_deep_rings && !config.has_several_teams() && config.zero_copy != NCCL_EP_ZERO_COPY_ON;
    const uint64_t slots = (is_deep ? kHtDeepRingBytes : kHtCachedRingBytes) / (rings * packet_bytes);
    return static_cast<uint32_t>(
        std::clamp<uint64_t>(slots, kHtFewestSlots, is_deep ? kMaxRingSlots : kHtMostCachedSlots));
}

// A packet, and a bound for the largest one: rows of choices, with what travels beside elastic ones.
struct PacketBytes {
    uint64_t of_rows;
    uint64_t largest;

    // ranks: whose rows of a token one packet can have.
    PacketBytes(const GroupConfig& config, uint32_t ranks) : of_rows(align_up(config.max_token_bytes, 128)) {
        const uint32_t topk = most_topk(config);
        const uint64_t rows = config.invariant ? rows_of_token(topk, config.experts_per_rank() * ranks) : 1;
        largest = align_up(rows * config.max_token_bytes + routing_bytes(topk) + kRowCountBytes, 128);
    }

  private:
    static uint32_t most_topk(const GroupConfig& config) {
        const uint32_t largest = std::min<uint32_t>(kMaxTopk, config.num_experts);
        return config.num_topk > 0 ? std::min(config.num_topk, largest) : largest;
    }
};

// Slots of a ring of rows between teams. A credit covers half of the slots, and a put at most as many, so more slots
// need fewer of both.
uint32_t gin_ring_bytes(const BackendTraits& backend, const GroupConfig& config, uint32_t channels) {
    const PacketBytes packet(config, config.lsa_team_size);
    const uint64_t rings = uint64_t{2} * (config.num_ranks / config.lsa_team_size) * channels;
    const uint64_t fewest = backend.ring_slots > 0 ? fixed_gin_slots(backend, config) : kHtFewestGinSlots;
    const uint64_t slots = backend.ring_slots > 0 ? fewest
                                                  : std::clamp(kHtGinRingBytes / (rings * packet.of_rows),
                                                               kHtFewestGinSlots, kHtMostGinSlots);
    const uint64_t bytes = std::max(slots * packet.of_rows, fewest * packet.largest);
    return static_cast<uint32_t>(std::min<uint64_t>(bytes, align_up(INT32_MAX, 128) - 128));
}

}  // namespace

HtGeometry ht_geometry(const BackendTraits& backend, const GroupConfig& config, uint32_t channels,
                       uint32_t most_channels) {
    HtGeometry geometry{};
    geometry.num_ranks = config.num_ranks;
    geometry.experts_per_rank = config.experts_per_rank();
    geometry.max_tokens = config.max_tokens;
    geometry.channels = channels;
    const PacketBytes packet(config, 1);
    constexpr uint64_t kMostSlotsOfChoices = 8;
    uint64_t fewest = backend.ring_slots > 0 ? backend.ring_slots : kHtFewestSlots;
    if (backend.ring_slots == 0 && config.invariant) {
        fewest = std::clamp<uint64_t>(kHtChoicesRingBytes / (geometry.num_rings() * packet.largest), kHtFewestSlots,
                                      kMostSlotsOfChoices);
    }
    const uint64_t ring = std::max(packet.of_rows * slots_for(backend, config, geometry.num_rings(), packet.of_rows),
                                   packet.largest * fewest);
    constexpr uint64_t kLargestBytes = uint64_t{1} << 48;
    require(ring <= INT32_MAX && geometry.num_rings() <= kLargestBytes / ring, ncclInvalidArgument,
            "config->max_token_bytes is {}, allowed with {} ranks: rings of less than 2^31 bytes, {} are needed",
            config.max_token_bytes, config.num_ranks, ring);
    if (const uint64_t between = PacketBytes(config, config.lsa_team_size).largest; config.has_several_teams()) {
        require(
            2 * between <= INT32_MAX, ncclInvalidArgument,
            "config->max_token_bytes is {}, allowed in an invariant group of LSA teams of {} ranks: packets of less "
            "than 2^30 bytes between teams, {} are needed",
            config.max_token_bytes, config.lsa_team_size, between);
    }
    geometry.ring_bytes = static_cast<uint32_t>(ring);
    geometry.rings_bytes = geometry.num_rings() * (kWeightRingBytes + ring);
    geometry.most_channels = channels;
    // Where a masked rank may still write, its rings must stay apart from others'. Between teams a word of a ring is
    // raised from the value that it had in the operation before.
    geometry.rings_are_fixed = config.masking || config.has_several_teams();
    if (geometry.rings_are_fixed) return geometry;
    const uint64_t smallest = kWeightRingBytes + kHtFewestSlots * packet.largest;
    const uint64_t fitting = geometry.rings_bytes / (geometry.num_ranks * smallest);
    constexpr uint64_t kMost = (uint64_t{1} << HtAgreed::kSmsBits) - 1;
    const uint64_t most = std::min({uint64_t{most_channels}, backend.blocks > 0 ? most_channels : fitting, kMost});
    geometry.most_channels = std::max(channels, static_cast<uint32_t>(most));
    // Fixed numbers of blocks have rings of fixed sizes.
    if (backend.blocks > 0) geometry.rings_bytes = geometry.most_rings() * (kWeightRingBytes + ring);
    return geometry;
}

HtArena::HtArena(Communicator& communicator, const GroupConfig& config) {
    const uint32_t device_sms = static_cast<uint32_t>(communicator.runtime().num_sms());
    const BackendTraits& backend = communicator.backend();
    const auto blocks_of = [&](uint32_t sms) { return blocks_for(communicator, device_sms, sms); };
    const auto most_of = [&](uint32_t sms) { return std::max(blocks_of(sms), backend.most_blocks); };
    const HtBlocks own{blocks_of(config.dispatch_sms),      blocks_of(config.combine_sms),
                       blocks_of(config.flat_dispatch_sms), blocks_of(config.flat_combine_sms),
                       blocks_of(config.mxfp8_combine_sms), most_of(config.most_dispatch_sms),
                       most_of(config.most_combine_sms)};
    std::vector<HtBlocks> all(config.num_ranks);
    communicator.all_gather(&own, all.data(), sizeof(own), "ncclEpCreateGroup",
                            communicator.setup_timeout_ns(config.timeout_ns));
    blocks = own;
    for (const HtBlocks& other : all) {
        for (const auto number :
             {&HtBlocks::dispatch, &HtBlocks::combine, &HtBlocks::flat_dispatch, &HtBlocks::flat_combine,
              &HtBlocks::mxfp8_combine, &HtBlocks::most_dispatch, &HtBlocks::most_combine})
            blocks.*number = std::min(blocks.*number, other.*number);
    }
    update_blocks = blocks_of(config.update_sms);

    geometry = ht_geometry(backend, config,
                           std::max({blocks.dispatch, blocks.combine, blocks.flat_dispatch, blocks.flat_combine}),
                           std::max(blocks.most_dispatch, blocks.most_combine));
    blocks.most_dispatch = std::min(blocks.most_dispatch, geometry.most_channels);
    blocks.most_combine = std::min(blocks.most_combine, geometry.most_channels);
    blocks.mxfp8_combine = std::min(blocks.mxfp8_combine, blocks.most_combine);
    outbox = HtOutbox::of(geometry, config.num_ranks / config.lsa_team_size,
                          gin_ring_bytes(communicator.backend(), config, geometry.channels));
    const uint64_t bytes = config.has_several_teams() ? outbox.bytes : HtArenaLayout::of(geometry).bytes;
    memory = communicator.allocate_symmetric(bytes, communicator.setup_timeout_ns(config.timeout_ns));
    team.emplace(communicator, config, *memory, outbox.words);

    state = DeviceMemory(communicator.runtime(), config.alloc, sizeof(HtState));
    HtState first{};
    first.clock = config.first_epoch << kHtTicketBits;
    communicator.runtime().copy_to_device(state.data(), &first, sizeof(first), nullptr);
    communicator.runtime().synchronize(nullptr);
}

}  // namespace crossdock
