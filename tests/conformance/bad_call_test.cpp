// SPDX-License-Identifier: Apache-2.0
// Every ncclEpCreateGroup, ncclEpDispatch, ncclEpCombine and ncclEpComplete that is wrong in either mode gets its code
// and a message that names what is wrong; nothing is written and the group goes on. What is wrong in one mode only:
// bad_dispatch_test.cpp, bad_combine_test.cpp.
#include "conformance/support/bad_call.h"
#include "conformance/support/modes.h"

namespace crossdock::testing {
namespace {

using GroupRow = Spoiled<GroupCall>;
const GroupRow kGroups[] = {
    {"comm NULL", [](GroupCall& c) { c.comm = nullptr; }, "comm"},
    {"config NULL", [](GroupCall& c) { c.config_pointer = nullptr; }, "config"},
    {"too small", [](GroupCall& c) { c.config.size = 95; }, "size"},
    {"magic", [](GroupCall& c) { c.config.magic = 0; }, "magic"},
    {"unknown algorithm", [](GroupCall& c) { c.config.algorithm = static_cast<ncclEpAlgorithm_t>(2); }, "algorithm"},
    {"no experts", [](GroupCall& c) { c.config.num_experts = 0; }, "num_experts"},
    {"experts that ranks do not divide", [](GroupCall& c) { c.config.num_experts += 1; }, "num_experts"},
    {"no tokens", [](GroupCall& c) { c.config.max_dispatch_tokens_per_rank = 0; }, "max_dispatch_tokens_per_rank"},
    {"no token bytes", [](GroupCall& c) { c.config.max_token_bytes = 0; }, "max_token_bytes"},
    {"num_topk above num_experts", [](GroupCall& c) { c.config.num_topk = c.config.num_experts + 1; }, "num_topk"},
    {"unknown zero_copy", [](GroupCall& c) { c.config.zero_copy = static_cast<ncclEpZeroCopyMode_t>(3); }, "zero_copy"},
    {"unknown overflow_policy", [](GroupCall& c) { c.config.overflow_policy = static_cast<ncclEpOverflowPolicy_t>(3); },
     "overflow_policy"},
    {"alloc without free",
     [](GroupCall& c) { c.config.alloc.alloc_fn = [](void**, size_t, void*) { return cudaErrorMemoryAllocation; }; },
     "alloc", ncclInvalidUsage},
    {"free without alloc", [](GroupCall& c) { c.config.alloc.free_fn = [](void*, void*) { return cudaSuccess; }; },
     "alloc", ncclInvalidUsage},
};

TEST_BOTH_MODES(BadGroup, CreationIsRefused) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
            check_group_refusals(context, mode, kGroups);
            ncclEpGroupConfig_t config = good_group_config(context, mode);
            RANK_REFUSED(context, ncclInvalidArgument, "group", ncclEpCreateGroup(nullptr, context.comm(), &config));
            // A CPU has no SMs to count.
            if (context.is_gpu()) {
                ncclEpGroup_t group = nullptr;
                config.max_num_sms = 1'000'000;
                RANK_REFUSED(context, ncclInvalidUsage, "max_num_sms",
                             ncclEpCreateGroup(&group, context.comm(), &config));
            }
            // The communicator is as good as before.
            Victim(context, mode, layouts_of(mode)[0]).check_working();
        });
    });
}

const Spoiled<DispatchCall> kDispatches[] = {
    {"handle NULL", [](DispatchCall& c) { c.handle = nullptr; }, "handle"},
    {"inputs NULL", [](DispatchCall& c) { c.inputs_pointer = nullptr; }, "inputs"},
    {"outputs NULL", [](DispatchCall& c) { c.outputs_pointer = nullptr; }, "outputs"},
    {"inputs too small", [](DispatchCall& c) { c.inputs.size = 31; }, "size"},
    {"inputs' magic", [](DispatchCall& c) { c.inputs.magic = 1; }, "magic"},
    {"outputs too small", [](DispatchCall& c) { c.outputs.size = 39; }, "size"},
    {"outputs' magic", [](DispatchCall& c) { c.outputs.magic = NCCL_EP_TENSOR_MAGIC; }, "magic"},
    {"layout_info too small", [](DispatchCall& c) { c.info.size = 39; }, "size"},
    {"layout_info's magic", [](DispatchCall& c) { c.info.magic = 0; }, "magic"},
    {"config too small", [](DispatchCall& c) { c.config.size = 19; }, "size"},
    {"config's magic", [](DispatchCall& c) { c.config.magic = 0; }, "magic"},
    {"no tokens", [](DispatchCall& c) { c.inputs.tokens = nullptr; }, "tokens"},
    {"no output tokens", [](DispatchCall& c) { c.outputs.tokens = nullptr; }, "tokens"},
    {"a tensor too small", [](DispatchCall& c) { c.tokens.tensor.size = 47; }, "size"},
    {"a tensor's magic", [](DispatchCall& c) { c.tokens.tensor.magic = NCCL_EP_MAGIC; }, "magic"},
    {"a tensor that says it was allocated", [](DispatchCall& c) { c.tokens.tensor.magic = 0xBEEFBEEFu; }, "tokens"},
    {"a tensor without extents", [](DispatchCall& c) { c.tokens.tensor.sizes = nullptr; }, "sizes"},
    {"a tensor without memory", [](DispatchCall& c) { c.tokens.tensor.data = nullptr; }, "tokens"},
    {"an output without memory", [](DispatchCall& c) { c.received.tensor.data = nullptr; }, "tokens"},
    {"tokens 1-D", [](DispatchCall& c) { c.tokens.tensor.ndim = 1; }, "tokens"},
    {"tokens 3-D", [](DispatchCall& c) { c.tokens.tensor.ndim = 3, c.tokens.sizes[2] = 1; }, "tokens"},
    {"one row too many", [](DispatchCall& c) { c.tokens.sizes[0] += 1; }, "tokens"},
    {"one row too few", [](DispatchCall& c) { c.tokens.sizes[0] -= 1; }, "tokens"},
    {"rows of 126 bytes", [](DispatchCall& c) { c.tokens.width() = c.received.width() = 63; }, "16"},
    {"rows of no bytes", [](DispatchCall& c) { c.tokens.width() = c.received.width() = 0; }, "tokens"},
    {"rows larger than max_token_bytes", [](DispatchCall& c) { c.tokens.width() = c.received.width() = 648; },
     "max_token_bytes"},
    {"rows far too large", [](DispatchCall& c) { c.tokens.width() = c.received.width() = ~size_t{0} / 2; }, "tokens"},
    {"rows of more than 32 bits of bytes",
     [](DispatchCall& c) { c.tokens.width() = c.received.width() = (size_t{1} << 31) + 64; }, "max_token_bytes"},
    {"tokens misaligned", [](DispatchCall& c) { c.tokens.tensor.data = c.victim.input() + 8; }, "16"},
    {"output misaligned", [](DispatchCall& c) { c.received.tensor.data = c.victim.output() + 2; }, "16"},
    {"integer tokens", [](DispatchCall& c) { c.tokens.tensor.datatype = c.received.tensor.datatype = ncclInt32; },
     "tokens"},
    {"8-bit tokens into 8 other bits",
     [](DispatchCall& c) {
         c.tokens.tensor.datatype = ncclUint8;
         c.received.tensor.datatype = ncclFloat8e4m3;
     },
     "tokens"},
    {"another output type", [](DispatchCall& c) { c.received.tensor.datatype = ncclFloat16; }, "tokens"},
    {"output without a dimension", [](DispatchCall& c) { c.received.tensor.ndim -= 1; }, "tokens"},
    {"output of another width", [](DispatchCall& c) { c.received.width() = 128; }, "tokens"},
    {"output over its input", [](DispatchCall& c) { c.tokens.tensor.data = c.victim.output(); },
     "outputs->tokens overlaps inputs->tokens"},
    {"output over its input's end", [](DispatchCall& c) { c.received.tensor.data = c.victim.input() + 2 * 128 + 112; },
     "outputs->tokens overlaps inputs->tokens"},
    {"scales without a recipe", [](DispatchCall& c) { c.inputs.scales = &c.weights.tensor; }, "scales"},
    {"output scales without a recipe",
     [](DispatchCall& c) {
         c.forward_scales(), c.config.quant_recipe = NCCL_EP_DISP_QUANT_NONE, c.inputs.scales = nullptr;
     },
     "scales"},
    {"unknown recipe",
     [](DispatchCall& c) { c.config.quant_recipe = static_cast<ncclEpDispQuant_t>(std::size(kDispatchRecipes)); },
     "quant_recipe"},
    {"unknown direction", [](DispatchCall& c) { c.config.pass_direction = static_cast<ncclEpPassDir_t>(9); },
     "pass_direction"},
};

TEST_BOTH_MODES(BadDispatch, AnyLayout) {
    for (const ncclEpLayout_t layout : layouts_of(mode)) check_on_each_backend(mode, layout, kDispatches);
}

const Spoiled<DispatchCall> kWeights[] = {
    {"no weights", [](DispatchCall& c) { c.inputs.topk_weights = nullptr; }, "topk_weights"},
    {"weights of another type", [](DispatchCall& c) { c.weights.tensor.datatype = ncclBfloat16; }, "topk_weights"},
    {"weights of another width", [](DispatchCall& c) { c.weights.width() = 3; }, "topk_weights"},
    {"weights with other rows", [](DispatchCall& c) { c.weights.sizes[0] = 2; }, "topk_weights"},
    {"weights 1-D", [](DispatchCall& c) { c.weights.tensor.ndim = 1; }, "topk_weights"},
    {"weights misaligned", [](DispatchCall& c) { c.weights.tensor.data = c.victim.input() + 2; }, "a multiple of 4"},
    {"no output weights", [](DispatchCall& c) { c.outputs.topk_weights = nullptr; }, "topk_weights"},
    {"output weights of another type", [](DispatchCall& c) { c.received_weights.tensor.datatype = ncclInt32; },
     "topk_weights"},
    {"output weights with too few rows", [](DispatchCall& c) { c.received_weights.sizes[0] -= 1; }, "topk_weights"},
    {"output weights over weights", [](DispatchCall& c) { c.received_weights.tensor.data = c.victim.input() + 4; },
     "outputs->topk_weights overlaps inputs->"},
};

// Low latency: rank-major only.
TEST_BOTH_MODES(BadDispatch, Weights) {
    for (const ncclEpLayout_t layout : layouts_of(mode)) {
        if (is_ht(mode) || layout == NCCL_EP_LAYOUT_RANK_MAJOR) check_on_each_backend(mode, layout, kWeights);
    }
}

const Spoiled<DispatchCall> kForwarding[] = {
    {"no scales", [](DispatchCall& c) { c.forward_scales(), c.inputs.scales = nullptr; }, "scales"},
    {"no output scales", [](DispatchCall& c) { c.forward_scales(), c.outputs.scales = nullptr; }, "scales"},
    {"scales of another width", [](DispatchCall& c) { c.forward_scales(), c.received_scales.width() = 64; }, "scales"},
    {"scales with other rows", [](DispatchCall& c) { c.forward_scales(), c.scales.sizes[0] = 2; }, "scales"},
    {"output scales with other rows", [](DispatchCall& c) { c.forward_scales(), c.received_scales.sizes[0] += 1; },
     "scales"},
    {"integer scales",
     [](DispatchCall& c) {
         c.forward_scales(), c.scales.tensor.datatype = c.received_scales.tensor.datatype = ncclInt32;
     },
     "scales"},
    {"another type of output scales",
     [](DispatchCall& c) { c.forward_scales(), c.received_scales.tensor.datatype = ncclFloat8e4m3; }, "scales"},
    {"scales of 24 bytes",
     [](DispatchCall& c) { c.forward_scales(), c.scales.width() = c.received_scales.width() = 24; }, "16"},
    {"no scales in a row",
     [](DispatchCall& c) { c.forward_scales(), c.scales.width() = c.received_scales.width() = 0; }, "scales"},
    {"scale rows of more than 32 bits of bytes",
     [](DispatchCall& c) {
         c.forward_scales(), c.scales.width() = c.received_scales.width() = (size_t{1} << 32) + 128;
     },
     "max_token_bytes"},
    {"misaligned scales",
     [](DispatchCall& c) {
         c.forward_scales();
         c.scales.tensor.datatype = c.received_scales.tensor.datatype = ncclFloat32;
         c.scales.width() = c.received_scales.width() = 32;
         c.scales.tensor.data = c.victim.input() + 2;
     },
     "a multiple of 4"},
    {"output scales over scales",
     [](DispatchCall& c) {
         c.forward_scales(), c.scales.tensor.data = c.victim.output() + 128;
         c.received.tensor.data = c.victim.output() + c.victim.kBufferBytes / 2;
     },
     "outputs->scales overlaps inputs->scales"},
    {"output over scales",
     [](DispatchCall& c) {
         c.forward_scales(), c.scales.tensor.data = c.victim.output();
         c.received_scales.tensor.data = c.victim.output() + c.victim.kBufferBytes / 2;
     },
     "outputs->tokens overlaps inputs->scales"},
    {"row and scales together too large",
     [](DispatchCall& c) { c.forward_scales(), c.tokens.width() = c.received.width() = 592; }, "max_token_bytes"},
    {"rounded scales", [](DispatchCall& c) { c.forward_scales(), c.config.round_scales = 1; }, "round_scales"},
    {"tokens of uint32",
     [](DispatchCall& c) { c.forward_scales(), c.tokens.tensor.datatype = c.received.tensor.datatype = ncclUint32; },
     "tokens"},
};

TEST_BOTH_MODES(BadDispatch, Forwarding) {
    for (const ncclEpLayout_t layout : layouts_of(mode)) check_on_each_backend(mode, layout, kForwarding);
}

// A window that exists, named wrongly.
TEST_BOTH_MODES(BadDispatch, Windows) {
    on_each_backend(reaching_windows(kEveryBackend), [=](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : layouts_of(mode)) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Window window = context.make_window(1u << 16);
                {
                    Victim victim(context, mode, layout);
                    for (OpenTensor DispatchArguments::*tensor :
                         {&DispatchArguments::tokens, &DispatchArguments::received}) {
                        const auto refused = [&](const char* word, void* data, uint64_t offset, ncclWindow_t handle) {
                            DispatchCall call(victim);
                            (call.*tensor).tensor.win_hdl = handle;
                            (call.*tensor).tensor.data = data;
                            (call.*tensor).tensor.win_offset = offset;
                            RANK_REFUSED(context, ncclInvalidArgument, word, call());
                        };
                        refused("tokens", window.memory + 16, 32, window.handle);  // two addresses
                        refused("16", nullptr, 8, window.handle);
                        // NCCL looks into any window it is given, and does not tell how long one is.
                        if (context.is_gpu()) continue;
                        refused("tokens", nullptr, window.bytes - 16, window.handle);    // the end is outside
                        refused("tokens", nullptr, window.bytes * 1000, window.handle);  // everything is
                        refused("tokens", nullptr, ~uint64_t{0} - 15, window.handle);    // offset + bytes wraps around
                        refused("win", nullptr, 0, reinterpret_cast<ncclWindow_t>(0x1230));
                    }
                    victim.check_untouched("a wrong window");
                    victim.check_working();
                }
                context.destroy_window(window);
            });
        }
    });
}

// The call with one of its tensors at `offset` of the window: refused, with the tensor's name and the offset.
template <typename Call>
void expect_offset_refused(RankContext& context, const Window& window, Call call, OpenTensor& tensor, const char* name,
                           uint64_t offset) {
    tensor.tensor.win_hdl = window.handle;
    tensor.tensor.win_offset = offset;
    tensor.tensor.data = nullptr;
    RANK_REFUSED(context, ncclInvalidArgument, name, call());
    const std::string message = crossdockGetLastError();
    RANK_CHECK(context, message.find("win_offset " + std::to_string(offset)) != std::string::npos,
               "\"{}\" does not name win_offset {}", message, offset);
}

// Tokens and forwarded scales lie at multiples of 16 bytes in windows, all else at multiples of its element.
TEST_BOTH_MODES(BadDispatch, OffsetsIntoWindows) {
    using Arguments = DispatchArguments;
    struct Place {
        OpenTensor Arguments::*tensor;
        const char* name;
        std::vector<uint64_t> refused;
    };
    on_each_backend(reaching_windows(kEveryBackend), [=](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : layouts_of(mode)) {
            const bool is_expert_major = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
            std::vector<Place> places{{&Arguments::tokens, "inputs->tokens", {1, 8}},
                                      {&Arguments::received, "outputs->tokens", {1, 8}},
                                      {&Arguments::scales, "inputs->scales", {1, 8}},
                                      {&Arguments::received_scales, "outputs->scales", {1, 8}}};
            if (is_ht(mode) || !is_expert_major) {
                places.push_back({&Arguments::weights, "inputs->topk_weights", {1, 2}});
                places.push_back({&Arguments::received_weights, "outputs->topk_weights", {1, 2}});
            }
            if (!is_expert_major) places.push_back({&Arguments::received_ids, "outputs->topk_idx", {1, 2}});
            if (!is_ht(mode)) places.push_back({&Arguments::counters, "counters", {1, 2}});
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Window window = context.make_window(1u << 16);
                {
                    Victim victim(context, mode, layout);
                    for (const Place& place : places) {
                        for (const uint64_t offset : place.refused) {
                            DispatchCall call(victim);
                            call.forward_scales();
                            // Scales are in windows where tokens are.
                            if (place.tensor == &Arguments::received_scales)
                                call.received.tensor.win_hdl = window.handle, call.received.tensor.data = nullptr;
                            expect_offset_refused(context, window, std::ref(call), call.*place.tensor, place.name,
                                                  offset);
                        }
                    }
                    for (const uint64_t offset : {1, 8}) {
                        CombineCall rows(victim), combined(victim);
                        expect_offset_refused(context, window, std::ref(rows), rows.rows, "inputs->tokens", offset);
                        expect_offset_refused(context, window, std::ref(combined), combined.combined, "outputs->tokens",
                                              offset);
                    }
                    victim.check_untouched("offsets into windows");
                    victim.check_working();
                }
                context.destroy_window(window);
            });
        }
    });
}

// A handle that was never updated has no routing.
TEST_BOTH_MODES(BadDispatch, NeedsARouting) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : layouts_of(mode)) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                Victim victim(context, mode, layout);
                ncclEpHandle_t fresh = nullptr;
                RANK_OK(context, ncclEpInitHandle(&fresh, victim.group(), layout, nullptr, 2, nullptr));
                DispatchCall dispatch(victim);
                CombineCall combine(victim);
                dispatch.handle = combine.handle = fresh;
                RANK_REFUSED(context, ncclInvalidUsage, "ncclEpUpdateHandle", dispatch());
                RANK_REFUSED(context, ncclInvalidUsage, is_ht(mode) ? "ncclEpUpdateHandle" : "", combine());
                if (is_ht(mode)) {
                    dispatch.go_backward();
                    RANK_REFUSED(context, ncclInvalidUsage, "ncclEpUpdateHandle", dispatch());
                }
                RANK_OK(context, ncclEpComplete(fresh, nullptr, nullptr));
                RANK_OK(context, ncclEpHandleDestroy(fresh));
                victim.check_untouched("calls without a routing");
                victim.check_working();
            });
        }
    });
}

const Spoiled<CombineCall> kCombines[] = {
    {"handle NULL", [](CombineCall& c) { c.handle = nullptr; }, "handle"},
    {"inputs NULL", [](CombineCall& c) { c.inputs_pointer = nullptr; }, "inputs"},
    {"outputs NULL", [](CombineCall& c) { c.outputs_pointer = nullptr; }, "outputs"},
    {"inputs too small", [](CombineCall& c) { c.inputs.size = 23; }, "size"},
    {"inputs' magic", [](CombineCall& c) { c.inputs.magic = 1; }, "magic"},
    {"outputs too small", [](CombineCall& c) { c.outputs.size = 23; }, "size"},
    {"outputs' magic", [](CombineCall& c) { c.outputs.magic = 1; }, "magic"},
    {"config too small", [](CombineCall& c) { c.config.size = 15; }, "size"},
    {"config's magic", [](CombineCall& c) { c.config.magic = 1; }, "magic"},
    {"no rows", [](CombineCall& c) { c.inputs.tokens = nullptr; }, "tokens"},
    {"no output", [](CombineCall& c) { c.outputs.tokens = nullptr; }, "tokens"},
    {"a tensor too small", [](CombineCall& c) { c.combined.tensor.size = 40; }, "size"},
    {"a tensor's magic", [](CombineCall& c) { c.rows.tensor.magic = 0; }, "magic"},
    {"a tensor without extents", [](CombineCall& c) { c.rows.tensor.sizes = nullptr; }, "sizes"},
    {"rows without memory", [](CombineCall& c) { c.rows.tensor.data = nullptr; }, "tokens"},
    {"output without memory", [](CombineCall& c) { c.combined.tensor.data = nullptr; }, "tokens"},
    {"rows without a dimension", [](CombineCall& c) { c.rows.tensor.ndim -= 1; }, "tokens"},
    {"output 3-D", [](CombineCall& c) { c.combined.tensor.ndim = 3, c.combined.sizes[2] = 1; }, "tokens"},
    {"output with one row too many", [](CombineCall& c) { c.combined.sizes[0] += 1; }, "tokens"},
    {"output with one row too few", [](CombineCall& c) { c.combined.sizes[0] -= 1; }, "tokens"},
    {"output of another width", [](CombineCall& c) { c.combined.width() = 128; }, "tokens"},
    {"output of another type", [](CombineCall& c) { c.combined.tensor.datatype = ncclFloat32; }, "tokens"},
    {"8-bit rows", [](CombineCall& c) { c.rows.tensor.datatype = c.combined.tensor.datatype = ncclFloat8e4m3; },
     "tokens"},
    {"rows of 8 bytes", [](CombineCall& c) { c.rows.width() = c.combined.width() = 4; }, "16"},
    {"rows of no bytes", [](CombineCall& c) { c.rows.width() = c.combined.width() = 0; }, "tokens"},
    {"rows larger than max_token_bytes", [](CombineCall& c) { c.rows.width() = c.combined.width() = 648; },
     "max_token_bytes"},
    {"rows of more than 32 bits of bytes",
     [](CombineCall& c) { c.rows.width() = c.combined.width() = (size_t{1} << 31) + 64; }, "max_token_bytes"},
    {"rows misaligned", [](CombineCall& c) { c.rows.tensor.data = c.victim.input() + 2; }, "16"},
    {"output misaligned", [](CombineCall& c) { c.combined.tensor.data = c.victim.output() + 2; }, "16"},
    {"scales without a recipe", [](CombineCall& c) { c.inputs.scales = &c.scales.tensor; }, "scales"},
    {"unknown recipe",
     [](CombineCall& c) { c.config.quant_recipe = static_cast<ncclEpCombQuant_t>(std::size(kCombineRecipes)); },
     "quant_recipe"},
    {"unknown direction", [](CombineCall& c) { c.config.pass_direction = static_cast<ncclEpPassDir_t>(-1); },
     "pass_direction"},
};

TEST_BOTH_MODES(BadCombine, AnyLayout) {
    for (const ncclEpLayout_t layout : layouts_of(mode)) check_on_each_backend(mode, layout, kCombines);
}

// With nothing pending there is nothing to do.
TEST_BOTH_MODES(BadCombine, Complete) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
            Victim victim(context, mode, layouts_of(mode)[0]);
            ncclEpCompleteConfig_t config = NCCL_EP_COMPLETE_CONFIG_INIT;
            RANK_OK(context, ncclEpComplete(victim.handle(), nullptr, nullptr));
            RANK_OK(context, ncclEpComplete(victim.handle(), &config, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "handle", ncclEpComplete(nullptr, nullptr, nullptr));
            config.size = 7;
            RANK_REFUSED(context, ncclInvalidArgument, "size", ncclEpComplete(victim.handle(), &config, nullptr));
            config = NCCL_EP_COMPLETE_CONFIG_INIT;
            config.magic = 0;
            RANK_REFUSED(context, ncclInvalidArgument, "magic", ncclEpComplete(victim.handle(), &config, nullptr));
            victim.check_working();
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
