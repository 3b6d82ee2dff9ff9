// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of the high-throughput kernels. One kernel per operation, whose name contains the operation's,
// for profilers. Compiled twice (platform.h: Peers).
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "kernels/ht/combine.h"
#include "kernels/ht/dispatch.h"
#include "kernels/ht/launch.h"
#include "kernels/ht/update.h"
#include "runtime/cuda/launch.cuh"

namespace crossdock {
namespace {

constexpr int kMostThreads = 640;

template <Peers>
__global__ void __launch_bounds__(kMostThreads, 1) crossdock_ht_update(const __grid_constant__ HtUpdateArgs args) {
    ht_update(Ctx{}, args);
}

// Calls run(ctx), except in unused blocks; groups with GIN peers have none.
__device__ __forceinline__ void in_used_blocks(const HtCommon& common, auto run) {
    if constexpr (!kHasGinPeers) {
        const Ctx ctx(common.unused_blocks);
        if (ctx.is_used()) run(ctx);
    } else {
        run(Ctx{});
    }
}

template <Peers>
__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ht_dispatch_kernel(const __grid_constant__ HtDispatchArgs args) {
    in_used_blocks(args.common, [&](const Ctx& ctx) { ht_dispatch(ctx, args); });
}

template <Peers>
__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ht_publishing_dispatch(const __grid_constant__ HtPublishingDispatchArgs args) {
    in_used_blocks(args.common, [&](const Ctx& ctx) { ht_dispatch(ctx, args); });
}

template <DType kDType, HtWire kWire, Peers>
__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ht_combine_kernel(const __grid_constant__ HtCombineArgs args) {
    in_used_blocks(args.common, [&](const Ctx& ctx) { ht_combine<kDType, kWire>(ctx, args); });
}

template <Peers>
__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ht_elastic_dispatch(const __grid_constant__ HtElasticDispatchArgs args) {
    in_used_blocks(args.common, [&](const Ctx& ctx) { ht_dispatch(ctx, args); });
}

template <DType kDType, HtWire kWire, Peers>
__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ht_elastic_combine(const __grid_constant__ HtElasticCombineArgs args) {
    in_used_blocks(args.common, [&](const Ctx& ctx) { ht_combine<kDType, kWire>(ctx, args); });
}

}  // namespace

static void launch_on_gpu(HtUpdate, const HtUpdateArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    cuda::launch<crossdock_ht_update<kPeers>>(args, shape, stream, HtUpdate::kName);
}

static void launch_on_gpu(HtDispatch, const HtDispatchArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    cuda::launch<crossdock_ht_dispatch_kernel<kPeers>>(args, shape, stream, HtDispatch::kName);
}

static void launch_on_gpu(HtPublishingDispatch, const HtPublishingDispatchArgs& args, const LaunchShape& shape,
                          cudaStream_t stream) {
    cuda::launch<crossdock_ht_publishing_dispatch<kPeers>>(args, shape, stream, HtPublishingDispatch::kName);
}

static void launch_on_gpu(HtCombine, const HtCombineArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    with_wire(args.dtype, args.wire, [&]<DType kDType, HtWire kWire>() {
        if constexpr (!kHasGinPeers || !is_quantised(kWire))  // core refuses the others
            cuda::launch<crossdock_ht_combine_kernel<kDType, kWire, kPeers>>(args, shape, stream, HtCombine::kName);
    });
}

static void launch_on_gpu(HtElasticDispatch, const HtElasticDispatchArgs& args, const LaunchShape& shape,
                          cudaStream_t stream) {
    cuda::launch<crossdock_ht_elastic_dispatch<kPeers>>(args, shape, stream, HtElasticDispatch::kName);
}

static void launch_on_gpu(HtElasticCombine, const HtElasticCombineArgs& args, const LaunchShape& shape,
                          cudaStream_t stream) {
    with_wire(args.dtype, args.wire, [&]<DType kDType, HtWire kWire>() {
        if constexpr (!is_quantised(kWire)) {  // core asks for no others
            cuda::launch<crossdock_ht_elastic_combine<kDType, kWire, kPeers>>(args, shape, stream,
                                                                              HtElasticCombine::kName);
        }
    });
}

template struct OnGpu<HtUpdate, kPeers>;
template struct OnGpu<HtDispatch, kPeers>;
template struct OnGpu<HtPublishingDispatch, kPeers>;
template struct OnGpu<HtCombine, kPeers>;
template struct OnGpu<HtElasticDispatch, kPeers>;
template struct OnGpu<HtElasticCombine, kPeers>;

}  // namespace crossdock

#if !defined(CROSSDOCK_GIN_PEERS)  // compiled once
namespace crossdock {
namespace {

__global__ void crossdock_ht_mask_clean(const __grid_constant__ HtMaskCleanArgs args) { ht_mask_clean(Ctx{}, args); }

}  // namespace

static void launch_on_gpu(HtMaskClean, const HtMaskCleanArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    cuda::launch<crossdock_ht_mask_clean>(args, shape, stream, HtMaskClean::kName);
}

template struct OnGpu<HtMaskClean, kPeers>;

#if defined(CROSSDOCK_TIMELINE)
// Writes consecutive steps, each as long as a warp's total time in that phase.
void cuda::write_phases(int rank) {
    const char* folder = std::getenv("CROSSDOCK_TIMELINE_FOLDER");
    using AllTimes = PhaseTimes[kTimelineBlocks][kTimelineWarps];
    const auto times = std::make_unique<PhaseTimes[]>(kTimelineBlocks * kTimelineWarps);
    int device = 0;
    int clock_khz = 0;
    if (folder == nullptr || cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device) != cudaSuccess ||
        cudaMemcpyFromSymbol(times.get(), phase_times, sizeof(AllTimes)) != cudaSuccess)
        return;
    std::ofstream file(std::string(folder) + "/phases-" + std::to_string(rank) + ".jsonl");
    const auto write = [&](const char* kernel, Phase begin, const auto& names) {
        for (uint32_t i = 0; i < kTimelineBlocks * kTimelineWarps; ++i) {
            int64_t clocks = 0;
            for (uint32_t phase = 0; phase < std::size(names); ++phase) {
                const int64_t spent = times[i].total[static_cast<uint32_t>(begin) + phase];
                if (spent > 0 || (phase + 1 == std::size(names) && clocks > 0)) {
                    file << "{\"rank\":" << rank << ",\"kernel\":\"" << kernel << "\",\"block\":" << i / kTimelineWarps
                         << ",\"warp\":" << i % kTimelineWarps << ",\"sm\":" << times[i].sm << ",\"step\":\""
                         << names[phase] << "\",\"ns\":" << clocks * 1000000 / clock_khz << "}\n";
                }
                clocks += spent;
            }
        }
    };
    write("ht dispatch", Phase::kDispatchBegin, kDispatchPhases);
    write("ht combine", Phase::kCombineBegin, kCombinePhases);
}
#endif

}  // namespace crossdock
#endif
