// SPDX-License-Identifier: Apache-2.0
// Launches fit into the shared memory that a GPU's blocks have, from 8.6's 99 KiB to 9.0's 227, or are refused with a
// message that names the limit; and kernels overlap only where their code waits for the previous ones itself.
#include <gtest/gtest.h>

#include <memory>

#include "core/ht/plan.h"
#include "core/ll/plan.h"
#include "device/mxfp8.h"
#include "messages.h"
#include "pretended_gpu.h"

namespace crossdock {
namespace {

constexpr size_t kStaticBytes = 768;  // that code before sm_90 keeps for itself (device/warp_requests.h)
constexpr size_t kLeastBytes = (99 << 10) - kStaticBytes;
constexpr size_t kDevices[] = {kLeastBytes, (163 << 10) - kStaticBytes, 227 << 10};
constexpr uint32_t kRows[] = {16, 1024, 5120, 14336, 32768, 65536};  // bytes

std::shared_ptr<Group> group_on(const PretendedDevice& device, ncclEpAlgorithm_t algorithm) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = algorithm;
    config.num_experts = 2;
    config.max_dispatch_tokens_per_rank = config.max_recv_tokens_per_rank = 4;
    config.max_token_bytes = 256;
    return Group::create(std::make_shared<PretendedGpu>(device), &config, nullptr);
}

// Calls run(group, most bytes of shared memory).
void on_each_device(ncclEpAlgorithm_t algorithm, const std::function<void(const Group&, size_t)>& run) {
    for (const size_t bytes : kDevices) {
        const auto group = group_on({.max_shared_bytes = bytes}, algorithm);
        run(*group, bytes);
        group->destroy();
    }
}

void expect_fits(const LaunchShape& shape, size_t most, uint32_t row_bytes) {
    EXPECT_LE(shape.shared_bytes, most) << row_bytes;
    EXPECT_TRUE(shape.overlaps_previous);
}

LlCommon ll_common(uint32_t ranks, uint32_t experts, uint32_t tokens, uint32_t row_bytes, bool expert_major) {
    LlCommon common{};
    common.arena = {.num_ranks = ranks,
                    .num_experts = experts,
                    .max_tokens = tokens,
                    .row_capacity = row_bytes + 512,
                    .topk = 8,
                    .cells_per_token = 8,
                    .num_buffers = kNumBuffers,
                    .ll128_tokens = row_bytes <= kMostLl128RowBytes ? tokens : 0};
    common.offsets.experts_per_rank = experts / ranks;
    common.offsets.num_slots = ranks * tokens;
    common.offsets.row_stride = common.arena.row_stride();
    common.halves = kSendHalf | kReceiveHalf;
    common.expert_major = expert_major;
    common.topk = 8;
    common.num_tokens = tokens;
    return common;
}

TEST(SmallDevices, LowLatencyFits) {
    on_each_device(NCCL_EP_ALGO_LOW_LATENCY, [](const Group& group, size_t most) {
        for (const uint32_t row_bytes : kRows) {
            for (const uint32_t tokens : {1u, 8u, 128u, 1024u}) {
                for (const bool expert_major : {false, true}) {
                    LlDispatchArgs dispatch{};
                    dispatch.common = ll_common(8, 256, tokens, row_bytes, expert_major);
                    dispatch.row_bytes = dispatch.source_row_bytes = row_bytes;
                    dispatch.scale_bytes = row_bytes / 32;
                    expect_fits(plan_ll_dispatch(group, dispatch), most, row_bytes);
                    EXPECT_GE(dispatch.common.warp_layout.num_stages, 1u);
                    EXPECT_GE(dispatch.common.warp_layout.receive_stages, 1u);
                    LlCombineArgs combine{};
                    combine.common = ll_common(8, 256, tokens, row_bytes, expert_major);
                    combine.row_bytes = combine.wire_bytes = row_bytes;
                    expect_fits(plan_ll_combine(group, combine), most, row_bytes);
                }
            }
        }
    });
}

TEST(SmallDevices, HighThroughputFits) {
    on_each_device(NCCL_EP_ALGO_HIGH_THROUGHPUT, [](const Group& group, size_t most) {
        for (const uint32_t row_bytes : kRows) {
            for (const uint32_t ranks : {2u, 8u}) {
                for (const bool expert_major : {false, true}) {
                    for (const bool has_windows : {false, true}) {
                        HtCommon common{};
                        common.arena = group.ht_arena().geometry;
                        common.arena.num_ranks = ranks;
                        common.arena.experts_per_rank = 32;
                        common.arena.ring_bytes = 4 << 20;
                        common.arena.channels = common.channels = 20;
                        common.expert_major = expert_major;
                        common.has_windows = has_windows;
                        common.topk = 8;
                        common.num_tokens = 4096;
                        HtDispatchArgs dispatch{};
                        dispatch.common = common;
                        dispatch.row_bytes = row_bytes;
                        dispatch.scale_bytes = row_bytes / 32 / 16 * 16;
                        expect_fits(plan_ht_dispatch(group, dispatch), most, row_bytes);
                        for (const HtWire wire : {HtWire::kRows, HtWire::kMxfp8}) {
                            if (wire == HtWire::kMxfp8 && (!expert_major || row_bytes % 1024 != 0)) continue;
                            HtCombineArgs combine{};
                            combine.common = common;
                            combine.wire = wire;
                            combine.row_bytes = row_bytes;
                            combine.with_weights = true;
                            expect_fits(plan_ht_combine(group, combine), most, row_bytes);
                            EXPECT_GE(combine.warp_layout.stages(), 1u);
                        }
                    }
                }
            }
        }
    });
}

// Tables of very many experts do not fit.
TEST(SmallDevices, WhatDoesNotFitNamesTheLimit) {
    const auto group = group_on({.max_shared_bytes = kLeastBytes}, NCCL_EP_ALGO_LOW_LATENCY);
    LlDispatchArgs dispatch{};
    dispatch.common = ll_common(1, 8192, 8, 32768, true);
    dispatch.row_bytes = dispatch.source_row_bytes = 32768;
    expect_mentions(message_of([&] { plan_ll_dispatch(*group, dispatch); }, ncclInvalidArgument),
                    {"shared memory", "8192 experts", std::to_string(kLeastBytes)});
    group->destroy();
}

// Code without programmatic dependent launch must not start early.
TEST(SmallDevices, OnlyKernelsThatWaitOverlap) {
    for (const bool overlaps : {false, true}) {
        const PretendedDevice device{.overlaps_kernels = overlaps};
        const auto ll = group_on(device, NCCL_EP_ALGO_LOW_LATENCY);
        LlDispatchArgs dispatch{};
        dispatch.common = ll_common(8, 256, 8, 1024, true);
        dispatch.row_bytes = dispatch.source_row_bytes = 1024;
        EXPECT_EQ(plan_ll_dispatch(*ll, dispatch).overlaps_previous, overlaps);
        LlCombineArgs combine{};
        combine.common = ll_common(8, 256, 8, 1024, true);
        combine.row_bytes = combine.wire_bytes = 1024;
        EXPECT_EQ(plan_ll_combine(*ll, combine).overlaps_previous, overlaps);
        ll->destroy();
        const auto ht = group_on(device, NCCL_EP_ALGO_HIGH_THROUGHPUT);
        HtUpdateArgs update{};
        update.common.arena = ht->ht_arena().geometry;
        EXPECT_EQ(plan_ht_update(*ht, update).overlaps_previous, overlaps);
        HtDispatchArgs sending{};
        sending.common.arena = ht->ht_arena().geometry;
        sending.common.channels = 4;
        sending.common.topk = 2;
        sending.row_bytes = 256;
        EXPECT_EQ(plan_ht_dispatch(*ht, sending).overlaps_previous, overlaps);
        HtCombineArgs returning{};
        returning.common = sending.common;
        returning.row_bytes = 256;
        EXPECT_EQ(plan_ht_combine(*ht, returning).overlaps_previous, overlaps);
        ht->destroy();
    }
}

}  // namespace
}  // namespace crossdock
