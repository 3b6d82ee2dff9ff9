// SPDX-License-Identifier: Apache-2.0
#include "core/device_support.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "nccl_ep/ep_enums.h"

namespace crossdock {

void expect_supported_combine(unsigned int recipe, int compute_capability) {
    if (recipe != NCCL_EP_COMB_QUANT_NVFP4) return;
    constexpr std::array kConvertsToE2m1{0, 100, 103, 110, 120, 121};
    require(std::ranges::find(kConvertsToE2m1, compute_capability) != kConvertsToE2m1.end(), ncclInvalidUsage,
            "config->quant_recipe is NVFP4, which needs a GPU of compute capability 10.0, 10.3, 11.0, 12.0 or 12.1; "
            "this one has {}.{}",
            compute_capability / 10, compute_capability % 10);
}

}  // namespace crossdock
