// SPDX-License-Identifier: Apache-2.0
// Launches the kernels of A2SGD in whatever world a runtime belongs to.
#pragma once

#include "kernels/a2sgd/arguments.h"
#include "runtime/runtime.h"

namespace crossdock {

// Error where the launch fails. Apply reaches no other rank.
void launch_a2sgd_sums(Runtime& runtime, const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_a2sgd_means(Runtime& runtime, const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_a2sgd_apply(Runtime& runtime, const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream);

// The same kernels compiled for several load/store domains: the functions above come here with those.
namespace nodes {
void launch_a2sgd_sums(Runtime& runtime, const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_a2sgd_means(Runtime& runtime, const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream);
}  // namespace nodes

namespace cuda {
void launch_a2sgd_sums(const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_a2sgd_means(const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_a2sgd_apply(const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream);
namespace nodes {
void launch_a2sgd_sums(const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream);
void launch_a2sgd_means(const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream);
}  // namespace nodes
}  // namespace cuda

}  // namespace crossdock
