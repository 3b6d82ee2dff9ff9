// SPDX-License-Identifier: Apache-2.0
// Launches the high-throughput kernels in whatever world a runtime belongs to.
#pragma once

#include "kernels/ht/mask_clean.h"
#include "runtime/runtime.h"

namespace crossdock {

// Error where the launch fails.
void launch_ht_update(Runtime& runtime, const HtUpdateArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ht_dispatch(Runtime& runtime, const HtDispatchArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ht_combine(Runtime& runtime, const HtCombineArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ht_mask_clean(Runtime& runtime, const HtMaskCleanArgs& args, cudaStream_t stream);

// The same kernels compiled for groups of several load/store domains: the functions above come here with such groups.
namespace nodes {
void launch_ht_update(Runtime& runtime, const HtUpdateArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ht_dispatch(Runtime& runtime, const HtDispatchArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ht_combine(Runtime& runtime, const HtCombineArgs& args, LaunchShape shape, cudaStream_t stream);
}  // namespace nodes

namespace cuda {
void launch_ht_update(const HtUpdateArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ht_dispatch(const HtDispatchArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ht_combine(const HtCombineArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ht_mask_clean(const HtMaskCleanArgs& args, LaunchShape shape, cudaStream_t stream);
namespace nodes {
void launch_ht_update(const HtUpdateArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ht_dispatch(const HtDispatchArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_ht_combine(const HtCombineArgs& args, LaunchShape shape, cudaStream_t stream);
}  // namespace nodes
void write_phases(int rank);  // of builds with CROSSDOCK_TIMELINE; the current device's latest kernels
}  // namespace cuda

}  // namespace crossdock
