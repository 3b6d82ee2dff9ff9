// SPDX-License-Identifier: Apache-2.0
// High-throughput calls that are right in everything, to be spoiled in one point each (bad_call.h).
#pragma once

#include "conformance/ht/random_problem.h"
#include "conformance/ll/bad_call.h"

namespace crossdock::testing {

// The buffers and the handle of one layout, after a whole step, in a group of its own: R ranks, E = 2 R, M = 4, K = 2,
// B = 3, rows of 64 bf16, 128 scales of a byte, max_token_bytes 1280; zones of 4 rows, room for all rows, or eager.
class HtVictim {
  public:
    HtVictim(RankContext& context, ncclEpLayout_t layout, bool is_eager = false);
    HtVictim(const HtVictim&) = delete;
    HtVictim& operator=(const HtVictim&) = delete;

    // Checks that nothing was written anywhere since the last call.
    void check_untouched(const std::string& after);
    // That the group still works.
    void check_working() { layer_.round_trip(); }

    ncclEpGroup_t group() const { return group_.get(); }
    const HtProblem& problem() const { return layer_.problem(); }
    // Rows that a receive tensor must have.
    size_t rows() const;
    size_t local_experts() const { return static_cast<size_t>(problem().local_experts()); }
    std::byte* input() { return input_.data(); }
    std::byte* output() { return output_.data(); }
    ncclEpHandle_t handle() const { return layer_.handle(); }

  private:
    RankContext& context_;
    Group group_;
    HtLayer layer_;
    cudaStream_t stream_;
    Buffer input_;   // every input tensor starts here: what it holds does not matter
    Buffer output_;  // and every output here
};

// A whole ncclEpUpdateHandle.
struct HtUpdateCall {
    explicit HtUpdateCall(HtVictim& victim);
    ncclResult_t operator()() { return ncclEpUpdateHandle(handle, ids_pointer, info_pointer, nullptr); }

    HtVictim& victim;
    ncclEpHandle_t handle;
    OpenTensor ids, counters, offsets, total;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    const ncclEpTensor_t* ids_pointer = &ids.tensor;
    const ncclEpLayoutInfo_t* info_pointer = &info;
};

struct HtDispatchCall : DispatchArguments {
    explicit HtDispatchCall(HtVictim& victim);
    void forward_scales();
    void go_backward();

    HtVictim& victim;
};

struct HtCombineCall : CombineArguments {
    explicit HtCombineCall(HtVictim& victim);
    void go_backward();

    HtVictim& victim;
};

}  // namespace crossdock::testing
