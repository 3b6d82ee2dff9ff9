// SPDX-License-Identifier: Apache-2.0
// Low latency: every zone, an expert's or a source rank's, has slots for the worst case.
#pragma once

#include <vector>

#include "bench/workload.h"

namespace crossdock::bench {

class LlWorkload : public Workload {
  public:
    LlWorkload(const LibraryComm& comm, const tools::RankContext& context, const Options& options,
               tools::Device& device, const std::vector<int32_t>& routing, const std::vector<float>& weights);

    void select(int num_tokens) override;
    Validation validate(const std::vector<int32_t>& routing, int num_tokens) override;

    // What validation reads and writes. Slots: [experts or ranks of zones()][slots()].
    size_t num_zones() const { return num_zones_; }
    size_t num_slots() const { return num_slots_; }
    std::vector<int32_t> zone_counts();
    std::vector<uint8_t> received_row(size_t zone, size_t slot);
    std::vector<float> received_scales(size_t zone, size_t slot);
    std::vector<int32_t> received_experts(size_t zone, size_t slot);  // rank-major
    std::vector<float> received_weights(size_t zone, size_t slot);    // rank-major
    void set_expert_row(size_t zone, size_t slot, const std::vector<uint8_t>& row);
    std::vector<uint8_t> result_row(size_t token);

  private:
    void update() override;
    void dispatch(bool send_only) override;
    void combine(bool send_only) override;

    size_t num_zones_;
    size_t num_slots_;
    size_t row_bytes_in_;
    size_t row_bytes_out_;
    size_t row_bytes_combine_;
    TensorMemory* tokens_;
    TensorMemory* scales_;
    TensorMemory* routing_;
    TensorMemory* weights_;
    TensorMemory* received_;
    TensorMemory* received_scales_;
    TensorMemory* received_experts_;
    TensorMemory* received_weights_;
    TensorMemory* counters_;
    TensorMemory* results_;
    TensorMemory* expert_rows_;           // without a recipe the received rows' memory: experts work in place
    std::vector<Tensor> tensors_;         // what the structs below point to
    ncclEpTensor_t* topk_idx_ = nullptr;  // one of them
    ncclEpDispatchInputs_t dispatch_inputs_;
    ncclEpDispatchOutputs_t dispatch_outputs_;
    ncclEpLayoutInfo_t layout_info_;
    ncclEpDispatchConfig_t dispatch_config_;
    ncclEpCombineInputs_t combine_inputs_;
    ncclEpCombineOutputs_t combine_outputs_;
    ncclEpCombineConfig_t combine_config_;
};

}  // namespace crossdock::bench
