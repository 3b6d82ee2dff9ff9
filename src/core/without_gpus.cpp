// SPDX-License-Identifier: Apache-2.0
// Builds without CUDA: replaces what folders named `cuda` and files ending in .cu define.
#include "runtime/without_gpus.h"
#include "core/error.h"
#include "fabric/cuda/nccl_communicator.h"
#include "kernels/ht/launch.h"
#include "kernels/ll/launch.h"
#include "kernels/routing/launch.h"

namespace crossdock {

const bool kIsBuiltForGpus = false;

std::shared_ptr<Communicator> nccl_communicator_of(ncclComm_t comm) {
    fail(ncclInvalidArgument, "comm {} is not a CPU communicator of crossdock.h, and this build knows no others",
         static_cast<void*>(comm));
}

template struct OnGpu<LlDispatch, Peers::kLsa>;
template struct OnGpu<LlDispatch, Peers::kLsaAndGin>;
template struct OnGpu<LlCombine, Peers::kLsa>;
template struct OnGpu<LlCombine, Peers::kLsaAndGin>;
template struct OnGpu<LlMaskClean, Peers::kLsa>;
template struct OnGpu<LlMaskClean, Peers::kLsaAndGin>;
template struct OnGpu<LlSources, Peers::kLsa>;

template struct OnGpu<HtUpdate, Peers::kLsa>;
template struct OnGpu<HtUpdate, Peers::kLsaAndGin>;
template struct OnGpu<HtDispatch, Peers::kLsa>;
template struct OnGpu<HtDispatch, Peers::kLsaAndGin>;
template struct OnGpu<HtPublishingDispatch, Peers::kLsa>;
template struct OnGpu<HtPublishingDispatch, Peers::kLsaAndGin>;
template struct OnGpu<HtCombine, Peers::kLsa>;
template struct OnGpu<HtCombine, Peers::kLsaAndGin>;
template struct OnGpu<HtElasticDispatch, Peers::kLsa>;
template struct OnGpu<HtElasticDispatch, Peers::kLsaAndGin>;
template struct OnGpu<HtElasticCombine, Peers::kLsa>;
template struct OnGpu<HtElasticCombine, Peers::kLsaAndGin>;
template struct OnGpu<HtMaskClean, Peers::kLsa>;

template struct OnGpu<CountRouting, Peers::kLsa>;

}  // namespace crossdock
