// SPDX-License-Identifier: Apache-2.0
// Lining up the streams of all ranks, so that what is timed on the device does not depend on when hosts enqueue it. In
// a build without CUDA make_gpu_gate throws.
#pragma once

#include <memory>
#include <string>

#include "tools/common/device.h"

namespace crossdock::bench {

class GpuGate {
  public:
    virtual ~GpuGate() = default;

    // Enqueues a stop: what follows on the stream begins after open(), when the host has enqueued everything.
    virtual void close() = 0;
    virtual void open() = 0;

    // Enqueues a meeting: what follows on the stream begins when all ranks' streams have come here.
    virtual void meet() = 0;
};

// What the names of its kernels contain.
inline constexpr const char* kStopKernel = "wait_for_host";
inline constexpr const char* kMeetingKernel = "meet_ranks";

// Collective. A stop lasts a second at most, and a meeting 20; then the work goes on and whatever is wrong shows there.
// Null, and `why`, where the ranks are not one LSA team.
std::unique_ptr<GpuGate> make_gpu_gate(const tools::RankContext& context, ncclComm_t comm, tools::Device& device,
                                       std::string& why);

}  // namespace crossdock::bench
