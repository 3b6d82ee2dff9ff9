// SPDX-License-Identifier: Apache-2.0
// Runs kernels on the CPU: every warp of a launch is a fiber of the calling thread.
#pragma once

#include <functional>

#include "device/cpu/warp.h"
#include "runtime/runtime.h"

namespace crossdock::cpu {

class Scheduler;

class Executor {
  public:
    virtual ~Executor() = default;

    // Runs kernel once per warp of the shape and returns when all have returned. With the threads and processes
    // backends the calling thread switches between this launch's fibers; in the simulation the caller is itself a fiber
    // and all ranks' fibers take part. An exception of a kernel is rethrown here.
    virtual void run(const LaunchShape& shape, const std::function<void(Warp&)>& kernel) = 0;

    // Host-side wait of a rank's program: polls ready until it is true (returns true) or the clock passes deadline_ns
    // (false).
    virtual bool wait(const std::function<bool()>& ready, uint64_t deadline_ns) = 0;
    virtual uint64_t now_ns() = 0;

    // The simulation's; null elsewhere.
    virtual Scheduler* scheduler() { return nullptr; }
};

}  // namespace crossdock::cpu
