// SPDX-License-Identifier: Apache-2.0
// Elastic operations (crossdock.h) in high-throughput mode.
#include "core/elastic.h"

#include "core/error.h"
#include "core/ht/handle.h"

namespace crossdock {

void HtHandle::elastic_dispatch(const crossdockElasticDispatch_t&, cudaStream_t) {
    fail(ncclInvalidUsage, "the handle belongs to an HT group, allowed for crossdockElasticDispatch: LL handles");
}

void HtHandle::elastic_combine(const crossdockElasticCombine_t&, cudaStream_t) {
    fail(ncclInvalidUsage, "the handle belongs to an HT group, allowed for crossdockElasticCombine: LL handles");
}

}  // namespace crossdock
