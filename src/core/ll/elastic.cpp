// SPDX-License-Identifier: Apache-2.0
// Elastic operations (crossdock.h) in low-latency mode.
#include "core/elastic.h"

#include "core/error.h"
#include "core/ll/handle.h"

namespace crossdock {

void LlHandle::elastic_dispatch(const crossdockElasticDispatch_t&, cudaStream_t) {
    fail(ncclInvalidUsage, "the handle belongs to an LL group, allowed for crossdockElasticDispatch: HT handles");
}

void LlHandle::elastic_combine(const crossdockElasticCombine_t&, cudaStream_t) {
    fail(ncclInvalidUsage, "the handle belongs to an LL group, allowed for crossdockElasticCombine: HT handles");
}

}  // namespace crossdock
