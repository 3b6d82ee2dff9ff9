// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of the low-latency kernels. One launch per operation (variants.h chooses its kernel), whose
// name contains the operation's, for profilers. Compiled twice (platform.h: Peers).
#include <cuda_runtime.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>

#include "kernels/ll/combine_receive.h"
#include "kernels/ll/dispatch_receive.h"
#include "kernels/ll/launch.h"
#include "kernels/ll/variants.h"
#include "runtime/cuda/launch.cuh"

namespace crossdock {
namespace {

constexpr int kMostThreads = 512;

template <typename Args, Peers>
__global__ void __launch_bounds__(kMostThreads, 1) crossdock_ll_dispatch(const __grid_constant__ Args args) {
    ll_dispatch(Ctx{}, args);
}

template <DType kDType, RowForms kForms, typename Args, Peers>
__global__ void __launch_bounds__(kMostThreads, 1) crossdock_ll_combine(const __grid_constant__ Args args) {
    ll_combine<kDType, kForms>(Ctx{}, args);
}

template <Peers>
__global__ void crossdock_ll_mask_clean(const __grid_constant__ LlMaskCleanArgs args) {
    ll_mask_clean(Ctx{}, args);
}

}  // namespace

static void launch_on_gpu(LlDispatch, const LlDispatchArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    with_dispatch_variant(args, [&]<typename Args>(const Args& known) {
        cuda::launch<crossdock_ll_dispatch<Args, kPeers>>(known, shape, stream, LlDispatch::kName);
    });
}

static void launch_on_gpu(LlCombine, const LlCombineArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    with_combine_variant(args, [&]<DType kDType, typename Args>(const Args& known) {
        const auto run = [&]<RowForms kForms>() {
            cuda::launch<crossdock_ll_combine<kDType, kForms, Args, kPeers>>(known, shape, stream, LlCombine::kName);
        };
        if constexpr (!std::is_same_v<Args, LlCombineArgs>) {
            run.template operator()<Args::forms>();
        } else if constexpr (kHasGinPeers) {
            run.template operator()<RowForms::kBoth>();
        } else {
            known.forms == RowForms::kLl128 ? run.template operator()<RowForms::kLl128>()
                                            : run.template operator()<RowForms::kBoth>();
        }
    });
}

static void launch_on_gpu(LlMaskClean, const LlMaskCleanArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    cuda::launch<crossdock_ll_mask_clean<kPeers>>(args, shape, stream, LlMaskClean::kName);
}

template struct OnGpu<LlDispatch, kPeers>;
template struct OnGpu<LlCombine, kPeers>;
template struct OnGpu<LlMaskClean, kPeers>;

}  // namespace crossdock

#if !defined(CROSSDOCK_GIN_PEERS)  // compiled once
namespace crossdock {
namespace {

__global__ void __launch_bounds__(kMostThreads, 1) crossdock_ll_sources(const __grid_constant__ LlSourcesArgs args) {
    ll_sources(Ctx{}, args);
}

}  // namespace

static void launch_on_gpu(LlSources, const LlSourcesArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    cuda::launch<crossdock_ll_sources>(args, shape, stream, LlSources::kName);
}

template struct OnGpu<LlSources, kPeers>;

#if defined(CROSSDOCK_TIMELINE)
void cuda::write_timeline(int rank) {
    const char* folder = std::getenv("CROSSDOCK_TIMELINE_FOLDER");
    struct Times {
        int64_t clocks[kTimelineBlocks][kTimelineWarps][kTimelineSteps];
        uint64_t begin_ns[kTimelineBlocks][kTimelineWarps][kTimelineSteps];
    };
    const auto times = std::make_unique<Times>();
    const auto& [clocks, begin_ns] = *times;
    int device = 0;
    int clock_khz = 0;
    if (folder == nullptr || cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device) != cudaSuccess ||
        cudaMemcpyFromSymbol(times->clocks, timeline_clocks, sizeof clocks) != cudaSuccess ||
        cudaMemcpyFromSymbol(times->begin_ns, timeline_begin_ns, sizeof begin_ns) != cudaSuccess)
        return;
    std::ofstream file(std::string(folder) + "/timeline-" + std::to_string(rank) + ".jsonl");
    const auto write = [&, &clocks = clocks, &begin_ns = begin_ns](const char* kernel, Step begin, const auto& names) {
        const uint32_t first = static_cast<uint32_t>(begin);
        // Blocks begin together, but their clocks differ.
        const uint64_t begin_of_all = begin_ns[0][0][first];
        for (uint32_t block = 0; block < kTimelineBlocks; ++block) {
            for (uint32_t warp = 0; warp < kTimelineWarps; ++warp) {
                for (uint32_t step = 0; step < std::size(names); ++step) {
                    const int64_t clock = clocks[block][warp][first + step];
                    const int64_t since = clock - clocks[block][warp][first];
                    if (clock == 0 || since < 0) continue;  // a step of an earlier run
                    file << "{\"rank\":" << rank << ",\"kernel\":\"" << kernel << "\",\"block\":" << block
                         << ",\"warp\":" << warp << ",\"step\":\"" << names[step]
                         << "\",\"ns\":" << begin_of_all + static_cast<uint64_t>(since * 1000000 / clock_khz) << "}\n";
                }
            }
        }
    };
    write("dispatch", Step::kDispatchBegin, kDispatchSteps);
    write("combine", Step::kCombineBegin, kCombineSteps);
}
#endif

}  // namespace crossdock
#endif
