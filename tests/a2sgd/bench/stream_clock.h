// SPDX-License-Identifier: Apache-2.0
// Times between places of a device's stream, and the copy that passes over a gradient are compared with.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tools/common/device.h"

namespace crossdock::bench {

class StreamClock {
  public:
    virtual ~StreamClock() = default;

    // Notes the time when the stream comes here.
    virtual void mark() = 0;
    // Waits; the times between the marks since the last call, us.
    virtual std::vector<double> laps_us() = 0;
    // Enqueued; both in the device's memory.
    virtual void copy(void* target, const void* source, size_t bytes) = 0;
};

std::unique_ptr<StreamClock> make_cpu_clock();
std::string name_of_gpu();                                          // the current one; empty in a build without CUDA
std::unique_ptr<StreamClock> make_cuda_clock(cudaStream_t stream);  // throws in a build without CUDA

}  // namespace crossdock::bench
