// SPDX-License-Identifier: Apache-2.0
// What high throughput's shared memory takes on GPUs, without one: there rings are many, one per block.
#include <gtest/gtest.h>

#include "core/ht/arena.h"

namespace crossdock {
namespace {

uint64_t bytes_on_gpus(uint32_t num_ranks, uint32_t channels, ncclEpZeroCopyMode_t zero_copy = NCCL_EP_ZERO_COPY_AUTO) {
    GroupConfig config;
    config.zero_copy = zero_copy;
    config.num_ranks = num_ranks;
    config.num_experts = 256;
    config.max_tokens = 4096;
    config.max_token_bytes = 14336;
    return ht_geometry(kCudaBackend, config, channels).arena_bytes();
}

// For 4096 tokens per rank, with the SMs that are taken unless told otherwise.
TEST(HtArena, NeedsAtMost40MiBWhereWindowsArePromised) {
    for (const uint32_t num_ranks : {4u, 8u}) {
        EXPECT_LE(bytes_on_gpus(num_ranks, 32, NCCL_EP_ZERO_COPY_ON), uint64_t{40} << 20) << num_ranks << " ranks";
        EXPECT_LE(bytes_on_gpus(num_ranks, 32), uint64_t{80} << 20) << num_ranks << " ranks";
    }
}

// Many ranks and blocks have rings of a few rows, not more memory in proportion.
TEST(HtArena, GrowsSlowlyWithRanks) {
    EXPECT_LE(bytes_on_gpus(64, 24), 2 * bytes_on_gpus(8, 24) + (uint64_t{64} << 20));
}

}  // namespace
}  // namespace crossdock
