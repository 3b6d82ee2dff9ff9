// SPDX-License-Identifier: Apache-2.0
// The introspection functions that both releases of NVIDIA's library export with C++ linkage for tests and
// integrations.
#include "core/boundary.h"
#include "core/ht/handle.h"
#include "core/objects.h"

#define CROSSDOCK_EXPORT __attribute__((visibility("default")))

namespace {

template <typename Read>
int number_of(ncclEpHandle* handle, Read read) {
    int number = 0;
    const ncclResult_t result =
        crossdock::boundary([&] { number = static_cast<int>(read(*crossdock::handles().find(handle))); });
    return result == ncclSuccess ? number : -1;
}

}  // namespace

// HT only; LL handles get InvalidUsage.
CROSSDOCK_EXPORT ncclResult_t ncclEpHandle_test_getNumRecvTokens(ncclEpHandle* handle, unsigned int* num_recv_tokens) {
    return crossdock::boundary([&] {
        const auto found = crossdock::handles().find(handle);
        crossdock::require(num_recv_tokens != nullptr, ncclInvalidArgument, "num_recv_tokens is NULL");
        auto* const ht = dynamic_cast<crossdock::HtHandle*>(found.get());
        crossdock::require(ht != nullptr, ncclInvalidUsage, "the handle belongs to an LL group, allowed: HT handles");
        *num_recv_tokens = ht->num_received(nullptr);
    });
}

// These return -1 where the handle is none.
CROSSDOCK_EXPORT int ncclEpHandle_test_getNumTopk(ncclEpHandle* handle) {
    return number_of(handle, [](const crossdock::Handle& h) { return h.topk(); });
}
CROSSDOCK_EXPORT int ncclEpHandle_test_getMaxTokensPerRank(ncclEpHandle* handle) {
    return number_of(handle, [](const crossdock::Handle& h) { return h.group().config().max_tokens; });
}
CROSSDOCK_EXPORT int ncclEpHandle_test_getNRanksPerNode(ncclEpHandle* handle) {
    return number_of(handle, [](const crossdock::Handle& h) { return h.group().config().num_ranks; });
}
CROSSDOCK_EXPORT int ncclEpHandle_test_getExpertsPerRank(ncclEpHandle* handle) {
    return number_of(handle, [](const crossdock::Handle& h) { return h.group().config().experts_per_rank(); });
}

// Shared memory that a block of the group's kernels may take from the next operation on, on this rank: 1 byte to what
// the device has. Kernels then keep fewer rows in flight; an operation that cannot fit at all is InvalidArgument.
CROSSDOCK_EXPORT ncclResult_t ncclEpGroup_test_setMaxDynamicSmem(ncclEpGroup* group, int bytes) {
    return crossdock::boundary([&] { crossdock::groups().find(group)->limit_shared_bytes(bytes); });
}
// Warps per block of this rank's latest low-latency combine; 0: there was none; -1: the group is none.
CROSSDOCK_EXPORT int ncclEpGroup_test_getLastLlCombineWarpsPerGroup(ncclEpGroup* group) {
    int warps = -1;
    static_cast<void>(crossdock::boundary([&] { warps = crossdock::groups().find(group)->last_combine_warps(); }));
    return warps;
}

CROSSDOCK_EXPORT void ncclEpHandle_test_clearTopkIdx(ncclEpHandle* handle) {
    static_cast<void>(crossdock::boundary([&] { crossdock::handles().find(handle)->forget_routing(); }));
}
