// SPDX-License-Identifier: Apache-2.0
// High throughput: rows in the order of source rank and token, flat or in zones of experts.
#pragma once

#include <vector>

#include "bench/workload.h"

namespace crossdock::bench {

class HtWorkload : public Workload {
  public:
    HtWorkload(const LibraryComm& comm, const tools::RankContext& context, const Options& options,
               tools::Device& device, const std::vector<int32_t>& routing, const std::vector<float>& weights);

    // Also runs an update and a pair: not every library bears two updates without a dispatch between.
    void select(int num_tokens) override;
    Work work(Operation operation) override;
    Validation validate(const std::vector<int32_t>& routing, int num_tokens) override;

    // What validation reads and writes. Rows of tensors that are as long as capacity(), or, in eager mode, as
    // num_received() was at the last update.
    bool fills_to_the_end() const { return library_.is_crossdock(); }  // nccl_ep.h promises it, the original does not
    size_t num_rows() const { return num_rows_; }
    int32_t total() const { return total_->download<int32_t>(0, 1)[0]; }
    std::vector<int32_t> expert_counts() const;
    std::vector<int32_t> expert_offsets() const;
    std::vector<uint8_t> received_rows(size_t first, size_t count) const;
    std::vector<float> received_scales(size_t first, size_t count) const;
    std::vector<int64_t> received_experts(size_t first, size_t count) const;  // flat: [count][topk]
    std::vector<float> received_weights(size_t first, size_t count) const;    // flat: [count][topk], else [count]
    void set_expert_rows(size_t first, const std::vector<uint8_t>& rows);
    void set_expert_weights(size_t first, const std::vector<float>& weights);  // backward; shaped like received ones
    std::vector<uint8_t> result_rows(size_t first, size_t count) const;
    std::vector<float> result_weights(size_t first, size_t count) const;  // backward: [count][topk]

  private:
    size_t weights_per_row() const { return options_.is_expert_major() ? 1 : static_cast<size_t>(options_.topk); }
    size_t topk() const { return static_cast<size_t>(options_.topk); }
    void set_tensors(size_t num_tokens, size_t num_rows);
    void set_elastic();
    void update() override;
    void dispatch(bool send_only) override;
    void combine(bool send_only) override;

    size_t capacity_;  // rows that tensors have memory for
    size_t num_rows_ = 0;
    size_t row_bytes_in_;
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
    TensorMemory* offsets_;
    TensorMemory* total_;
    TensorMemory* expert_rows_;  // without a recipe the received rows' memory: experts work in place
    TensorMemory* expert_weights_;
    TensorMemory* results_;
    TensorMemory* result_weights_;
    TensorMemory* sources_;  // elastic, like the next
    TensorMemory* rank_ends_;
    std::vector<Tensor> tensors_;  // what the structs below point to
    ncclEpTensor_t* topk_idx_ = nullptr;
    ncclEpLayoutInfo_t layout_info_;
    ncclEpDispatchInputs_t dispatch_inputs_;
    ncclEpDispatchOutputs_t dispatch_outputs_;
    ncclEpDispatchConfig_t dispatch_config_;
    ncclEpCombineInputs_t combine_inputs_;
    ncclEpCombineOutputs_t combine_outputs_;
    ncclEpCombineConfig_t combine_config_;
    crossdockElasticDispatch_t elastic_dispatch_ = CROSSDOCK_ELASTIC_DISPATCH_INIT;
    crossdockElasticCombine_t elastic_combine_ = CROSSDOCK_ELASTIC_COMBINE_INIT;
};

}  // namespace crossdock::bench
