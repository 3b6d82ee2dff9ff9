// SPDX-License-Identifier: Apache-2.0
// Groups whose symmetric memory is the host's: few blocks, plain rows, and no zero copy, whatever the caller asks for.
#include <gtest/gtest.h>

#include "core/group.h"
#include "core/ll/arena.h"
#include "core/ll/plan.h"
#include "pretended_gpu.h"

namespace crossdock {
namespace {

std::shared_ptr<Group> group_of(ncclEpAlgorithm_t algorithm, unsigned int max_num_sms, bool shares_host_memory = true,
                                size_t max_shared_bytes = PretendedDevice{}.max_shared_bytes) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = algorithm;
    config.num_experts = 8;
    config.max_dispatch_tokens_per_rank = config.max_recv_tokens_per_rank = 128;
    config.max_token_bytes = 14336;
    config.max_num_sms = max_num_sms;
    config.zero_copy = NCCL_EP_ZERO_COPY_ON;
    const PretendedDevice device{.max_shared_bytes = max_shared_bytes, .shares_host_memory = shares_host_memory};
    return Group::create(std::make_shared<PretendedGpu>(device), &config, nullptr);
}

TEST(HostMemory, HighThroughputTakesFewSms) {
    struct {
        unsigned int max_num_sms;
        uint32_t operations;
        uint32_t most;
        uint32_t update;
    } const expected[] = {{0, 16, 32, 8}, {4, 4, 4, 4}, {24, 24, 24, 24}, {132, 32, 32, 32}};
    for (const auto& [max_num_sms, operations, most, update] : expected) {
        const auto group = group_of(NCCL_EP_ALGO_HIGH_THROUGHPUT, max_num_sms);
        const GroupConfig& config = group->config();
        EXPECT_EQ(config.dispatch_sms, operations) << max_num_sms;
        EXPECT_EQ(config.combine_sms, operations) << max_num_sms;
        EXPECT_EQ(config.flat_dispatch_sms, operations) << max_num_sms;
        EXPECT_EQ(config.flat_combine_sms, operations) << max_num_sms;
        EXPECT_EQ(config.most_dispatch_sms, most) << max_num_sms;
        EXPECT_EQ(config.most_combine_sms, most) << max_num_sms;
        EXPECT_EQ(config.update_sms, update) << max_num_sms;
        EXPECT_EQ(config.zero_copy, NCCL_EP_ZERO_COPY_OFF);
        group->destroy();
    }
    const auto linked = group_of(NCCL_EP_ALGO_HIGH_THROUGHPUT, 0, false);
    EXPECT_EQ(linked->config().dispatch_sms, 64u);
    EXPECT_EQ(linked->config().zero_copy, NCCL_EP_ZERO_COPY_ON);
    linked->destroy();
}

LlCommon common_of(uint32_t tokens) {
    LlCommon common{};
    common.arena = {.num_ranks = 2,
                    .num_experts = 8,
                    .max_tokens = 128,
                    .row_capacity = 14336 + 512,
                    .topk = 8,
                    .is_in_host_memory = true,
                    .cells_per_token = 8,
                    .num_buffers = kNumBuffers,
                    .ll128_tokens = 0};
    common.offsets = LlArenaLayout::of(common.arena).offsets;
    common.halves = kSendHalf | kReceiveHalf;
    common.topk = 8;
    common.num_tokens = tokens;
    return common;
}

LlCombineArgs combine_of(uint32_t tokens, bool expert_major, uint32_t row_bytes = 14336) {
    LlCombineArgs combine{};
    combine.common = common_of(tokens);
    combine.common.expert_major = expert_major;
    combine.row_bytes = combine.wire_bytes = row_bytes;
    return combine;
}

TEST(HostMemory, LowLatencyTakesFewBlocks) {
    struct {
        uint32_t tokens;
        int dispatch;
        int combine;
        uint32_t parts;  // of a row that warps of a combine sum
        int expert_major_combine;
    } const expected[] = {
        {0, 4, 2, 14, 2}, {1, 4, 2, 14, 2}, {8, 4, 2, 2, 4}, {64, 16, 8, 1, 32}, {128, 16, 16, 1, 32}};
    const auto group = group_of(NCCL_EP_ALGO_LOW_LATENCY, 0);
    for (const auto& [tokens, dispatch_blocks, combine_blocks, parts, expert_major_blocks] : expected) {
        LlDispatchArgs dispatch{};
        dispatch.common = common_of(tokens);
        dispatch.row_bytes = dispatch.source_row_bytes = 14336;
        EXPECT_EQ(plan_ll_dispatch(*group, dispatch).num_blocks, dispatch_blocks) << tokens;
        LlCombineArgs combine = combine_of(tokens, false);
        EXPECT_EQ(plan_ll_combine(*group, combine).num_blocks, combine_blocks) << tokens;
        EXPECT_EQ(combine.segments, parts) << tokens;
        EXPECT_TRUE(combine.own_rows_stay) << tokens;
        LlCombineArgs expert_major = combine_of(tokens, true);
        EXPECT_EQ(plan_ll_combine(*group, expert_major).num_blocks, expert_major_blocks) << tokens;
    }
    GroupConfig config = group->config();
    config.ll128 = true;  // as CROSSDOCK_LL128=1
    EXPECT_EQ(ll128_tokens_of(group->communicator(), config), 0u);
    group->destroy();
}

// Every warp of a combine has a stage for the rows that it sums, also where blocks have little shared memory.
TEST(HostMemory, SumsAreStaged) {
    for (const size_t bytes : {size_t{101376}, size_t{166912}, size_t{232448}}) {  // 99 KiB (sm_89), 163 and 227
        const auto group = group_of(NCCL_EP_ALGO_LOW_LATENCY, 0, true, bytes);
        LlCombineArgs combine = combine_of(128, true);
        const LaunchShape shape = plan_ll_combine(*group, combine);
        const LlCombineShared& shared = combine.shared;
        EXPECT_LE(shape.shared_bytes, bytes);
        EXPECT_GE(shared.receive_stage_bytes, kStageHeadBytes + 8192) << bytes;
        EXPECT_GE(shared.bytes, shared.receive_stages.offset +
                                    uint64_t{shared.receive_stage_bytes} * combine.common.warp_layout.warps_per_block);
        LlCombineArgs linked = combine_of(128, true);
        linked.common.arena.is_in_host_memory = false;
        plan_ll_combine(*group, linked);
        EXPECT_EQ(linked.shared.receive_stage_bytes, 0u);
        group->destroy();
    }
}

// Rows that leave no room for them pass through no stage.
TEST(HostMemory, LargeRowsNeedNoStagesForSums) {
    const size_t bytes = 101376 - 768;  // sm_89, without what its kernels declare themselves
    const auto group = group_of(NCCL_EP_ALGO_LOW_LATENCY, 0, true, bytes);
    LlCombineArgs combine = combine_of(8, true, 32768);
    EXPECT_LE(plan_ll_combine(*group, combine).shared_bytes, bytes);
    EXPECT_EQ(combine.shared.receive_stage_bytes, 0u);
    EXPECT_GE(combine.common.warp_layout.num_stages, 2u);
    group->destroy();
}

}  // namespace
}  // namespace crossdock
