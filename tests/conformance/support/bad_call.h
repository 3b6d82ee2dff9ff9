// SPDX-License-Identifier: Apache-2.0
// Calls that are right in everything, to be spoiled in one point each: descriptors, structs and arguments lie open.
#pragma once

#include <span>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {

// A tensor descriptor with extents that a test may change.
struct OpenTensor {
    ncclEpTensor_t tensor = NCCL_EP_TENSOR_INIT;
    size_t sizes[4] = {};

    void set(ncclDataType_t type, const std::vector<size_t>& extents, void* data);
    size_t& width() { return sizes[tensor.ndim - 1]; }
};

constexpr size_t kVictimTokens = 3;
constexpr size_t kVictimTopk = 2;
constexpr size_t kVictimHidden = 64;
constexpr size_t kVictimScales = 128;

// E = 2 R, M = 4, K = 2, B = 3, rows of 64 bf16. Every token goes to the first expert of its own rank and of the next
// one, so that rows come to all ranks.
Problem victim_problem(int num_ranks, ncclEpLayout_t layout);

// The buffers and the handle of a layer, after a whole step, in a group of its own with max_token_bytes 1280.
template <typename LayerType>
class VictimOf {
  public:
    VictimOf(RankContext& context, const auto& problem, ncclEpZeroCopyMode_t zero_copy = NCCL_EP_ZERO_COPY_AUTO)
        : context_(context),
          group_(context, context.comm(), config_for(context, problem, zero_copy)),
          layer_(context, group_.get(), problem),
          stream_(context.make_stream()),
          input_(context, stream_, kBufferBytes),
          output_(context, stream_, kBufferBytes) {
        check_working();
    }
    VictimOf(const VictimOf&) = delete;
    VictimOf& operator=(const VictimOf&) = delete;

    // Checks that nothing was written anywhere since the last call.
    void check_untouched(const std::string& after) {
        output_.check(kPoisoned, 128, "the outputs after a refused call, " + after + ",");
    }
    // That the group still works.
    void check_working() { layer_.round_trip(); }

    ncclEpGroup_t group() const { return group_.get(); }
    const auto& problem() const { return layer_.problem(); }
    std::byte* input() { return input_.data(); }
    std::byte* output() { return output_.data(); }
    std::byte* routing() { return layer_.ids(); }
    ncclEpHandle_t handle() const { return layer_.handle(); }

    static constexpr size_t kBufferBytes = 1u << 19;

  private:
    static inline const Bytes kPoisoned = Bytes(kBufferBytes, kPoison);  // made before threads are

    static ncclEpGroupConfig_t config_for(RankContext& context, const auto& problem, ncclEpZeroCopyMode_t zero_copy) {
        ncclEpGroupConfig_t config = group_config_for(context, problem);
        config.max_token_bytes = 1280;
        config.zero_copy = zero_copy;
        return config;
    }

  protected:
    RankContext& context_;
    Group group_;
    LayerType layer_;

  private:
    cudaStream_t stream_;
    Buffer input_;   // every input tensor starts here: what it holds does not matter
    Buffer output_;  // and every output here
};

// What a whole ncclEpDispatch points to. Pointers in `inputs`, `outputs` and `info` may be set to null.
struct DispatchArguments {
    explicit DispatchArguments(ncclEpHandle_t for_handle) : handle(for_handle) {}
    ncclResult_t operator()() {
        return ncclEpDispatch(handle, inputs_pointer, outputs_pointer, info_pointer, config_pointer, nullptr);
    }

    ncclEpHandle_t handle;
    OpenTensor tokens, weights, scales, received, received_weights, received_scales, received_ids, counters, spare;
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    ncclEpDispatchInputs_t* inputs_pointer = &inputs;
    ncclEpDispatchOutputs_t* outputs_pointer = &outputs;
    ncclEpLayoutInfo_t* info_pointer = &info;
    ncclEpDispatchConfig_t* config_pointer = &config;
};

// A victim says the extents of a receive tensor (extents_of_rows) and the type of received ids (kIdType).
template <typename VictimType>
struct DispatchCallOf : DispatchArguments {
    using Victim = VictimType;
    explicit DispatchCallOf(Victim& made_for) : DispatchArguments(made_for.handle()), victim(made_for) {
        tokens.set(ncclBfloat16, {kVictimTokens, kVictimHidden}, victim.input());
        weights.set(ncclFloat32, {kVictimTokens, kVictimTopk}, victim.input());
        received.set(ncclBfloat16, victim.extents_of_rows(kVictimHidden), victim.output());
        received_weights.set(ncclFloat32, victim.extents_of_rows(kVictimTopk), victim.output());
        received_ids.set(Victim::kIdType, victim.extents_of_rows(kVictimTopk), victim.output());
        inputs.tokens = &tokens.tensor;
        outputs.tokens = &received.tensor;
    }
    void forward_scales() {
        config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
        scales.set(ncclUint8, {kVictimTokens, kVictimScales}, victim.input());
        received_scales.set(ncclUint8, victim.extents_of_rows(kVictimScales), victim.output());
        inputs.scales = &scales.tensor;
        outputs.scales = &received_scales.tensor;
    }

    Victim& victim;
};

struct CombineArguments {
    explicit CombineArguments(ncclEpHandle_t for_handle) : handle(for_handle) {}
    ncclResult_t operator()() {
        return ncclEpCombine(handle, inputs_pointer, outputs_pointer, config_pointer, nullptr);
    }

    ncclEpHandle_t handle;
    OpenTensor rows, weights, scales, combined, combined_weights;
    ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    ncclEpCombineConfig_t config = NCCL_EP_COMBINE_CONFIG_INIT;
    ncclEpCombineInputs_t* inputs_pointer = &inputs;
    ncclEpCombineOutputs_t* outputs_pointer = &outputs;
    ncclEpCombineConfig_t* config_pointer = &config;
};

template <typename VictimType>
struct CombineCallOf : CombineArguments {
    using Victim = VictimType;
    explicit CombineCallOf(Victim& made_for) : CombineArguments(made_for.handle()), victim(made_for) {
        rows.set(ncclBfloat16, victim.extents_of_rows(kVictimHidden), victim.input());
        scales.set(ncclFloat32, victim.extents_of_rows(1), victim.input());
        combined.set(ncclBfloat16, {kVictimTokens, kVictimHidden}, victim.output());
        inputs.tokens = &rows.tensor;
        outputs.tokens = &combined.tensor;
    }

    Victim& victim;
};

// One way to spoil a call, the code that it must get, and a word of the message.
template <typename Call>
struct Spoiled {
    const char* name;
    void (*spoil)(Call& call);
    const char* word;
    ncclResult_t code = ncclInvalidArgument;
};

// Makes every call of the table, each spoiled in its way: it gets its code, the message has its word, nothing is
// written; and then the group still works.
template <typename Call, typename CallVictim, size_t count>
void check_refusals(RankContext& context, CallVictim& victim, const Spoiled<Call> (&table)[count]) {
    for (const Spoiled<Call>& row : table) {
        Call call(victim);
        row.spoil(call);
        ncclEpGetVersion(nullptr);  // leaves another message
        const ncclResult_t result = call();
        const std::string message = crossdockGetLastError();
        RANK_CHECK(context, result == row.code, "{}: {} instead of {}, \"{}\"", row.name, result_name(result),
                   result_name(row.code), message);
        RANK_CHECK(context, message.find(row.word) != std::string::npos, "{}: the message \"{}\" does not say \"{}\"",
                   row.name, message, row.word);
        victim.check_untouched(row.name);
        // A call that was accepted has left the ranks in different places.
        if (result == ncclSuccess) throw StopProgram(row.name);
    }
    victim.check_working();
}

struct GroupCall {
    ncclComm_t comm;
    ncclEpGroupConfig_t config;
    ncclEpGroupConfig_t* config_pointer;
};

ncclEpGroupConfig_t good_group_config(RankContext& context, ncclEpAlgorithm_t algorithm);

// Makes every ncclEpCreateGroup of the table: it gets its code, the message has its word, no group is written.
void check_group_refusals(RankContext& context, ncclEpAlgorithm_t algorithm, std::span<const Spoiled<GroupCall>> table);

// On each backend, with a victim of that layout.
template <typename Call, size_t count>
void check_on_each_backend(ncclEpLayout_t layout, const Spoiled<Call> (&table)[count], auto... of_victim) {
    on_each_backend(kEveryBackend, [&](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [&](RankContext& context) {
            typename Call::Victim victim(context, layout, of_victim...);
            check_refusals(context, victim, table);
        });
    });
}

}  // namespace crossdock::testing
