// SPDX-License-Identifier: Apache-2.0
// Low-latency calls that are right in everything, to be spoiled in one point each.
#pragma once

#include "conformance/support/bad_call.h"
#include "conformance/support/layer.h"

namespace crossdock::testing {

class Victim : public VictimOf<Layer> {
  public:
    Victim(RankContext& context, ncclEpLayout_t layout, ncclEpZeroCopyMode_t zero_copy = NCCL_EP_ZERO_COPY_AUTO)
        : VictimOf(context, victim_problem(context.num_ranks(), layout), zero_copy) {}

    std::vector<size_t> extents_of_rows(size_t width) const {
        return {static_cast<size_t>(problem().num_blocks()), static_cast<size_t>(problem().slots()), width};
    }
    static constexpr ncclDataType_t kIdType = ncclInt32;
};

struct DispatchCall : DispatchCallOf<Victim> {
    explicit DispatchCall(Victim& victim);
    // 512 elements with 4 scales of fp32.
    void quantise();
};

struct CombineCall : CombineCallOf<Victim> {
    explicit CombineCall(Victim& victim);
    void quantise();
};

}  // namespace crossdock::testing
