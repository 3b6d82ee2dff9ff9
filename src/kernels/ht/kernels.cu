// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of the high-throughput kernels. One kernel an operation, whose name carries the word by which
// profilers find it.
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

namespace crossdock::cuda {
namespace {

constexpr int kMostThreads = 640;

__global__ void __launch_bounds__(kMostThreads, 1) crossdock_ht_update(const __grid_constant__ HtUpdateArgs args) {
    ht_update(Ctx{}, args);
}

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ht_dispatch_kernel(const __grid_constant__ HtDispatchArgs args) {
    const Ctx ctx(args.common.unused_blocks);
    if (ctx.block_idx() >= 0) ht_dispatch(ctx, args);
}

template <DType kDType>
__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ht_combine_kernel(const __grid_constant__ HtCombineArgs args) {
    const Ctx ctx(args.common.unused_blocks);
    if (ctx.block_idx() >= 0) ht_combine<kDType>(ctx, args);
}

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ht_combine_mxfp8(const __grid_constant__ HtCombineArgs args) {
    const Ctx ctx(args.common.unused_blocks);
    if (ctx.block_idx() >= 0) ht_combine<DType::kBf16, HtWire::kMxfp8>(ctx, args);
}

__global__ void crossdock_ht_mask_clean(const __grid_constant__ HtMaskCleanArgs args) { ht_mask_clean(Ctx{}, args); }

#if defined(CROSSDOCK_TIMELINE)
constexpr const char* kPhaseNames[] = {"begin",  "stage", "target", "load",   "store", "receive",
                                       "labels", "end",   "begin",  "slot",   "stage", "sum",
                                       "store",  "rows",  "add",    "credit", "end"};
static_assert(std::size(kPhaseNames) == kNumPhases);
#endif

}  // namespace

#if defined(CROSSDOCK_TIMELINE)
// As steps that follow each other, each as long as all of a warp's times in that phase.
void write_phases(int rank) {
    const char* folder = std::getenv("CROSSDOCK_TIMELINE_FOLDER");
    using AllTimes = PhaseTimes[kTimelineBlocks][kTimelineWarps];
    const auto times = std::make_unique<PhaseTimes[]>(kTimelineBlocks * kTimelineWarps);
    int device = 0;
    int clock_khz = 0;
    if (folder == nullptr || cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device) != cudaSuccess ||
        cudaMemcpyFromSymbol(times.get(), gpu::phase_times, sizeof(AllTimes)) != cudaSuccess)
        return;
    std::ofstream file(std::string(folder) + "/phases-" + std::to_string(rank) + ".jsonl");
    for (const Phase begin : {Phase::kDispatchBegin, Phase::kCombineBegin}) {
        const uint32_t first = static_cast<uint32_t>(begin);
        const uint32_t last = static_cast<uint32_t>(end_of(begin));
        for (uint32_t i = 0; i < kTimelineBlocks * kTimelineWarps; ++i) {
            int64_t clocks = 0;
            for (uint32_t phase = first; phase <= last; ++phase) {
                const int64_t spent = times[i].total[phase];
                if (spent > 0 || (phase == last && clocks > 0)) {
                    file << "{\"rank\":" << rank << ",\"kernel\":\"ht "
                         << (begin == Phase::kDispatchBegin ? "dispatch" : "combine")
                         << "\",\"block\":" << i / kTimelineWarps << ",\"warp\":" << i % kTimelineWarps
                         << ",\"sm\":" << times[i].sm << ",\"step\":\"" << kPhaseNames[phase]
                         << "\",\"ns\":" << clocks * 1000000 / clock_khz << "}\n";
                }
                clocks += spent;
            }
        }
    }
}
#endif

void launch_ht_update(const HtUpdateArgs& args, LaunchShape shape, cudaStream_t stream) {
    launch<crossdock_ht_update>(args, shape, stream, "HT update");
}

void launch_ht_dispatch(const HtDispatchArgs& args, LaunchShape shape, cudaStream_t stream) {
    launch<crossdock_ht_dispatch_kernel>(args, shape, stream, "HT dispatch");
}

void launch_ht_combine(const HtCombineArgs& args, LaunchShape shape, cudaStream_t stream) {
    if (args.wire == HtWire::kMxfp8) return launch<crossdock_ht_combine_mxfp8>(args, shape, stream, "HT combine");
    switch (args.dtype) {
        case DType::kBf16:
            return launch<crossdock_ht_combine_kernel<DType::kBf16>>(args, shape, stream, "HT combine");
        case DType::kF16:
            return launch<crossdock_ht_combine_kernel<DType::kF16>>(args, shape, stream, "HT combine");
        case DType::kF32:
            return launch<crossdock_ht_combine_kernel<DType::kF32>>(args, shape, stream, "HT combine");
    }
}

void launch_ht_mask_clean(const HtMaskCleanArgs& args, LaunchShape shape, cudaStream_t stream) {
    launch<crossdock_ht_mask_clean>(args, shape, stream, "HT mask clean");
}

}  // namespace crossdock::cuda
