// SPDX-License-Identifier: Apache-2.0
// Calls that are right in everything, to be spoiled in one point each: descriptors, structs and arguments lie open.
#pragma once

#include <deque>

#include "conformance/ll/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {

// A tensor descriptor with extents that a test may change.
struct OpenTensor {
    ncclEpTensor_t tensor = NCCL_EP_TENSOR_INIT;
    size_t sizes[4] = {};

    void set(ncclDataType_t type, std::initializer_list<size_t> extents, void* data);
};

// The buffers and the handle of one layout, after a dispatch and a combine, in a group of its own: R ranks, E = 2 R, M
// = 4, K = 2, B = 3, rows of 64 bf16, 128 scales of a byte (forwarding) or 4 of fp32 (512 elements quantised).
class Victim {
  public:
    Victim(RankContext& context, ncclEpLayout_t layout, ncclEpZeroCopyMode_t zero_copy = NCCL_EP_ZERO_COPY_AUTO);
    Victim(const Victim&) = delete;
    Victim& operator=(const Victim&) = delete;

    // Checks that nothing was written anywhere since the last call.
    void check_untouched(const std::string& after);
    // That the group still works.
    void check_working() { layer_.round_trip(); }

    RankContext& context() { return context_; }
    ncclEpGroup_t group() const { return group_.get(); }
    const Problem& problem() const { return layer_.problem(); }
    size_t blocks() const { return static_cast<size_t>(problem().num_blocks()); }
    size_t slots() const { return static_cast<size_t>(problem().slots()); }
    std::byte* input() { return input_.data(); }
    std::byte* output() { return output_.data(); }
    std::byte* routing() { return layer_.ids(); }
    ncclEpHandle_t handle() const { return layer_.handle(); }

    static constexpr size_t kBufferBytes = 1u << 19;

  private:
    RankContext& context_;
    Group group_;
    Layer layer_;
    cudaStream_t stream_;
    Buffer input_;   // every input tensor starts here: what it holds does not matter
    Buffer output_;  // and every output here
};

// What a whole ncclEpDispatch points to, in either mode. Pointers in `inputs`, `outputs` and `info` may be set to null.
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
    void quantise();

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
    void quantise();

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

template <typename Call, size_t count>
void check_refusals(RankContext& context, ncclEpLayout_t layout, const Spoiled<Call> (&table)[count]) {
    Victim victim(context, layout);
    check_refusals(context, victim, table);
}

}  // namespace crossdock::testing
