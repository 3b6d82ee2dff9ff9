// SPDX-License-Identifier: Apache-2.0
// What a device cannot do is ncclInvalidUsage, judged before any other argument; the message names what it has and what
// is needed.
#include "core/device_support.h"

#include <gtest/gtest.h>

#include <string>

#include "core/error.h"
#include "core/handle.h"
#include "messages.h"
#include "pretended_gpu.h"

namespace crossdock {
namespace {

TEST(DeviceSupport, Fp4NeedsAGpuThatConverts) {
    for (const int capability : {0, 80, 90, 100, 101, 103, 110, 120, 121}) {
        for (const unsigned int other : {NCCL_EP_COMB_QUANT_NONE, NCCL_EP_COMB_QUANT_MXFP8})
            EXPECT_NO_THROW(expect_supported_combine(other, capability)) << capability;
    }
    const auto ask = [](int capability) { expect_supported_combine(NCCL_EP_COMB_QUANT_NVFP4, capability); };
    for (const int capable : {0, 100, 103, 110, 120, 121}) EXPECT_NO_THROW(ask(capable)) << capable;
    for (const int capability : {80, 90, 101}) {
        const std::string own = fmt::format("this one has {}.{}", capability / 10, capability % 10);
        expect_mentions(message_of([=] { ask(capability); }, ncclInvalidUsage), {"compute capability 10.0", own});
    }
}

ncclEpGroupConfig_t config_of(ncclEpAlgorithm_t algorithm) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = algorithm;
    config.num_experts = 2;
    config.max_dispatch_tokens_per_rank = config.max_recv_tokens_per_rank = 4;
    config.max_token_bytes = 256;
    return config;
}

TEST(DeviceSupport, CombinesJudgeTheDeviceFirst) {
    for (const ncclEpLayout_t layout : {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR, NCCL_EP_LAYOUT_FLAT}) {
        for (const ncclEpAlgorithm_t algorithm : {NCCL_EP_ALGO_LOW_LATENCY, NCCL_EP_ALGO_HIGH_THROUGHPUT}) {
            const bool is_ht = algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT;
            if (layout == (is_ht ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_FLAT)) continue;
            const ncclEpGroupConfig_t config = config_of(algorithm);
            const auto group =
                Group::create(std::make_shared<PretendedGpu>(PretendedDevice{.num_sms = 8}), &config, nullptr);
            const auto handle = Handle::create(group, layout, nullptr, 1, nullptr);
            ncclEpCombineConfig_t settings = NCCL_EP_COMBINE_CONFIG_INIT;
            settings.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4;
            settings.pass_direction = NCCL_EP_BWD_PASS;
            expect_mentions(
                message_of([&] { handle->combine(nullptr, nullptr, &settings, nullptr); }, ncclInvalidUsage),
                {"NVFP4", "this one has 9.0"});
            group->destroy();
        }
    }
}

TEST(DeviceSupport, GroupsJudgeTheDeviceFirst) {
    using Field = unsigned int ncclEpGroupConfig_t::*;
    for (const auto& [field, name] : {std::pair<Field, const char*>{&ncclEpGroupConfig_t::max_num_sms, "max_num_sms"},
                                      {&ncclEpGroupConfig_t::dispatch_num_sms, "dispatch_num_sms"},
                                      {&ncclEpGroupConfig_t::combine_num_sms, "combine_num_sms"}}) {
        ncclEpGroupConfig_t config = config_of(NCCL_EP_ALGO_HIGH_THROUGHPUT);
        config.*field = 9;
        config.num_experts = config.max_token_bytes = 0;
        expect_mentions(
            message_of(
                [&] { Group::create(std::make_shared<PretendedGpu>(PretendedDevice{.num_sms = 8}), &config, nullptr); },
                ncclInvalidUsage),
            {name, "is 9", "8 SMs"});
    }
}

}  // namespace
}  // namespace crossdock
