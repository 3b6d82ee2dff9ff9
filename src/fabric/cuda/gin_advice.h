// SPDX-License-Identifier: Apache-2.0
// Why NCCL gives kernels no network between LSA teams, or another one than was asked for. Looks at the
// environment and at the plugin's file; needs neither GPU nor NCCL.
#pragma once

#include <string>

namespace crossdock {

// NCCL refuses its network where one GPU lacks the attribute; kGpuFits: this rank's has it, or it is unknown.
inline constexpr int kGpuFits = -1;

// The end of a message: the first thing found that keeps NCCL from the network, and what to set. unfit_gpu: number of
// this rank's GPU if it lacks the attribute.
std::string gin_advice(int nccl_version, int unfit_gpu);

// Once NCCL has made its network: a message where it is not that of the plugin which NCCL_RMA_PLUGIN names, as far as
// can be seen; otherwise empty. A plugin that is not ours cannot be asked.
std::string gin_fallback();

}  // namespace crossdock
