// SPDX-License-Identifier: Apache-2.0
//
// The C API's structs of tensors as Python classes that hold arrays, and as what a call needs.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <vector>

#include "array.h"

namespace crossdock::python {

// As Python holds them: any array, or None.
struct DispatchInputs {
    nanobind::object tokens, topk_weights, scales;
};
struct DispatchOutputs {
    nanobind::object tokens, topk_weights, scales, topk_idx;
};
struct CombineInputs {
    nanobind::object tokens, topk_weights, scales;
};
struct CombineOutputs {
    nanobind::object tokens, topk_weights;
};
struct LayoutInfo {
    nanobind::object expert_counters, src_rank_counters, expert_offsets, recv_total_counter;
    ncclEpExpertIdKind_t recv_topk_idx_kind = NCCL_EP_EXPERT_ID_AUTO;
};

// The arrays of one call, in a place that does not move while the call runs.
class CallArrays {
  public:
    // num: no more are added.
    explicit CallArrays(bool is_cpu, size_t num = kMost) : is_cpu_(is_cpu) { arrays_.reserve(num); }

    // NULL for None. InvalidArgument: not an array, or one in memory that the group's ranks cannot reach.
    ncclEpTensor_t* add(nanobind::handle object, const char* name, Access access);

    // The same of a tensor of torch that has been looked at (fault_of_memory), or of another array.
    ncclEpTensor_t* add_known(nanobind::handle object, const char* name, Access access);

    // The same, its rows read as ones of another type, whose elements divide 16 bytes, as rows must be divided by them.
    // nullopt: as their own type, or as bytes if the library does not carry that.
    ncclEpTensor_t* add_rows(nanobind::handle object, const char* name, Access access,
                             std::optional<ncclDataType_t> type);

    // The same of a torch tensor whose last two dimensions lie the other way round in memory.
    ncclEpTensor_t* add_transposed(nanobind::handle object, const char* name, Access access);

    // The same of an array that the caller has described; it may have strides, which are the caller's business.
    ncclEpTensor_t* add_described(Array array, const char* name) { return add_array(std::move(array), name); }

    ncclEpDispatchInputs_t dispatch_inputs(nanobind::handle inputs);
    ncclEpDispatchOutputs_t dispatch_outputs(nanobind::handle outputs);
    ncclEpCombineInputs_t combine_inputs(nanobind::handle inputs);
    // Expert-major low latency reads the weights, so they may be read-only there.
    ncclEpCombineOutputs_t combine_outputs(nanobind::handle outputs, bool reads_weights);
    // NULL for None. The struct lives as long as this object.
    const ncclEpLayoutInfo_t* layout_info(nanobind::handle info);

    // The CUDA device of the first array, or -1.
    int device() const { return device_; }
    std::vector<Array> take() { return std::move(arrays_); }

  private:
    static constexpr size_t kMost = 16;

    ncclEpTensor_t* add_array(Array array, const char* name);

    bool is_cpu_;
    int device_ = -1;
    std::vector<Array> arrays_;
    ncclEpLayoutInfo_t layout_info_{};
};

void bind_arguments(nanobind::module_& module);

}  // namespace crossdock::python
