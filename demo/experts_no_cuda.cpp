// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include "demo/expert_runner.h"

namespace crossdock::demo {

std::unique_ptr<ExpertRunner> make_cuda_experts(const LayerShape&, int, int, tools::Device&) {
    throw std::runtime_error(tools::why_no_cuda());
}

}  // namespace crossdock::demo
