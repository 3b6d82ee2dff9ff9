// SPDX-License-Identifier: Apache-2.0
// Callers of version 1, of version 2 and of versions to come share one library, in one process.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"
#include "nccl_ep/common.hpp"

// As in NVIDIA's tests: not in a public header.
ncclResult_t ncclEpGroup_test_setMaxDynamicSmem(ncclEpGroup* group, int bytes);
int ncclEpGroup_test_getLastLlCombineWarpsPerGroup(ncclEpGroup* group);

namespace crossdock::testing {
namespace {

Problem small_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed) {
    Problem problem;
    problem.num_ranks = num_ranks;
    problem.num_experts = 2 * num_ranks;
    problem.max_tokens = 6;
    problem.num_topk = 2;
    problem.hidden = problem.combine_hidden = 512;
    problem.layout = layout;
    return rerouted(problem, seed);
}

// A struct in front of a tail of rubbish that its `size` claims.
template <typename Struct>
struct Grown {
    Struct value;
    std::byte tail[64];
    explicit Grown(const Struct& original) : value(original) {
        std::memset(tail, 0xEE, sizeof tail);
        value.size = sizeof *this;
    }
};

TEST(Compatibility, Version1AndVersion2CallersShareAProcess) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Problem old_problem = small_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 1);
            old_problem.recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
            old_problem.asks_as_v1 = true;
            old_problem.num_scales = 4;
            const Problem plain = small_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, 2);
            ncclEpGroupConfig_t config = group_config_for(context, old_problem);
            // Where version 1's struct ended; what lies behind is not its.
            config.size = NCCL_EP_GROUP_CONFIG_V1_SIZE;
            config.zero_copy = static_cast<ncclEpZeroCopyMode_t>(0x5A5A);
            config.overflow_policy = static_cast<ncclEpOverflowPolicy_t>(0x5A5A);
            config.num_topk = 0x5A5A5A5A;
            Group old_group(context, context.comm(), config);
            Group new_group(context, plain);
            Layer old_fp8(context, old_group.get(), old_problem, {.version_1_structs = true});
            Layer old_default(context, old_group.get(), old_problem, {.version_1_structs = true, .null_configs = true});
            Layer modern(context, new_group.get(), plain);
            for (int i = 0; i < 3; ++i) {
                old_fp8.round_trip();
                modern.round_trip();
                old_default.round_trip();
            }
            old_problem.round_scales = true;
            old_fp8.route(old_problem);
            old_fp8.round_trip();
        });
    });
}

// With less shared memory kernels keep fewer rows in flight and compute the same; with too little they are refused.
TEST(Compatibility, SharedMemoryCanBeLimited) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kLlLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Problem problem = small_problem(context.num_ranks(), layout, 5);
                Group group(context, problem);
                const auto warps = [&] { return ncclEpGroup_test_getLastLlCombineWarpsPerGroup(group.get()); };
                RANK_CHECK(context, warps() == 0, "{} warps before any combine", warps());
                Layer layer(context, group.get(), problem);
                layer.round_trip();
                const int before = warps();
                RANK_CHECK(context, before >= 1, "{} warps", before);
                const std::vector<std::byte> combined = layer.combined();
                // Room for a block's tables and a stage or two.
                RANK_OK(context, ncclEpGroup_test_setMaxDynamicSmem(group.get(), 16 << 10));
                layer.round_trip();
                RANK_CHECK(context, layer.combined() == combined, "other bits with less shared memory");
                RANK_CHECK(context, warps() >= 1 && warps() <= before, "{} warps, {} before", warps(), before);
                context.barrier();
                RANK_OK(context, ncclEpGroup_test_setMaxDynamicSmem(group.get(), 64));
                layer.prepare_dispatch();
                RANK_REFUSED(context, ncclInvalidArgument, "shared memory", layer.dispatch());
                RANK_REFUSED(context, ncclInvalidArgument, "allowed: 1..",
                             ncclEpGroup_test_setMaxDynamicSmem(group.get(), 0));
                RANK_REFUSED(context, ncclInvalidArgument, "allowed: 1..",
                             ncclEpGroup_test_setMaxDynamicSmem(group.get(), INT32_MAX));
                RANK_OK(context, ncclEpGroup_test_setMaxDynamicSmem(group.get(), 16 << 10));
                layer.round_trip();
            });
        }
    });
}

TEST(Compatibility, Version1StructsEndWhereTheyEnded) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kLlLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Problem problem = small_problem(context.num_ranks(), layout, 3);
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.version = 1;
                config.size = NCCL_EP_GROUP_CONFIG_V1_SIZE;
                Group group(context, context.comm(), config);
                Layer layer(context, group.get(), problem, {.version_1_structs = true});
                layer.round_trip();
                layer.round_trip();
            });
        }
    });
}

TEST(Compatibility, NullConfigsMeanDefaults) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kLlLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Problem problem = small_problem(context.num_ranks(), layout, 4);
                Group group(context, problem);
                Layer(context, group.get(), problem, {.ask_counters = false, .null_configs = true}).round_trip();
            });
        }
    });
}

// The ids' width may change from update to update.
TEST(Compatibility, RoutingsOfBothWidthsAlternate) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Problem problem = small_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 9);
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            for (const ncclDataType_t type : {ncclInt32, ncclInt64, ncclInt32}) {
                problem.index_type = type;
                layer.route(problem);
                layer.round_trip();
            }
        });
    });
}

// Descriptors that the library made serve like the caller's own, as long as nobody puts other extents into them.
TEST(Compatibility, AllocatedDescriptorsServe) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, 1, std::nullopt, [](RankContext& context) {
            const Problem problem = small_problem(1, NCCL_EP_LAYOUT_EXPERT_MAJOR, 10);
            Group group(context, problem);
            const cudaStream_t stream = context.make_stream();
            Buffer ids(context, stream, 3 * 2 * sizeof(int64_t));
            const size_t extents[] = {3, 2};
            ncclEpTensor_t* tensor = nullptr;
            RANK_OK(context, ncclEpTensorAlloc(&tensor, 2, ncclInt64, extents, nullptr));
            tensor->data = ids.data();
            ncclEpHandle_t handle = nullptr;
            RANK_OK(context,
                    ncclEpCreateHandle(&handle, group.get(), problem.layout, tensor, nullptr, nullptr, stream));
            size_t* const own = tensor->sizes;
            size_t other[] = {3, 2};
            tensor->sizes = other;
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx", ncclEpUpdateHandle(handle, tensor, nullptr, stream));
            tensor->sizes = own;
            RANK_OK(context, ncclEpUpdateHandle(handle, tensor, nullptr, stream));
            RANK_OK(context, ncclEpHandleDestroy(handle));
            RANK_OK(context, ncclEpTensorDestroy(tensor));
        });
    });
}

// What a later version appends is ignored, whatever it holds.
TEST(Compatibility, LargerStructsAreAccepted) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = small_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 5);
            Grown<ncclEpGroupConfig_t> config(group_config_for(context, problem));
            config.value.version = 77;
            ncclEpGroup_t group = nullptr;
            RANK_OK(context, ncclEpCreateGroup(&group, context.comm(), &config.value));
            Grown<ncclEpHandleConfig_t> handle_config(NCCL_EP_HANDLE_CONFIG_INIT);
            ncclEpHandle_t handle = nullptr;
            RANK_OK(context,
                    ncclEpInitHandle(&handle, group, problem.layout, &handle_config.value, problem.num_topk, nullptr));
            Grown<ncclEpCompleteConfig_t> complete_config(NCCL_EP_COMPLETE_CONFIG_INIT);
            RANK_OK(context, ncclEpComplete(handle, &complete_config.value, context.make_stream()));
            RANK_OK(context, ncclEpHandleDestroy(handle));
            Layer(context, group, problem).round_trip();
            RANK_OK(context, ncclEpGroupDestroy(group));
        });
    });
}

// Version 3's numbers of SMs per operation are checked like max_num_sms; behind a struct of version 2 they are not
// there, whatever its caller has there.
TEST(Compatibility, SmCountsPerOperationAreVersion3s) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(1), std::nullopt, [](RankContext& context) {
            const Problem problem = small_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 6);
            ncclEpGroupConfig_t config = group_config_for(context, problem);
            ncclEpGroup_t group = nullptr;
            for (unsigned ncclEpGroupConfig_t::*field :
                 {&ncclEpGroupConfig_t::dispatch_num_sms, &ncclEpGroupConfig_t::combine_num_sms}) {
                config.*field = 1'000'000;
                const bool is_dispatch = field == &ncclEpGroupConfig_t::dispatch_num_sms;
                // A CPU has no SMs to count.
                if (context.is_gpu()) {
                    RANK_REFUSED(context, ncclInvalidUsage, is_dispatch ? "dispatch_num_sms" : "combine_num_sms",
                                 ncclEpCreateGroup(&group, context.comm(), &config));
                }
                config.*field = 1;
            }
            RANK_OK(context, ncclEpCreateGroup(&group, context.comm(), &config));
            Layer(context, group, problem).round_trip();
            RANK_OK(context, ncclEpGroupDestroy(group));
            config.size = NCCL_EP_GROUP_CONFIG_V2_SIZE;
            config.version = 2;
            config.dispatch_num_sms = config.combine_num_sms = 0x5A5A5A5A;
            RANK_OK(context, ncclEpCreateGroup(&group, context.comm(), &config));
            Layer(context, group, problem).round_trip();
            RANK_OK(context, ncclEpGroupDestroy(group));
        });
    });
}

// A size that ends within a field does not cover it: the half of a pointer, or of a number, is not looked at. Every
// struct that has grown, at every size from the first version's on.
TEST(Compatibility, FieldsAreReadWholeOrNotAtAll) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(1), std::nullopt, [](RankContext& context) {
            const Problem problem = small_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, 11);
            const ncclEpGroupConfig_t complete = group_config_for(context, problem);
            for (unsigned size = NCCL_EP_GROUP_CONFIG_V1_SIZE; size < NCCL_EP_GROUP_CONFIG_SIZE + 3; ++size) {
                // What the size covers whole says 0; the rest is rubbish.
                Grown<ncclEpGroupConfig_t> config(complete);
                const unsigned covered = std::min<unsigned>(size / 4 * 4, sizeof complete);
                std::memset(reinterpret_cast<std::byte*>(&config.value) + covered, 0xEE, sizeof complete - covered);
                config.value.size = size;
                ncclEpGroup_t group = nullptr;
                RANK_OK(context, ncclEpCreateGroup(&group, context.comm(), &config.value));
                RANK_OK(context, ncclEpGroupDestroy(group));
            }
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            layer.round_trip();
            Layer(context, group.get(), problem, {.cut_structs = true}).round_trip();
        });
    });
}

// An engine that serves both modes asks for experts' offsets and for the total in low latency, too.
TEST(Compatibility, ReturnsPlacesInLowLatency) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kLlLayouts) {
            for (const ncclDataType_t type : {ncclInt32, ncclInt64}) {
                expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                    const Problem problem = small_problem(context.num_ranks(), layout, 12);
                    Group group(context, problem);
                    Layer layer(context, group.get(), problem,
                                {.ask_offsets = true, .ask_total = true, .counter_type = type});
                    layer.round_trip();
                    layer.prepare_dispatch();
                    RANK_OK(context, layer.send_dispatch());
                    RANK_OK(context, layer.complete());
                    layer.check_dispatch();
                });
            }
        }
    });
}

// Version 2 callers with scales but no recipe are refused, version 1 callers are quantised: by what they say of
// themselves.
TEST(Compatibility, ScalesWithoutARecipeDependOnTheVersion) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Problem problem = small_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 7);
            problem.recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
            problem.asks_as_v1 = true;
            problem.num_scales = 4;
            ncclEpGroupConfig_t config = group_config_for(context, problem);
            config.version = 2;
            Group group(context, context.comm(), config);
            Layer layer(context, group.get(), problem);
            layer.prepare_dispatch();
            RANK_REFUSED(context, ncclInvalidArgument, "outputs", layer.dispatch());
        });
    });
}

// An explicit rdma_buffer_size is accepted if it comes from the helper of either version, or is larger; a handle for
// which it is too small is refused.
TEST(Compatibility, ExplicitBufferSizesAreHints) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = small_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, 8);
            const unsigned long helper = nccl_ep::get_low_latency_rdma_size_hint(
                problem.max_tokens, problem.max_token_bytes(), problem.num_ranks, problem.num_experts);
            for (const unsigned long bytes : {helper, 1ul << 30, 1ul << 50}) {
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.rdma_buffer_size = bytes;
                config.num_qp_per_rank = 3;
                config.num_channels = 7;
                config.max_num_sms = 1;
                Group group(context, context.comm(), config);
                Layer(context, group.get(), problem).round_trip();
            }
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
