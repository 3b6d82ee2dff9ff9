// SPDX-License-Identifier: Apache-2.0
// For kernels.cpp: how a kernel is run on the calling thread.
#pragma once

#include "device/platform.h"
#include "runtime/cpu/executor.h"
#include "runtime/launch.h"

namespace crossdock {

// run_on_cpu(Kernel, executor, args, shape) is the file's own, for kPeers: it chooses the variant and runs it. It is
// static, because arguments of a class do not lead to what is in unnamed namespaces.
template <typename Kernel, Peers kReached>
void OnCpu<Kernel, kReached>::launch(cpu::Executor& executor, const typename Kernel::Args& args,
                                     const LaunchShape& shape) {
    run_on_cpu(Kernel{}, executor, args, shape);
}

}  // namespace crossdock
