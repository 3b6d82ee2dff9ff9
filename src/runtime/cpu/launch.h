// SPDX-License-Identifier: Apache-2.0
// For the modes' kernels on CPUs: runs a kernel on the calling thread.
#pragma once

#include "device/platform.h"
#include "runtime/cpu/executor.h"
#include "runtime/launch.h"

namespace crossdock {

// Each of their files defines run_on_cpu(Kernel, executor, args, shape) for its kPeers, which chooses the variant and
// runs it. It is static, because argument-dependent lookup does not search unnamed namespaces.
template <typename Kernel, Peers kReached>
void OnCpu<Kernel, kReached>::launch(cpu::Executor& executor, const typename Kernel::Args& args,
                                     const LaunchShape& shape) {
    run_on_cpu(Kernel{}, executor, args, shape);
}

}  // namespace crossdock
