// SPDX-License-Identifier: Apache-2.0
// The kernel of routing counts. It accesses no other rank, and runs on the GPU of its arguments or on the calling
// thread.
#pragma once

#include "kernels/routing/arguments.h"
#include "runtime/launch.h"

namespace crossdock {

struct CountRouting {
    using Args = crossdockRoutingCounts_t;
    static constexpr const char* kName = "count routing";
    static LaunchShape shape(const Args& args);
};

cpu::Executor& executor_of_calling_thread();

// Throws an Error if the launch fails.
template <typename Kernel>
void launch(const typename Kernel::Args& args, cudaStream_t stream) {
    launch<Kernel>(args.device < 0 ? &executor_of_calling_thread() : nullptr, args, Kernel::shape(args), stream);
}

}  // namespace crossdock
