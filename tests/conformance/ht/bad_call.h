// SPDX-License-Identifier: Apache-2.0
// High-throughput calls that are right in everything, to be spoiled in one point each.
#pragma once

#include "conformance/support/bad_call.h"
#include "conformance/support/layer.h"

namespace crossdock::testing {

// Zones of 4 rows, room for all rows, or eager.
class HtVictim : public VictimOf<Layer> {
  public:
    HtVictim(RankContext& context, ncclEpLayout_t layout, bool is_eager = false);

    // Rows that a receive tensor must have.
    size_t rows() const;
    std::vector<size_t> extents_of_rows(size_t width) const { return {rows(), width}; }
    size_t local_experts() const { return static_cast<size_t>(problem().local_experts()); }
    static constexpr ncclDataType_t kIdType = ncclInt64;
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

struct HtDispatchCall : DispatchCallOf<HtVictim> {
    explicit HtDispatchCall(HtVictim& victim);
    void go_backward();
};

struct HtCombineCall : CombineCallOf<HtVictim> {
    explicit HtCombineCall(HtVictim& victim);
    void go_backward();
};

}  // namespace crossdock::testing
