// SPDX-License-Identifier: Apache-2.0
#include "core/ll/arena.h"

#include <algorithm>

#include "core/error.h"

namespace crossdock {
namespace {

uint64_t arena_bytes_of(const GroupConfig& config, const LlGeometry& geometry) {
    return config.has_several_teams() ? LlOutboxLayout::of(geometry).bytes : LlArenaLayout::of(geometry).bytes;
}

// The size that NVIDIA's library documents, for which its callers size the buffer.
uint64_t documented_need(const GroupConfig& config, ncclEpLayout_t layout, uint32_t topk) {
    const bool expert_major = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
    const uint64_t token_bytes = config.max_token_bytes;
    const uint64_t dispatch_row = token_bytes + align_up(4 + uint64_t{topk} * (expert_major ? 2 : 8), 16);
    const uint64_t combine_row = token_bytes + 4 * (token_bytes / 256);
    const uint64_t parts = expert_major ? config.num_experts : config.num_ranks;
    const uint64_t dispatch = (1 + uint64_t{config.num_ranks}) * config.max_tokens * dispatch_row;
    const uint64_t combine = (parts + topk) * config.max_tokens * combine_row;
    return 2 * std::max(dispatch, combine) + 2 * align_up(4 * uint64_t{config.num_experts}, 128);
}

}  // namespace

LlArena::LlArena(Communicator& communicator, const GroupConfig& config, const LlGeometry& arena_geometry)
    : geometry(arena_geometry),
      memory(communicator.allocate_symmetric(arena_bytes_of(config, arena_geometry),
                                             communicator.setup_timeout_ns(config.timeout_ns))),
      state(communicator.runtime(), config.alloc, sizeof(LlArenaState)),
      team(communicator, config, *memory,
           config.has_several_teams() ? LlOutboxLayout::of(geometry).words : GinWords{}) {
    LlArenaState first{};
    first.clock = LlClock{config.first_epoch, 0, 0}.word();
    communicator.runtime().copy_to_device(state.data(), &first, sizeof(first), nullptr);
    communicator.runtime().synchronize(nullptr);
}

uint32_t ll128_tokens_of(const Communicator& communicator, const GroupConfig& config) {
    if (communicator.shares_host_memory()) return 0;  // lines may arrive in parts, whatever the environment says
    if (!config.ll128.value_or(communicator.stores_lines_whole())) return 0;
    if (config.has_several_teams()) return 0;  // rows of GIN peers are plain, and all rows of a sum have one form
    if (align_up(config.max_token_bytes, 16) > kMostLl128RowBytes) return 0;
    return std::min(config.max_tokens, communicator.backend().ll128_tokens);
}

LlGeometry ll_geometry(const GroupConfig& config, uint32_t ll128_tokens, ncclEpLayout_t layout, uint32_t topk) {
    LlGeometry geometry{};
    geometry.num_ranks = config.num_ranks;
    geometry.num_experts = config.num_experts;
    geometry.max_tokens = config.max_tokens;
    geometry.row_capacity = static_cast<uint32_t>(align_up(config.max_token_bytes, 16));
    geometry.topk = static_cast<uint16_t>(topk);
    geometry.is_in_host_memory = config.in_host_memory;
    geometry.ll128_tokens = ll128_tokens;
    geometry.has_several_teams = config.has_several_teams();
    geometry.num_buffers = config.zero_copy == NCCL_EP_ZERO_COPY_ON ? kFewestBuffers : kNumBuffers;
    geometry.cells_per_token = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? topk : std::min(topk, config.num_ranks);
    constexpr uint64_t kLargestBytes = uint64_t{1} << 48;
    require(
        geometry.num_rows() < kLargestBytes / geometry.row_stride() / kNumBuffers, ncclInvalidArgument,
        "config->max_token_bytes is {}, which needs more than 2^48 bytes with {} tokens per rank, {} ranks and top-{}: "
        "lower it or max_dispatch_tokens_per_rank",
        config.max_token_bytes, config.max_tokens, config.num_ranks, topk);
    // Kernels number what arrives on a rank with 32 bits: choices, and the rows of its experts.
    const uint32_t a_slot = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? std::max(topk, config.experts_per_rank()) : topk;
    require(geometry.num_slots() * a_slot <= INT32_MAX, ncclInvalidArgument,
            "config->max_dispatch_tokens_per_rank is {}, allowed: at most {} with {} ranks, {} experts per rank and "
            "top-{} in this layout",
            config.max_tokens, INT32_MAX / (uint64_t{config.num_ranks} * a_slot), config.num_ranks,
            config.experts_per_rank(), topk);
    return geometry;
}

bool ll_size_is_enough(const GroupConfig& config, uint32_t ll128_tokens, ncclEpLayout_t layout, uint32_t topk) {
    const uint64_t own_need =
        LlArenaLayout::of(ll_geometry(config, ll128_tokens, layout, topk)).bytes;  // checks the numbers first
    return config.rdma_buffer_size >= std::min(documented_need(config, layout, topk), own_need);
}

}  // namespace crossdock
