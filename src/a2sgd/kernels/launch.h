// SPDX-License-Identifier: Apache-2.0
// The kernels of A2SGD, for `launch` (runtime/launch.h).
#pragma once

#include "a2sgd/kernels/arguments.h"
#include "runtime/launch.h"

namespace crossdock {

struct A2sgdSumsKernel {
    using Args = A2sgdArgs;
    static constexpr const char* kName = "A2SGD sums";
    static const Reach& reach(const Args& args) { return args.reach; }
};

struct A2sgdMeansKernel {
    using Args = A2sgdArgs;
    static constexpr const char* kName = "A2SGD means";
    static const Reach& reach(const Args& args) { return args.reach; }
};

struct A2sgdApplyKernel {
    using Args = A2sgdArgs;
    static constexpr const char* kName = "A2SGD apply";
};

}  // namespace crossdock
