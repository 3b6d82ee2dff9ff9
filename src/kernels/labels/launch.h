// SPDX-License-Identifier: Apache-2.0
// The kernels of routing, routing weights and expert ids, and rows by expert. They reach no other rank, and run on the
// GPU that their arguments name or on the calling thread.
#pragma once

#include "crossdock.h"
#include "runtime/launch.h"

namespace crossdock {

struct CountRouting {
    using Args = crossdockRoutingCounts_t;
    static constexpr const char* kName = "count routing";
    static LaunchShape shape(const Args& args);
};

struct PackLabels {
    using Args = crossdockLabelsSent_t;
    static constexpr const char* kName = "pack labels";
    static LaunchShape shape(const Args& args);
};

struct UnpackLabels {
    using Args = crossdockLabelsReceived_t;
    static constexpr const char* kName = "unpack labels";
    static LaunchShape shape(const Args& args);
};

struct PlaceRows {
    using Args = crossdockRowPlaces_t;
    static constexpr const char* kName = "place rows";
    static LaunchShape shape(const Args& args);
};

struct ExpandRows {
    using Args = crossdockExpandedRows_t;
    static constexpr const char* kName = "expand rows";
    static LaunchShape shape(const Args& args);
};

struct ReduceRows {
    using Args = crossdockReducedRows_t;
    static constexpr const char* kName = "reduce rows";
    static LaunchShape shape(const Args& args);
};

cpu::Executor& executor_of_calling_thread();

// Error where the launch fails.
template <typename Kernel>
void launch(const typename Kernel::Args& args, cudaStream_t stream) {
    launch<Kernel>(args.device < 0 ? &executor_of_calling_thread() : nullptr, args, Kernel::shape(args), stream);
}

}  // namespace crossdock
