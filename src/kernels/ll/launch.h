// SPDX-License-Identifier: Apache-2.0
// The low-latency kernels, for `launch` (runtime/launch.h).
#pragma once

#include "kernels/ll/arguments.h"
#include "kernels/ll/mask_clean.h"
#include "kernels/ll/sources.h"
#include "runtime/launch.h"

namespace crossdock {

inline constexpr int kMostLlThreads = 512;  // of a block

struct LlDispatch {
    using Args = LlDispatchArgs;
    static constexpr const char* kName = "LL dispatch";
    static const Reach& reach(const Args& args) { return args.common.reach; }
};

struct LlCombine {
    using Args = LlCombineArgs;
    static constexpr const char* kName = "LL combine";
    static const Reach& reach(const Args& args) { return args.common.reach; }
};

struct LlMaskClean {
    using Args = LlMaskCleanArgs;
    static constexpr const char* kName = "LL mask clean";
    static const Reach& reach(const Args& args) { return args.exchange.reach; }
    static LaunchShape shape(Runtime& runtime) { return one_block(runtime, 8, sizeof(uint64_t)); }
};

struct LlSources {
    using Args = LlSourcesArgs;
    static constexpr const char* kName = "LL sources";
    static LaunchShape shape(Runtime& runtime) { return one_block(runtime, 16, 0); }
};

namespace cuda {
// In builds with CROSSDOCK_TIMELINE: write the steps of the current device's latest kernels, except those with GIN
// peers, into one file; in this order.
void write_dispatch_times(int rank);
void write_combine_times(int rank);
}  // namespace cuda

}  // namespace crossdock
