// SPDX-License-Identifier: Apache-2.0
// The high-throughput kernels on CPUs. Compiled twice (platform.h: Peers).
#include "kernels/ht/combine.h"
#include "kernels/ht/dispatch.h"
#include "kernels/ht/launch.h"
#include "kernels/ht/update.h"
#include "runtime/cpu/launch.h"

namespace crossdock {

static void run_on_cpu(HtUpdate, cpu::Executor& executor, const HtUpdateArgs& args, const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { ht_update(Ctx(warp), args); });
}

static void run_on_cpu(HtDispatch, cpu::Executor& executor, const HtDispatchArgs& args, const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { ht_dispatch(Ctx(warp), args); });
}

static void run_on_cpu(HtPublishingDispatch, cpu::Executor& executor, const HtPublishingDispatchArgs& args,
                       const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { ht_dispatch(Ctx(warp), args); });
}

static void run_on_cpu(HtCombine, cpu::Executor& executor, const HtCombineArgs& args, const LaunchShape& shape) {
    with_wire(args.dtype, args.wire, [&]<DType kDType, HtWire kWire>() {
        executor.run(shape, [&](cpu::Warp& warp) { ht_combine<kDType, kWire>(Ctx(warp), args); });
    });
}

static void run_on_cpu(HtElasticDispatch, cpu::Executor& executor, const HtElasticDispatchArgs& args,
                       const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { ht_dispatch(Ctx(warp), args); });
}

static void run_on_cpu(HtElasticCombine, cpu::Executor& executor, const HtElasticCombineArgs& args,
                       const LaunchShape& shape) {
    with_wire(args.dtype, args.wire, [&]<DType kDType, HtWire kWire>() {
        if constexpr (!is_quantised(kWire))  // core asks for no others
            executor.run(shape, [&](cpu::Warp& warp) { ht_combine<kDType, kWire>(Ctx(warp), args); });
    });
}

template struct OnCpu<HtUpdate, kPeers>;
template struct OnCpu<HtDispatch, kPeers>;
template struct OnCpu<HtPublishingDispatch, kPeers>;
template struct OnCpu<HtCombine, kPeers>;
template struct OnCpu<HtElasticDispatch, kPeers>;
template struct OnCpu<HtElasticCombine, kPeers>;

#if !defined(CROSSDOCK_GIN_PEERS)  // compiled once
static void run_on_cpu(HtMaskClean, cpu::Executor& executor, const HtMaskCleanArgs& args, const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { ht_mask_clean(Ctx(warp), args); });
}
template struct OnCpu<HtMaskClean, kPeers>;
#endif

}  // namespace crossdock
