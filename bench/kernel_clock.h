// SPDX-License-Identifier: Apache-2.0
// How long kernels ran, by the GPU's own account (CUPTI, opened at run time). In a build without CUDA, or without
// CUPTI's header, there is none.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tools/common/device.h"

namespace crossdock::bench {

struct KernelRecord {
    enum class Kind { kOperation, kMeeting, kStop };  // the latter two are the gate's
    Kind kind;
    uint64_t start_ns;
    uint64_t end_ns;
};

// Records while it lives; kernels run a little slower then.
class KernelClock {
  public:
    virtual ~KernelClock() = default;

    // The kernels of the device's stream since the last call, by their start, with num_meetings of the gate's among
    // them (fewer only if some were lost). All ranks' streams must be drained.
    virtual std::vector<KernelRecord> take(size_t num_meetings) = 0;
};

// Null where there is none; `why` is the message then.
std::unique_ptr<KernelClock> make_kernel_clock(tools::Device& device, std::string& why);

}  // namespace crossdock::bench
