// SPDX-License-Identifier: Apache-2.0
// One rank's group, handle and tensors in one library, and the two operations on them.
#pragma once

#include <memory>
#include <vector>

#include "bench/library.h"
#include "bench/options.h"
#include "crossdock/tensor.hpp"
#include "tools/common/device.h"

namespace crossdock::bench {

// What it took to come to the first operation, on rank 0, ms.
struct StartUp {
    double communicator = 0;  // GPUs: ncclCommInitRank
    double first_window = 0;  // GPUs: memory and window of NCCL's that a communicator is asked for first
    double group = 0;
    double handle = 0;
};

// The communicator that a library's group is made on. Collective to make and to destroy.
class LibraryComm {
  public:
    LibraryComm(const EpLibrary& library, const tools::RankContext& context, World world);
    ~LibraryComm();
    LibraryComm(const LibraryComm&) = delete;
    LibraryComm& operator=(const LibraryComm&) = delete;

    const EpLibrary& library() const { return library_; }
    ncclComm_t get() const { return comm_; }
    const StartUp& start_up() const { return start_up_; }

  private:
    enum class Origin { kHost, kLibrary, kNccl };

    const EpLibrary& library_;
    Origin origin_;
    ncclComm_t comm_ = nullptr;
    StartUp start_up_;
};

// Memory of one tensor: the device's, or a window's.
class TensorMemory {
  public:
    // In a window: collective.
    TensorMemory(const EpLibrary& library, ncclComm_t comm, World world, tools::Device& device, size_t bytes,
                 bool in_window);
    ~TensorMemory();
    TensorMemory(const TensorMemory&) = delete;
    TensorMemory& operator=(const TensorMemory&) = delete;

    void* data() const { return data_; }
    ncclWindow_t window() const { return window_; }

    // Names this memory, by its window too where it has one.
    Tensor tensor(ncclDataType_t dtype, std::initializer_list<size_t> extents) const;

  private:
    const EpLibrary& library_;
    ncclComm_t comm_;
    World world_;
    tools::Device& device_;
    void* data_ = nullptr;
    ncclWindow_t window_ = nullptr;
};

class Workload {
  public:
    // routing, weights: this rank's, [max_tokens][topk]. Collective.
    Workload(const LibraryComm& comm, const tools::RankContext& context, const Options& options, tools::Device& device,
             const std::vector<int32_t>& routing, const std::vector<float>& weights);
    ~Workload();
    Workload(const Workload&) = delete;
    Workload& operator=(const Workload&) = delete;

    const EpLibrary& library() const { return library_; }
    ncclComm_t comm() const { return comm_.get(); }
    ncclEpGroup_t group() const { return group_; }
    const StartUp& start_up() const { return start_up_; }

    // From now on the operations carry the first num_tokens tokens of every rank.
    void select(int num_tokens);

    // On the device's stream, not waiting for it.
    void dispatch() { dispatch(false); }
    void combine() { combine(false); }
    void run(Operation operation, int count);

    // The halves of a dispatch or combine.
    void send(Operation operation);
    void complete();

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
    TensorMemory& memory_of_expert_rows() { return expert_rows_ ? *expert_rows_ : received_; }
    void make_handle();
    void dispatch(bool send_only);
    void combine(bool send_only);

    const EpLibrary& library_;
    const Options& options_;
    tools::Device& device_;
    const LibraryComm& comm_;
    StartUp start_up_;
    size_t num_zones_;
    size_t num_slots_;
    size_t row_bytes_in_;
    size_t row_bytes_out_;
    size_t row_bytes_combine_;
    TensorMemory tokens_;
    TensorMemory scales_;
    TensorMemory routing_;
    TensorMemory weights_;
    TensorMemory received_;
    TensorMemory received_scales_;
    TensorMemory received_experts_;
    TensorMemory received_weights_;
    TensorMemory counters_;
    TensorMemory results_;
    std::unique_ptr<TensorMemory> expert_rows_;  // null: the received rows' memory, as experts work in place
    ncclEpGroup_t group_ = nullptr;
    ncclEpHandle_t handle_ = nullptr;
    std::vector<Tensor> tensors_;  // what the structs below point to
    ncclEpDispatchInputs_t dispatch_inputs_;
    ncclEpDispatchOutputs_t dispatch_outputs_;
    ncclEpLayoutInfo_t layout_info_;
    ncclEpDispatchConfig_t dispatch_config_;
    ncclEpCombineInputs_t combine_inputs_;
    ncclEpCombineOutputs_t combine_outputs_;
    ncclEpCombineConfig_t combine_config_;
};

}  // namespace crossdock::bench
