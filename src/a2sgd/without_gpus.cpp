// SPDX-License-Identifier: Apache-2.0
// Builds without CUDA: replaces what kernels/kernels.cu defines.
#include "runtime/without_gpus.h"
#include "a2sgd/kernels/launch.h"

namespace crossdock {

template struct OnGpu<A2sgdSumsKernel, Peers::kLsa>;
template struct OnGpu<A2sgdSumsKernel, Peers::kLsaAndGin>;
template struct OnGpu<A2sgdMeansKernel, Peers::kLsa>;
template struct OnGpu<A2sgdMeansKernel, Peers::kLsaAndGin>;
template struct OnGpu<A2sgdApplyKernel, Peers::kLsa>;

}  // namespace crossdock
