// SPDX-License-Identifier: Apache-2.0
// The experts of one rank, where its tensors lie.
#pragma once

#include <cstdint>
#include <memory>

#include "demo/options.h"
#include "tools/common/device.h"

namespace crossdock::demo {

// Rows of high throughput in zones of experts, [num_rows][hidden] bf16, all in device memory. Counts and offsets are
// read where the work runs, not by the host.
struct ZoneRows {
    const uint16_t* rows;
    const float* weights;     // [num_rows], that the results are multiplied with
    const int32_t* offsets;   // [num_local] first row of an expert's zone
    const int32_t* counters;  // [num_local] rows in it
};

class ExpertRunner {
  public:
    virtual ~ExpertRunner() = default;

    // rows [num_local][slots][hidden] bf16, of which counters [num_local] says how many of each expert are valid: they
    // become the experts' outputs, in place. Both lie in device memory.
    virtual void run(uint16_t* rows, const int32_t* counters, size_t slots) = 0;

    // results [num_rows][hidden]: each weight times what the expert makes of the row, rounded to bf16 before and after
    // the multiplication. Rows outside the zones are not touched.
    virtual void run_zones(const ZoneRows& zones, uint16_t* results) = 0;

    // gradients: of the results. row_gradients [num_rows][hidden]: each weight times the gradient of the row, rounded
    // likewise; weight_gradients [num_rows].
    virtual void run_zones_backward(const ZoneRows& zones, const uint16_t* gradients, uint16_t* row_gradients,
                                    float* weight_gradients) = 0;
};

std::unique_ptr<ExpertRunner> make_cpu_experts(const LayerShape& shape, int first_expert, int num_local);

// On the current GPU, on the device's stream. Only in builds with CUDA.
std::unique_ptr<ExpertRunner> make_cuda_experts(const LayerShape& shape, int first_expert, int num_local,
                                                tools::Device& device);

}  // namespace crossdock::demo
