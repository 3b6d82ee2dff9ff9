// SPDX-License-Identifier: Apache-2.0
// Runs kernels on the CPU: every warp of a launch is a fiber of the calling thread.
#pragma once

#include <functional>

#include "device/cpu/warp.h"
#include "runtime/cpu/ended_peers.h"
#include "runtime/runtime.h"

namespace crossdock::cpu {

class Scheduler;

class Executor {
  public:
    virtual ~Executor() = default;

    // Runs kernel once per warp of the shape and returns when all have returned. With the threads and processes
    // backends the calling thread switches between this launch's fibers; in the simulation the caller is itself a
    // fiber, and fibers of all ranks run. Rethrows a kernel's exception.
    virtual void run(const LaunchShape& shape, const std::function<void(Warp&)>& kernel) = 0;

    // Host-side wait of a rank's program: polls ready(). Returns true once it is true, false after deadline_ns, or if
    // the rank was killed by fault injection.
    virtual bool wait(const std::function<bool()>& ready, uint64_t deadline_ns) = 0;
    virtual uint64_t now_ns() = 0;

    // Call before the first launch. Kernels' waits for a rank end once that has ended. losses: must outlive the
    // executor's last launch.
    virtual void watch_peers(int num_ranks, PeerLosses& losses) = 0;
    // How often host-side waits look whether peers have ended.
    virtual uint64_t liveness_interval_ns() const { return 10'000'000; }

    // Null outside of the simulation.
    virtual Scheduler* scheduler() { return nullptr; }
};

}  // namespace crossdock::cpu
