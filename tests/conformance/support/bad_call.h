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

// The buffers and the handle of a layer, after a whole step, in a group of its own with max_token_bytes 1280. E = 2 R,
// M = 4, K = 2, B = 3, rows of 64 bf16. Every token goes to the first expert of its own rank and of the next one, so
// that rows come to all ranks. High throughput: zones of 4 rows, room for all rows, or eager.
class Victim {
  public:
    Victim(RankContext& context, ncclEpAlgorithm_t mode, ncclEpLayout_t layout, bool is_eager = false);

    // Checks that nothing was written anywhere since the last call.
    void check_untouched(const std::string& after);
    // That the group still works.
    void check_working() { layer_.round_trip(); }

    ncclEpGroup_t group() const { return group_.get(); }
    const Problem& problem() const { return layer_.problem(); }
    std::byte* input() { return input_.data(); }
    std::byte* output() { return output_.data(); }
    std::byte* routing() { return layer_.ids(); }
    ncclEpHandle_t handle() const { return layer_.handle(); }
    // For calls that go through. On the legacy default stream, the kernels of two ranks of one process that share a GPU
    // would run one after the other, and the first would wait for the second.
    cudaStream_t stream() const { return layer_.stream(); }
    size_t local_experts() const { return static_cast<size_t>(problem().local_experts()); }
    // That a receive tensor, or one of weights, must have.
    std::vector<size_t> extents_of_rows(size_t width) const { return row_extents(problem(), num_rows(), width); }
    std::vector<size_t> extents_of_weights() const { return weight_extents(problem(), num_rows()); }

    static constexpr size_t kBufferBytes = 1u << 19;

    // With which calls quantise.
    DispatchRecipe dispatch_recipe = recipe_of(NCCL_EP_DISP_QUANT_DS_FP8E3M4);
    CombineRecipe combine_recipe = recipe_of(NCCL_EP_COMB_QUANT_NVFP4);

  private:
    Victim(RankContext& context, const Problem& problem);
    size_t num_rows() const;

    RankContext& context_;
    Group group_;
    Layer layer_;
    Buffer input_;   // every input tensor starts here: what it holds does not matter
    Buffer output_;  // and every output here
};

// A whole ncclEpUpdateHandle of high throughput.
struct UpdateCall {
    explicit UpdateCall(Victim& victim);
    ncclResult_t operator()() { return ncclEpUpdateHandle(handle, ids_pointer, info_pointer, nullptr); }

    Victim& victim;
    ncclEpHandle_t handle;
    OpenTensor ids, counters, offsets, total;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    const ncclEpTensor_t* ids_pointer = &ids.tensor;
    const ncclEpLayoutInfo_t* info_pointer = &info;
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

struct DispatchCall : DispatchArguments {
    explicit DispatchCall(Victim& victim);
    void forward_scales();
    // Low latency: as victim.dispatch_recipe says, rows of 512 elements.
    void quantise();
    // High throughput.
    void go_backward();

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

struct CombineCall : CombineArguments {
    explicit CombineCall(Victim& victim);
    // As victim.combine_recipe says.
    void quantise();
    // High throughput.
    void go_backward();

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
template <typename Call, size_t count>
void check_refusals(RankContext& context, Victim& victim, const Spoiled<Call> (&table)[count]) {
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
void check_on_each_backend(ncclEpAlgorithm_t mode, ncclEpLayout_t layout, const Spoiled<Call> (&table)[count],
                           bool is_eager = false) {
    on_each_backend(kEveryBackend, [&](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [&](RankContext& context) {
            Victim victim(context, mode, layout, is_eager);
            check_refusals(context, victim, table);
        });
    });
}

}  // namespace crossdock::testing
