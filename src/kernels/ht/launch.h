// SPDX-License-Identifier: Apache-2.0
// The high-throughput kernels, for `launch` (runtime/launch.h).
#pragma once

#include "kernels/ht/mask_clean.h"
#include "runtime/launch.h"

namespace crossdock {

struct HtUpdate {
    using Args = HtUpdateArgs;
    static constexpr const char* kName = "HT update";
    static const Reach& reach(const Args& args) { return args.common.reach; }
};

struct HtDispatch {
    using Args = HtDispatchArgs;
    static constexpr const char* kName = "HT dispatch";
    static const Reach& reach(const Args& args) { return args.common.reach; }
};

struct HtPublishingDispatch {
    using Args = HtPublishingDispatchArgs;
    static constexpr const char* kName = "HT publishing dispatch";
    static const Reach& reach(const Args& args) { return args.common.reach; }
};

struct HtCombine {
    using Args = HtCombineArgs;
    static constexpr const char* kName = "HT combine";
    static const Reach& reach(const Args& args) { return args.common.reach; }
};

struct HtElasticDispatch {
    using Args = HtElasticDispatchArgs;
    static constexpr const char* kName = "HT elastic dispatch";
    static const Reach& reach(const Args& args) { return args.common.reach; }
};

struct HtElasticCombine {
    using Args = HtElasticCombineArgs;
    static constexpr const char* kName = "HT elastic combine";
    static const Reach& reach(const Args& args) { return args.common.reach; }
};

// Groups with masks have LSA peers only.
struct HtMaskClean {
    using Args = HtMaskCleanArgs;
    static constexpr const char* kName = "HT mask clean";
    static LaunchShape shape(Runtime& runtime) { return one_block(runtime, 8, sizeof(uint64_t)); }
};

namespace cuda {
void write_phases(int rank);  // in builds with CROSSDOCK_TIMELINE: of the current device's latest kernels
}

}  // namespace crossdock
