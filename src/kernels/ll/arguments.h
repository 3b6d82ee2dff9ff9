// SPDX-License-Identifier: Apache-2.0
// What the low-latency kernels receive, by value. Pointers are device memory of this rank unless said otherwise.
#pragma once

#include "device/numeric.h"
#include "device/peer_map.h"
#include "device/wait.h"
#include "kernels/ll/geometry.h"

namespace crossdock {

// kCancel: with kReceiveHalf, gives the buffer of a pending operation back without reading it.
enum LlHalves : uint32_t { kSendHalf = 1, kReceiveHalf = 2, kCancel = 4 };

// Advances by one operation a kernel, on the device, so that graph replays count too. All ranks run the same operations
// in the same order, so epoch and buffer agree everywhere without a word exchanged.
struct LlArenaState {
    uint64_t next_epoch;
    uint32_t next_buffer;
    uint32_t busy_buffers;  // bit b: held by a pending send_only operation
    uint32_t blocks_done;
    uint32_t reserved;
    // uint64_t last_use[kNumBuffers][ranks]: the last operation in which this rank wrote to that peer's buffer
};

CROSSDOCK_HOST_DEVICE constexpr uint64_t arena_state_bytes(uint32_t num_ranks) {
    return sizeof(LlArenaState) + uint64_t{8} * kNumBuffers * num_ranks;
}

struct LlCommon {
    LlGeometry arena;
    PeerMap peers;  // the ranks' arenas
    int rank;
    uint32_t halves;
    LlArenaState* state;
    LlHandleGeometry handle;
    std::byte* handle_memory;
    WaitScope scope;

    bool expert_major;
    bool ids_are_64_bit;
    uint32_t topk;  // this handle's
    uint32_t num_tokens;
    const void* topk_idx;  // [tokens][topk] global expert ids
    uint32_t chunk_bytes;  // of a row in one trip through a stage
    uint32_t warps_per_block;
};

// Plain bytes (NONE, FWD) or e4m3 with one scale a block of 128 elements.
enum class LlRecipe : uint32_t { kBytes, kFp8 };
inline constexpr uint32_t kFp8Block = 128;

struct LlDispatchArgs {
    LlCommon common;
    LlRecipe recipe;
    bool round_scales;
    bool transposed_scales;  // API v1's memory order
    bool global_ids;
    uint32_t direct;  // bits of DirectPart that this rank's windows allow

    const std::byte* tokens;  // [tokens][source_row_bytes]
    uint32_t source_row_bytes;
    uint32_t row_bytes;  // as delivered
    const std::byte* scales;
    uint32_t scale_bytes;  // a row's, as delivered; 0: none
    const float* topk_weights;

    std::byte* out_tokens;
    std::byte* out_scales;
    float* out_weights;
    int32_t* out_topk_idx;
    int32_t* counters;      // may be null (rank-major)
    PeerMap token_windows;  // every rank's out_tokens and out_scales, where direct
    PeerMap scale_windows;
};

enum class LlCombineWire : uint32_t { kRows, kSums, kNvfp4 };

struct LlCombineArgs {
    LlCommon common;
    DType dtype;
    LlCombineWire wire;
    const std::byte* tokens;  // expert-major [local experts][ranks * max tokens][row_bytes], rank-major [ranks][max
                              // tokens][row_bytes]
    const float* row_scales;  // NVFP4: one a row of tokens
    uint32_t row_bytes;
    uint32_t wire_bytes;
    const float* topk_weights;  // this rank's own tokens'; expert-major
    std::byte* out_tokens;
    uint32_t segment_elements;  // of a token's sum by one warp
};

}  // namespace crossdock
