// SPDX-License-Identifier: Apache-2.0
// The functions of crossdock.h about errors, groups and handles; its communicators are in crossdock_comm.cpp.
#include "crossdock.h"

#include "core/boundary.h"
#include "core/interrupt.h"
#include "core/objects.h"
#include "core/overlap.h"
#include "core/structs.h"

const char* crossdockGetLastError(void) { return crossdock::last_error(); }

ncclResult_t crossdockSetInterruptCheck(crossdockInterruptCheck_t check) {
    return crossdock::boundary([&] { crossdock::set_interrupt_check(check); });
}

ncclResult_t crossdockGetVersion(int* version) {
    return crossdock::boundary([&] {
        crossdock::require(version != nullptr, ncclInvalidArgument, "version is NULL");
        *version = CROSSDOCK_VERSION_CODE;
    });
}

ncclResult_t crossdockCreateGroup(ncclEpGroup_t* group, ncclComm_t comm, const ncclEpGroupConfig_t* config,
                                  const crossdockGroupOptions_t* options) {
    return crossdock::boundary([&] {
        crossdock::require(group != nullptr, ncclInvalidArgument, "group is NULL");
        auto made = crossdock::Group::create(crossdock::communicator_of(comm), config, options);
        *group = static_cast<ncclEpGroup_t>(crossdock::groups().add(std::move(made)));
    });
}

ncclResult_t crossdockGroupDiagnosis(ncclEpGroup_t group, crossdockDiagnosis_t* diagnosis) {
    return crossdock::boundary([&] {
        const auto found = crossdock::groups().find(group);
        crossdock::mandatory_struct(diagnosis, sizeof(crossdockDiagnosis_t), "diagnosis");
        *diagnosis = found->diagnosis();
    });
}

ncclResult_t crossdockGroupMemory(ncclEpGroup_t group, size_t* symmetric_bytes, size_t* local_bytes) {
    return crossdock::boundary([&] {
        const auto found = crossdock::groups().find(group);
        if (symmetric_bytes != nullptr) *symmetric_bytes = found->symmetric_bytes();
        if (local_bytes != nullptr) *local_bytes = found->local_bytes();
    });
}

ncclResult_t crossdockGroupMemoryUse(ncclEpGroup_t group, crossdockMemoryUse_t* use) {
    return crossdock::boundary([&] {
        const auto found = crossdock::groups().find(group);
        crossdock::mandatory_struct(use, sizeof(crossdockMemoryUse_t), "use");
        *use = found->memory_use();
    });
}

ncclResult_t crossdockGroupTraffic(ncclEpGroup_t group, crossdockTraffic_t* traffic) {
    return crossdock::boundary([&] {
        const auto found = crossdock::groups().find(group);
        crossdock::mandatory_struct(traffic, sizeof(crossdockTraffic_t), "traffic");
        *traffic = found->traffic();
    });
}

ncclResult_t crossdockHandleSetSums(ncclEpHandle_t handle, crossdockSums_t sums) {
    return crossdock::boundary([&] { crossdock::handles().find(handle)->set_sums(sums); });
}

ncclResult_t crossdockHandleSetTag(ncclEpHandle_t handle, unsigned int tag) {
    return crossdock::boundary([&] { crossdock::handles().find(handle)->set_tag(tag); });
}

ncclResult_t crossdockHandleSetSms(ncclEpHandle_t handle, unsigned int num_sms) {
    return crossdock::boundary([&] { crossdock::handles().find(handle)->set_sms(num_sms); });
}

ncclResult_t crossdockOverlapWords(ncclEpHandle_t handle, unsigned int block_rows, size_t* words) {
    return crossdock::boundary([&] {
        const auto found = crossdock::handles().find(handle);
        crossdock::require(words != nullptr, ncclInvalidArgument, "words is NULL");
        *words = crossdock::overlap_words(found->overlap_blocks(block_rows));
    });
}

ncclResult_t crossdockHandleSetOverlap(ncclEpHandle_t handle, const crossdockOverlap_t* overlap) {
    return crossdock::boundary([&] {
        const auto found = crossdock::handles().find(handle);
        if (overlap != nullptr) crossdock::mandatory_struct(overlap, sizeof(*overlap), "overlap");
        found->set_overlap(overlap);
    });
}

ncclResult_t crossdockHandleSms(ncclEpHandle_t handle, unsigned int* update, unsigned int* dispatch,
                                unsigned int* combine) {
    return crossdock::boundary([&] {
        const auto sms = crossdock::handles().find(handle)->sms();
        if (update != nullptr) *update = sms.update;
        if (dispatch != nullptr) *dispatch = sms.dispatch;
        if (combine != nullptr) *combine = sms.combine;
    });
}

ncclResult_t crossdockHandleSetAlignment(ncclEpHandle_t handle, unsigned int alignment) {
    return crossdock::boundary([&] { crossdock::handles().find(handle)->set_alignment(alignment); });
}

ncclResult_t crossdockHandleRebind(ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx) {
    return crossdock::boundary([&] { crossdock::handles().find(handle)->rebind(topk_idx); });
}

ncclResult_t crossdockHandleDroppedTokens(ncclEpHandle_t handle, uint64_t* count, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::handles().find(handle)->dropped_tokens(count, stream); });
}

ncclResult_t crossdockHandleRouting(ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::handles().find(handle)->routing(topk_idx, stream); });
}

ncclResult_t crossdockHandleSources(ncclEpHandle_t handle, const ncclEpTensor_t* tokens, const ncclEpTensor_t* ranges,
                                    cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::handles().find(handle)->sources(tokens, ranges, stream); });
}

ncclResult_t crossdockElasticDispatch(ncclEpHandle_t handle, const crossdockElasticDispatch_t* call,
                                      cudaStream_t stream) {
    return crossdock::boundary([&] {
        const auto found = crossdock::handles().find(handle);
        found->elastic_dispatch(crossdock::mandatory_struct(call, sizeof(*call), "call"), stream);
    });
}

ncclResult_t crossdockElasticCombine(ncclEpHandle_t handle, const crossdockElasticCombine_t* call,
                                     cudaStream_t stream) {
    return crossdock::boundary([&] {
        const auto found = crossdock::handles().find(handle);
        found->elastic_combine(crossdock::mandatory_struct(call, sizeof(*call), "call"), stream);
    });
}
