// SPDX-License-Identifier: Apache-2.0
// One rank's group, handle and tensors in one library, and the operations on them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bench/validate.h"
#include "bench/work.h"
#include "bench/workload_memory.h"

namespace crossdock::bench {

class Workload {
  public:
    virtual ~Workload();
    Workload(const Workload&) = delete;
    Workload& operator=(const Workload&) = delete;

    const EpLibrary& library() const { return library_; }
    ncclComm_t comm() const { return comm_.get(); }
    ncclEpGroup_t group() const { return group_; }
    const StartUp& start_up() const { return start_up_; }

    // GPUs: what group, handle and, in high throughput, their first operations took of the GPU's memory. Ranks that
    // share a GPU cannot be told apart.
    size_t device_bytes() const { return device_bytes_; }

    // From now on the operations carry the first num_tokens tokens of every rank. Collective.
    virtual void select(int num_tokens) = 0;

    // What is timed of an operation: on the device's stream, not waiting for it.
    virtual Work work(Operation operation);

    // The halves of a dispatch or combine.
    void send(Operation operation);
    void complete();

    // A pass with a handle of its own: all but its end, and its end.
    void start_pass();
    void end_pass();

    // Runs a pair over num_tokens tokens per rank and checks it: this rank's part. Collective. routing: all ranks',
    // [ranks][max_tokens][topk].
    virtual Validation validate(const std::vector<int32_t>& routing, int num_tokens) = 0;

  protected:
    Workload(const LibraryComm& comm, const tools::RankContext& context, const Options& options, tools::Device& device);

    // Collective. Group configurations have equal fields in both modes; `config` holds those of the mode.
    void make_handle(ncclEpGroupConfig_t config, const ncclEpHandleConfig_t* handle_config);
    void note_memory();

    virtual void update() = 0;
    virtual void dispatch(bool send_only) = 0;
    virtual void combine(bool send_only) = 0;
    void run(Operation operation, int count);
    void run_once(Operation operation);  // a dispatch or combine

    // A dispatch and a combine of num_tokens tokens, each checked after it ends.
    template <typename Validator>
    Validation validate_pair(Validator validator, int num_tokens) {
        select(num_tokens);
        run_once(Operation::kDispatch);
        device_.synchronize();
        validator.check_dispatch();
        run_once(Operation::kCombine);
        device_.synchronize();
        validator.check_combine();
        return validator.result();
    }

    // Memory of a tensor, at least one byte; lives as long as this. In a window: collective.
    TensorMemory* allocate(size_t bytes, bool in_window = false);

    const EpLibrary& library_;
    const LibraryComm& comm_;
    const tools::RankContext& context_;
    const Options& options_;
    tools::Device& device_;
    StartUp start_up_;
    ncclEpGroup_t group_ = nullptr;
    ncclEpHandle_t handle_ = nullptr;

  private:
    void init_handle();

    std::vector<std::unique_ptr<TensorMemory>> memories_;  // outlive the group
    std::optional<ncclEpHandleConfig_t> handle_config_;
    ncclEpHandle_t kept_handle_ = nullptr;  // during a pass
    size_t used_before_ = 0;
    size_t device_bytes_ = 0;
};

// routing, weights: this rank's, [max_tokens][topk]. Collective.
std::unique_ptr<Workload> make_workload(const LibraryComm& comm, const tools::RankContext& context,
                                        const Options& options, tools::Device& device,
                                        const std::vector<int32_t>& routing, const std::vector<float>& weights);

}  // namespace crossdock::bench
