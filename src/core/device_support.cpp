// SPDX-License-Identifier: Apache-2.0
#include "core/device_support.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/recipes.h"

namespace crossdock {

void expect_supported_combine(unsigned int recipe, int compute_capability) {
    if (compute_capability == 0) return;
    for (const CombineRecipe& known : kCombineRecipes) {
        const std::span<const int> capable = known.compute_capabilities;
        if (static_cast<unsigned int>(known.value) != recipe || capable.empty()) continue;
        if (std::ranges::find(capable, compute_capability) != capable.end()) continue;
        std::string names;
        for (const int each : capable) {
            const char* between = names.empty() ? "" : each == capable.back() ? " or " : ", ";
            names += fmt::format("{}{}.{}", between, each / 10, each % 10);
        }
        fail(ncclInvalidUsage,
             "config->quant_recipe is {}, which needs a GPU of compute capability {}; this one has {}.{}", known.label,
             names, compute_capability / 10, compute_capability % 10);
    }
}

}  // namespace crossdock
