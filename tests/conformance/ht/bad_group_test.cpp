// SPDX-License-Identifier: Apache-2.0
// High throughput: wrong groups, handles and updates get their code and a message; outputs stay as they were.
#include <gtest/gtest.h>

#include <cstdlib>

#include "conformance/support/bad_call.h"

namespace crossdock::testing {
namespace {

ncclEpGroupConfig_t good_config(RankContext& context) {
    return good_group_config(context, NCCL_EP_ALGO_HIGH_THROUGHPUT);
}

const Spoiled<GroupCall> kGroups[] = {
    {"token bytes of no multiple of 16", [](GroupCall& c) { c.config.max_token_bytes = 520; }, "max_token_bytes"},
    {"a budget below the tokens", [](GroupCall& c) { c.config.max_recv_tokens_per_rank = 3; },
     "max_recv_tokens_per_rank"},
    {"eager and dropping",
     [](GroupCall& c) { c.config.max_recv_tokens_per_rank = 0, c.config.overflow_policy = NCCL_EP_OVERFLOW_DROP; },
     "overflow_policy", ncclInvalidUsage},
    {"an eager bound beyond 32 bits",
     [](GroupCall& c) {
         c.config.max_recv_tokens_per_rank = 0;
         c.config.max_dispatch_tokens_per_rank = 0xFFFFFF;
         c.config.num_topk = c.config.num_experts *= 64;
     },
     "max_recv_tokens_per_rank", ncclInvalidUsage},
    {"more tokens than a packet's number counts",
     [](GroupCall& c) { c.config.max_dispatch_tokens_per_rank = c.config.max_recv_tokens_per_rank = 1 << 24; },
     "at most 16777215"},
    {"experts beyond all reason", [](GroupCall& c) { c.config.num_experts <<= 20; }, "at most 1048576"},
    {"rows beyond all reason", [](GroupCall& c) { c.config.max_token_bytes = 0xFFFFFFF0; }, "at most 1073741824"},
};

TEST(HtBadGroup, NumbersHaveLimits) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            check_group_refusals(context, NCCL_EP_ALGO_HIGH_THROUGHPUT, kGroups);
        });
    });
}

// Ranks that do not agree on the budget are told so, all of them.
TEST(HtBadGroup, RanksMustAgree) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            ncclEpGroup_t group = nullptr;
            for (const unsigned other : {65u, 0u}) {
                ncclEpGroupConfig_t config = good_config(context);
                if (context.rank() == 1) config.max_recv_tokens_per_rank = other;
                RANK_REFUSED(context, ncclInvalidUsage, "max_recv_tokens_per_rank",
                             ncclEpCreateGroup(&group, context.comm(), &config));
                RANK_CHECK(context, group == nullptr, "a group was written");
            }
            ncclEpGroupConfig_t config = good_config(context);
            if (context.rank() == 1) config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
            RANK_REFUSED(context, ncclInvalidUsage, "algorithm", ncclEpCreateGroup(&group, context.comm(), &config));
            RANK_OK(context, ncclEpCreateGroup(&group, context.comm(), &(config = good_config(context))));
            RANK_OK(context, ncclEpGroupDestroy(group));
        });
    });
}

// Both choices of one path cannot hold.
TEST(HtBadGroup, TheEnvironmentMustNotContradictItself) {
    on_each_backend({Backend::kProcesses, Backend::kThreads, Backend::kSimulation}, [](const BackendSpec& spec) {
        setenv("NCCL_EP_HT_EM_LOCAL_DUP", "1", 1);
        setenv("NCCL_EP_HT_EM_NVLINK_DUP", "on", 1);
        expect_clean(spec, 2, std::nullopt, [](RankContext& context) {
            ncclEpGroup_t group = nullptr;
            const ncclEpGroupConfig_t config = good_config(context);
            RANK_REFUSED(context, ncclInvalidUsage, "NCCL_EP_HT_EM",
                         ncclEpCreateGroup(&group, context.comm(), &config));
        });
        unsetenv("NCCL_EP_HT_EM_LOCAL_DUP");
        unsetenv("NCCL_EP_HT_EM_NVLINK_DUP");
    });
}

// Masks belong to low latency; a high-throughput group ignores enable_mask.
TEST(HtBadGroup, MasksAreRefused) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            for (const unsigned enable_mask : {0u, 1u}) {
                Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 1, kHighThroughput);
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.enable_mask = enable_mask;
                Group group(context, context.comm(), config);
                const cudaStream_t stream = context.make_stream();
                Buffer status(context, stream, static_cast<size_t>(context.num_ranks()) * sizeof(int));
                const std::vector<int> mask(context.num_ranks(), 1);
                int error = 5;
                RANK_REFUSED(context, ncclInvalidUsage, "mask",
                             ncclEpMaskQuery(group.get(), reinterpret_cast<int*>(status.data()), stream));
                RANK_REFUSED(context, ncclInvalidUsage, "mask", ncclEpMaskUpdate(group.get(), mask.data(), stream));
                RANK_REFUSED(context, ncclInvalidUsage, "mask", ncclEpMaskClean(group.get(), stream));
                RANK_REFUSED(context, ncclInvalidUsage, "mask", ncclEpGetAsyncError(group.get(), &error));
                RANK_REFUSED(context, ncclInvalidUsage, "mask", ncclEpErrorClear(group.get()));
                RANK_CHECK(context, error == 5, "a refused call wrote {}", error);
                Layer(context, group.get(), problem).round_trip();
            }
        });
    });
}

TEST(HtBadGroup, Handles) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            ncclEpGroupConfig_t group_config = good_config(context);
            group_config.num_topk = 3;
            Group owner(context, context.comm(), group_config);
            const ncclEpGroup_t group = owner.get();
            ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
            size_t bytes = 99;
            const auto size = [&](ncclEpLayout_t layout, int num_topk) {
                return ncclEpHandleMemSize(group, layout, &config, &bytes, num_topk);
            };
            RANK_REFUSED(context, ncclInvalidArgument, "layout", size(NCCL_EP_LAYOUT_UNSET, 2));
            RANK_REFUSED(context, ncclInvalidArgument, "layout", size(NCCL_EP_LAYOUT_RANK_MAJOR, 2));
            RANK_REFUSED(context, ncclInvalidArgument, "size_out",
                         ncclEpHandleMemSize(group, NCCL_EP_LAYOUT_FLAT, nullptr, nullptr, 2));
            RANK_CHECK(context, bytes == 99, "a refused call wrote {}", bytes);
            for (const ncclEpLayout_t layout : kHtLayouts) {
                // Without K: as much as the largest K needs.
                size_t most = 0;
                for (const int num_topk : {1, 2, 3}) {
                    RANK_OK(context, size(layout, num_topk));
                    RANK_CHECK(context, bytes > 0, "no bytes for K {}", num_topk);
                    most = std::max(most, bytes);
                }
                for (const int num_topk : {0, -1}) {
                    RANK_OK(context, size(layout, num_topk));
                    RANK_CHECK(context, bytes >= most, "{} bytes without K, {} with the largest", bytes, most);
                }
            }

            ncclEpHandle_t handle = nullptr;
            const auto init = [&](ncclEpLayout_t layout, int num_topk, const ncclEpTensor_t* memory) {
                handle = reinterpret_cast<ncclEpHandle_t>(0x99);
                return ncclEpInitHandle(&handle, group, layout, &config, num_topk, memory);
            };
            constexpr auto kLayout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
            RANK_REFUSED(context, ncclInvalidArgument, "layout", init(NCCL_EP_LAYOUT_RANK_MAJOR, 2, nullptr));
            RANK_CHECK(context, handle == nullptr, "a failed ncclEpInitHandle left *handle as it was");
            RANK_REFUSED(context, ncclInvalidArgument, "layout", init(NCCL_EP_LAYOUT_UNSET, 2, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "num_topk", init(kLayout, 0, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "num_topk",
                         init(kLayout, static_cast<int>(group_config.num_experts) + 1, nullptr));
            RANK_REFUSED(context, ncclInvalidUsage, "num_topk", init(kLayout, 4, nullptr));
            for (const size_t alignment : {size_t{3}, size_t{12}, ~size_t{0}, size_t{1} << 30, size_t{1} << 40}) {
                config.dispatch_output_per_expert_alignment = alignment;
                RANK_REFUSED(context, ncclInvalidArgument, "dispatch_output_per_expert_alignment",
                             init(kLayout, 2, nullptr));
            }
            config = NCCL_EP_HANDLE_CONFIG_INIT;
            RANK_OK(context, size(kLayout, 2));
            Buffer memory(context, context.make_stream(), bytes);
            OpenTensor tensor;
            tensor.set(ncclUint8, {bytes - 1}, memory.data());
            RANK_REFUSED(context, ncclInvalidArgument, "handle_mem", init(kLayout, 2, &tensor.tensor));
            tensor.set(ncclInt32, {bytes}, memory.data());
            RANK_REFUSED(context, ncclInvalidArgument, "handle_mem", init(kLayout, 2, &tensor.tensor));
            tensor.set(ncclUint8, {1, bytes}, memory.data());
            RANK_REFUSED(context, ncclInvalidArgument, "handle_mem", init(kLayout, 2, &tensor.tensor));
            RANK_CHECK(context, handle == nullptr, "a failed ncclEpInitHandle left a handle");
            // The group's num_topk serves for a K that is not given.
            RANK_OK(context, init(kLayout, -1, nullptr));
            RANK_OK(context, ncclEpHandleDestroy(handle));
        });
    });
}

// Eager expert-major handles need the group's num_topk.
TEST(HtBadGroup, EagerExpertMajorNeedsABoundOfK) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            ncclEpGroupConfig_t config = good_config(context);
            config.max_recv_tokens_per_rank = 0;
            Group group(context, context.comm(), config);
            ncclEpHandle_t handle = nullptr;
            RANK_REFUSED(context, ncclInvalidUsage, "num_topk",
                         ncclEpInitHandle(&handle, group.get(), NCCL_EP_LAYOUT_EXPERT_MAJOR, nullptr, 2, nullptr));
            RANK_CHECK(context, handle == nullptr, "a handle was left");
            RANK_OK(context, ncclEpInitHandle(&handle, group.get(), NCCL_EP_LAYOUT_FLAT, nullptr, 2, nullptr));
            RANK_OK(context, ncclEpHandleDestroy(handle));
        });
    });
}

using Row = Spoiled<UpdateCall>;
using Call = UpdateCall&;

const Row kUpdates[] = {
    {"handle NULL", [](Call c) { c.handle = nullptr; }, "handle"},
    {"no ids", [](Call c) { c.ids_pointer = nullptr; }, "topk_idx"},
    {"ids of fp32", [](Call c) { c.ids.tensor.datatype = ncclFloat32; }, "topk_idx"},
    {"ids 1-D", [](Call c) { c.ids.tensor.ndim = 1; }, "topk_idx"},
    {"ids 3-D", [](Call c) { c.ids.tensor.ndim = 3, c.ids.sizes[2] = 1; }, "topk_idx"},
    {"another K", [](Call c) { c.ids.sizes[1] = 3; }, "topk_idx"},
    {"too many tokens", [](Call c) { c.ids.sizes[0] = 5; }, "topk_idx"},
    {"ids without memory", [](Call c) { c.ids.tensor.data = nullptr; }, "topk_idx"},
    {"ids misaligned", [](Call c) { c.ids.tensor.data = c.victim.input() + 4; }, "a multiple of 8"},
    {"ids without extents", [](Call c) { c.ids.tensor.sizes = nullptr; }, "sizes"},
    {"ids' magic", [](Call c) { c.ids.tensor.magic = 1; }, "magic"},
    {"layout_info too small", [](Call c) { c.info.size = 39; }, "size"},
    {"layout_info's magic", [](Call c) { c.info.magic = 0; }, "magic"},
    {"counters too short", [](Call c) { c.counters.sizes[0] -= 1; }, "expert_counters"},
    {"counters 2-D", [](Call c) { c.counters.tensor.ndim = 2, c.counters.sizes[1] = 1; }, "expert_counters"},
    {"counters of fp32", [](Call c) { c.counters.tensor.datatype = ncclFloat32; }, "expert_counters"},
    {"counters without memory", [](Call c) { c.counters.tensor.data = nullptr; }, "expert_counters"},
    {"no total", [](Call c) { c.total.sizes[0] = 0; }, "recv_total_counter"},
    {"total 2-D", [](Call c) { c.total.tensor.ndim = 2, c.total.sizes[1] = 1; }, "recv_total_counter"},
    {"total of int8", [](Call c) { c.total.tensor.datatype = ncclInt8; }, "recv_total_counter"},
};

const Row kFlatUpdates[] = {
    {"counters of 64 bits", [](Call c) { c.counters.tensor.datatype = ncclInt64; }, "expert_counters"},
};

const Row kExpertMajorUpdates[] = {
    {"offsets too short", [](Call c) { c.offsets.sizes[0] -= 1; }, "expert_offsets"},
    {"offsets 2-D", [](Call c) { c.offsets.tensor.ndim = 2, c.offsets.sizes[1] = 1; }, "expert_offsets"},
    {"offsets of fp32", [](Call c) { c.offsets.tensor.datatype = ncclFloat32; }, "expert_offsets"},
    {"offsets of another type than the counters", [](Call c) { c.offsets.tensor.datatype = ncclInt64; },
     "expert_offsets"},
    {"a total of another type than the counters", [](Call c) { c.total.tensor.datatype = ncclInt64; },
     "recv_total_counter"},
};

TEST(HtBadUpdate, Routings) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Victim flat(context, kHighThroughput, NCCL_EP_LAYOUT_FLAT);
            check_refusals(context, flat, kUpdates);
            check_refusals(context, flat, kFlatUpdates);
            Victim expert_major(context, kHighThroughput, NCCL_EP_LAYOUT_EXPERT_MAJOR);
            check_refusals(context, expert_major, kUpdates);
            check_refusals(context, expert_major, kExpertMajorUpdates);
        });
    });
}

// If the update half fails, nothing remains of the handle.
TEST(HtBadUpdate, CreationInOneCall) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Victim victim(context, kHighThroughput, NCCL_EP_LAYOUT_FLAT);
            for (const Row& row : kUpdates) {
                UpdateCall call(victim);
                row.spoil(call);
                // K is the tensor's, and the handle is an output here.
                if (std::string(row.name) == "another K" || call.handle == nullptr) continue;
                auto made = reinterpret_cast<ncclEpHandle_t>(0x99);
                ncclEpGetVersion(nullptr);
                const ncclResult_t result = ncclEpCreateHandle(&made, victim.group(), NCCL_EP_LAYOUT_FLAT,
                                                               call.ids_pointer, call.info_pointer, nullptr, nullptr);
                const std::string message = crossdockGetLastError();
                RANK_CHECK(context, result == row.code && made == nullptr, "{}: {}", row.name, result_name(result));
                RANK_CHECK(context, message.find(row.word) != std::string::npos, "{}: \"{}\" does not say \"{}\"",
                           row.name, message, row.word);
            }
            victim.check_untouched("refused handles");
            victim.check_working();
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
