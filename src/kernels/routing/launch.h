// SPDX-License-Identifier: Apache-2.0
// The kernels of routing counts and packed routing. They access no other rank, and run on the GPU of their arguments or
// on the calling thread.
#pragma once

#include "crossdock.h"
#include "runtime/launch.h"

namespace crossdock {

struct CountRouting {
    using Args = crossdockRoutingCounts_t;
    static constexpr const char* kName = "count routing";
    static LaunchShape shape(const Args& args);
};

struct PackRouting {
    using Args = crossdockRoutingSent_t;
    static constexpr const char* kName = "pack routing";
    static LaunchShape shape(const Args& args);
};

struct UnpackRouting {
    using Args = crossdockRoutingReceived_t;
    static constexpr const char* kName = "unpack routing";
    static LaunchShape shape(const Args& args);
};

cpu::Executor& executor_of_calling_thread();

// Throws an Error if the launch fails.
template <typename Kernel>
void launch(const typename Kernel::Args& args, cudaStream_t stream) {
    launch<Kernel>(args.device < 0 ? &executor_of_calling_thread() : nullptr, args, Kernel::shape(args), stream);
}

}  // namespace crossdock
