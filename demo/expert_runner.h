// SPDX-License-Identifier: Apache-2.0
// The experts of one rank, where its tensors lie.
#pragma once

#include <cstdint>
#include <memory>

#include "demo/options.h"
#include "tools/common/device.h"

namespace crossdock::demo {

class ExpertRunner {
  public:
    virtual ~ExpertRunner() = default;

    // rows [num_local][slots][hidden] bf16, of which counters [num_local] says how many of each expert are valid: they
    // become the experts' outputs, in place. Both lie in device memory.
    virtual void run(uint16_t* rows, const int32_t* counters, size_t slots) = 0;
};

std::unique_ptr<ExpertRunner> make_cpu_experts(const LayerShape& shape, int first_expert, int num_local);

// On the current GPU, on the device's stream. Only in builds with CUDA.
std::unique_ptr<ExpertRunner> make_cuda_experts(const LayerShape& shape, int first_expert, int num_local,
                                                tools::Device& device);

}  // namespace crossdock::demo
