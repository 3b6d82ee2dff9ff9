// SPDX-License-Identifier: Apache-2.0
// Launches the low-latency kernels in whatever world a runtime belongs to.
#pragma once

#include "kernels/ll/arguments.h"
#include "kernels/ll/mask_clean.h"
#include "kernels/ll/sources.h"
#include "runtime/runtime.h"

namespace crossdock {

// Error where the launch fails.
void launch_ll_dispatch(Runtime& runtime, const LlDispatchArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ll_combine(Runtime& runtime, const LlCombineArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ll_mask_clean(Runtime& runtime, const LlMaskCleanArgs& args, cudaStream_t stream);
void launch_ll_sources(Runtime& runtime, const LlSourcesArgs& args, cudaStream_t stream);

// The same kernels compiled for groups of several load/store domains: the functions above come here with such groups.
namespace nodes {
void launch_ll_dispatch(Runtime& runtime, const LlDispatchArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ll_combine(Runtime& runtime, const LlCombineArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ll_mask_clean(Runtime& runtime, const LlMaskCleanArgs& args, cudaStream_t stream);
}  // namespace nodes

namespace cuda {
void launch_ll_dispatch(const LlDispatchArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ll_combine(const LlCombineArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ll_mask_clean(const LlMaskCleanArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ll_sources(const LlSourcesArgs& args, LaunchShape shape, cudaStream_t stream);
namespace nodes {
void launch_ll_dispatch(const LlDispatchArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ll_combine(const LlCombineArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ll_mask_clean(const LlMaskCleanArgs& args, LaunchShape shape, cudaStream_t stream);
}  // namespace nodes
void write_timeline(int rank);  // of builds with CROSSDOCK_TIMELINE; the current device's latest kernels
}  // namespace cuda

}  // namespace crossdock
