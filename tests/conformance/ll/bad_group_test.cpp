// SPDX-License-Identifier: Apache-2.0
// Wrong groups, handles and tensors get their code and a message; outputs stay as they were.
#include <gtest/gtest.h>

#include <algorithm>

#include "conformance/support/bad_call.h"
#include "conformance/support/random_problem.h"

namespace crossdock::testing {
namespace {

ncclEpGroupConfig_t good_config(RankContext& context) { return good_group_config(context, NCCL_EP_ALGO_LOW_LATENCY); }

const Spoiled<GroupCall> kGroups[] = {
    {"experts that cannot be numbered", [](GroupCall& c) { c.config.num_experts *= 65536; }, "num_experts"},
    {"tokens that cannot be numbered", [](GroupCall& c) { c.config.max_dispatch_tokens_per_rank = 1 << 18; },
     "max_dispatch_tokens_per_rank"},
};

TEST(BadGroup, NumbersHaveLimits) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt,
                     [](RankContext& context) { check_group_refusals(context, NCCL_EP_ALGO_LOW_LATENCY, kGroups); });
    });
}

// Ranks that do not agree are told so, all of them.
TEST(BadGroup, RanksMustAgree) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            ncclEpGroupConfig_t config = good_config(context);
            if (context.rank() == 1) config.max_dispatch_tokens_per_rank += 1;
            ncclEpGroup_t group = nullptr;
            RANK_REFUSED(context, ncclInvalidUsage, "max_dispatch_tokens_per_rank",
                         ncclEpCreateGroup(&group, context.comm(), &config));
            RANK_CHECK(context, group == nullptr, "a group was written");
            RANK_OK(context, ncclEpCreateGroup(&group, context.comm(), &(config = good_config(context))));
            RANK_OK(context, ncclEpGroupDestroy(group));
        });
    });
}

// A group whose ranks would receive more rows than kernels can number has no handles of that layout.
TEST(BadGroup, RowsMustBeNumbered) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            ncclEpGroupConfig_t config = good_config(context);
            config.num_experts *= 4096;
            config.max_dispatch_tokens_per_rank = (1 << 18) - 1;
            config.max_token_bytes = 16;
            ncclEpGroup_t group = nullptr;
            ncclEpHandle_t handle = nullptr;
            RANK_OK(context, ncclEpCreateGroup(&group, context.comm(), &config));
            RANK_REFUSED(context, ncclInvalidArgument, "max_dispatch_tokens_per_rank",
                         ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, nullptr, 2, nullptr));
            RANK_CHECK(context, handle == nullptr, "a handle was written");
            RANK_OK(context, ncclEpGroupDestroy(group));
        });
    });
}

TEST(BadGroup, NothingIsDestroyedTwiceOrFromNull) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            RANK_OK(context, ncclEpGroupDestroy(nullptr));
            RANK_OK(context, ncclEpHandleDestroy(nullptr));
            RANK_OK(context, ncclEpTensorDestroy(nullptr));
        });
    });
}

TEST(BadGroup, Handles) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Victim victim(context, kLowLatency, NCCL_EP_LAYOUT_EXPERT_MAJOR);
            const ncclEpGroup_t group = victim.group();
            const int experts = victim.problem().num_experts;
            constexpr auto kLayout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
            ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
            size_t bytes = 99;
            RANK_REFUSED(context, ncclInvalidArgument, "group",
                         ncclEpHandleMemSize(nullptr, kLayout, nullptr, &bytes, 2));
            RANK_REFUSED(context, ncclInvalidArgument, "size_out",
                         ncclEpHandleMemSize(group, kLayout, nullptr, nullptr, 2));
            RANK_REFUSED(context, ncclInvalidArgument, "num_topk",
                         ncclEpHandleMemSize(group, kLayout, nullptr, &bytes, 0));
            RANK_REFUSED(context, ncclInvalidArgument, "layout",
                         ncclEpHandleMemSize(group, NCCL_EP_LAYOUT_UNSET, nullptr, &bytes, 2));
            RANK_REFUSED(context, ncclInvalidArgument, "layout",
                         ncclEpHandleMemSize(group, NCCL_EP_LAYOUT_FLAT, nullptr, &bytes, 2));
            RANK_CHECK(context, bytes == 99, "a refused call wrote {}", bytes);

            ncclEpHandle_t handle = reinterpret_cast<ncclEpHandle_t>(0x99);
            const auto init = [&](ncclEpLayout_t layout, int num_topk, const ncclEpTensor_t* memory) {
                handle = reinterpret_cast<ncclEpHandle_t>(0x99);
                return ncclEpInitHandle(&handle, group, layout, &config, num_topk, memory);
            };
            RANK_REFUSED(context, ncclInvalidArgument, "handle",
                         ncclEpInitHandle(nullptr, group, kLayout, &config, 2, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "group",
                         ncclEpInitHandle(&handle, nullptr, kLayout, &config, 2, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "layout", init(NCCL_EP_LAYOUT_UNSET, 2, nullptr));
            RANK_CHECK(context, handle == nullptr, "a failed ncclEpInitHandle left *handle as it was");
            RANK_REFUSED(context, ncclInvalidArgument, "layout", init(NCCL_EP_LAYOUT_FLAT, 2, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "layout", init(static_cast<ncclEpLayout_t>(17), 2, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "num_topk", init(kLayout, 0, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "num_topk", init(kLayout, -1, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "num_topk", init(kLayout, experts + 1, nullptr));
            config.dispatch_output_per_expert_alignment = 3;
            RANK_REFUSED(context, ncclInvalidArgument, "dispatch_output_per_expert_alignment",
                         init(kLayout, 2, nullptr));
            config = NCCL_EP_HANDLE_CONFIG_INIT;
            config.size = 15;
            RANK_REFUSED(context, ncclInvalidArgument, "size", init(kLayout, 2, nullptr));
            config = NCCL_EP_HANDLE_CONFIG_INIT;

            RANK_OK(context, ncclEpHandleMemSize(group, kLayout, nullptr, &bytes, 2));
            OpenTensor memory;
            memory.set(ncclUint8, {bytes - 1}, victim.output());
            RANK_REFUSED(context, ncclInvalidArgument, "handle_mem", init(kLayout, 2, &memory.tensor));
            memory.set(ncclInt32, {bytes}, victim.output());
            RANK_REFUSED(context, ncclInvalidArgument, "handle_mem", init(kLayout, 2, &memory.tensor));
            memory.set(ncclUint8, {1, bytes}, victim.output());
            RANK_REFUSED(context, ncclInvalidArgument, "handle_mem", init(kLayout, 2, &memory.tensor));
            victim.check_untouched("refused handles");
            victim.check_working();
        });
    });
}

TEST(BadGroup, Routings) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Victim victim(context, kLowLatency, NCCL_EP_LAYOUT_RANK_MAJOR);
            OpenTensor ids;
            ncclEpHandle_t made = nullptr;
            const auto update = [&](ncclDataType_t type, std::initializer_list<size_t> sizes) {
                ids.set(type, sizes, victim.input());
                return ncclEpUpdateHandle(victim.handle(), &ids.tensor, nullptr, nullptr);
            };
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx",
                         ncclEpUpdateHandle(victim.handle(), nullptr, nullptr, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx", update(ncclFloat32, {3, 2}));
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx", update(ncclInt32, {3}));
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx", update(ncclInt32, {3, 2, 1}));
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx", update(ncclInt32, {3, 3}));
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx", update(ncclInt32, {5, 2}));
            ids.set(ncclInt32, {3, 2}, victim.input() + 2);
            RANK_REFUSED(context, ncclInvalidArgument, "a multiple of 4",
                         ncclEpUpdateHandle(victim.handle(), &ids.tensor, nullptr, nullptr));
            ids.set(ncclInt64, {3, 2}, victim.input() + 4);
            RANK_REFUSED(context, ncclInvalidArgument, "a multiple of 8",
                         ncclEpUpdateHandle(victim.handle(), &ids.tensor, nullptr, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "a multiple of 8",
                         ncclEpCreateHandle(&made, victim.group(), NCCL_EP_LAYOUT_RANK_MAJOR, &ids.tensor, nullptr,
                                            nullptr, nullptr));
            ids.set(ncclInt32, {3, 2}, victim.input());
            RANK_REFUSED(context, ncclInvalidArgument, "handle",
                         ncclEpUpdateHandle(nullptr, &ids.tensor, nullptr, nullptr));
            const ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
            RANK_REFUSED(context, ncclInvalidArgument, "layout_info",
                         ncclEpUpdateHandle(victim.handle(), &ids.tensor, &info, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "layout_info",
                         ncclEpCreateHandle(&made, victim.group(), NCCL_EP_LAYOUT_RANK_MAJOR, &ids.tensor, &info,
                                            nullptr, nullptr));
            RANK_CHECK(context, made == nullptr, "a handle was left");
            ids.set(ncclInt32, {5, 2}, victim.input());
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx",
                         ncclEpCreateHandle(&made, victim.group(), NCCL_EP_LAYOUT_RANK_MAJOR, &ids.tensor, nullptr,
                                            nullptr, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx",
                         ncclEpCreateHandle(&made, victim.group(), NCCL_EP_LAYOUT_RANK_MAJOR, nullptr, nullptr, nullptr,
                                            nullptr));
            RANK_CHECK(context, made == nullptr, "a handle was left");
            victim.check_working();
        });
    });
}

TEST(BadGroup, Tensors) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, 1, std::nullopt, [](RankContext& context) {
            const size_t extents[] = {2, 0, 3};
            ncclEpTensor_t* tensor = nullptr;
            RANK_REFUSED(context, ncclInvalidArgument, "tensor",
                         ncclEpTensorAlloc(nullptr, 3, ncclInt8, extents, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "sizes",
                         ncclEpTensorAlloc(&tensor, 3, ncclInt8, nullptr, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "ndim",
                         ncclEpTensorAlloc(&tensor, 0, ncclInt8, extents, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "ndim is 5, allowed: 1..4",
                         ncclEpTensorAlloc(&tensor, 5, ncclInt8, extents, nullptr));
            ncclEpTensorAllocConfig_t config = NCCL_EP_TENSOR_ALLOC_CONFIG_INIT;
            config.magic = 0;
            RANK_REFUSED(context, ncclInvalidArgument, "magic",
                         ncclEpTensorAlloc(&tensor, 3, ncclInt8, extents, &config));
            RANK_CHECK(context, tensor == nullptr, "a refused call wrote a tensor");
            RANK_OK(context, ncclEpTensorAlloc(&tensor, 3, static_cast<ncclDataType_t>(55), extents, nullptr));
            RANK_CHECK(
                context,
                tensor->ndim == 3 && tensor->data == nullptr && tensor->win_hdl == nullptr && tensor->win_offset == 0,
                "the descriptor is not empty");
            RANK_CHECK(context, tensor->sizes != extents && std::equal(extents, extents + 3, tensor->sizes),
                       "extents are not a copy");
            size_t* const own = tensor->sizes;
            size_t other[] = {1, 1, 1};
            tensor->sizes = other;
            RANK_REFUSED(context, ncclInvalidArgument, "sizes", ncclEpTensorDestroy(tensor));
            tensor->sizes = own;
            RANK_OK(context, ncclEpTensorDestroy(tensor));
            OpenTensor foreign;
            foreign.set(ncclInt8, {1}, nullptr);
            RANK_REFUSED(context, ncclInvalidArgument, "ncclEpTensorAlloc", ncclEpTensorDestroy(&foreign.tensor));
        });
    });
}

TEST(BadGroup, Version) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, 1, std::nullopt, [](RankContext& context) {
            int version = 0;
            RANK_CHECK(context, ncclEpGetVersion(nullptr) == ncclInvalidArgument, "NULL was accepted");
            RANK_OK(context, ncclEpGetVersion(&version));
            RANK_CHECK(context, version == NCCL_EP_VERSION_CODE, "{}", version);
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
