// SPDX-License-Identifier: Apache-2.0
// The C API of nccl_ep.h: the boundary, and nothing else. Outputs are written only on success.
#include "nccl_ep.h"

#include "core/boundary.h"
#include "core/objects.h"
#include "core/structs.h"
#include "core/tensor.h"

using crossdock::boundary;
using crossdock::groups;
using crossdock::handles;
using crossdock::require;

namespace {

void expect_output(const void* pointer, const char* name) {
    require(pointer != nullptr, ncclInvalidArgument, "{} is NULL", name);
}

std::shared_ptr<crossdock::Handle> make_handle(ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                               const ncclEpHandleConfig_t* config, int num_topk,
                                               const ncclEpTensor_t* handle_mem) {
    return crossdock::Handle::create(groups().find(ep_group), layout, config, num_topk, handle_mem);
}

}  // namespace

ncclResult_t ncclEpGetVersion(int* version) {
    return boundary([&] {
        expect_output(version, "version");
        *version = NCCL_EP_VERSION_CODE;
    });
}

ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t** tensor, unsigned int ndim, ncclDataType_t datatype, const size_t* sizes,
                               const ncclEpTensorAllocConfig_t* config) {
    return boundary([&] {
        expect_output(tensor, "tensor");
        crossdock::optional_struct(config, NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE, "config");
        *tensor = crossdock::allocate_tensor(ndim, datatype, sizes);
    });
}

ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t* tensor) {
    return boundary([&] { crossdock::destroy_tensor(tensor); });
}

ncclResult_t ncclEpCreateGroup(ncclEpGroup_t* ep_group, ncclComm_t comm, const ncclEpGroupConfig_t* config) {
    return boundary([&] {
        expect_output(ep_group, "ep_group");
        auto group = crossdock::Group::create(crossdock::communicator_of(comm), config, nullptr);
        *ep_group = static_cast<ncclEpGroup_t>(groups().add(std::move(group)));
    });
}

ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group) {
    return boundary([&] {
        if (ep_group != nullptr) groups().remove(ep_group)->destroy();
    });
}

ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t ep_group, ncclEpLayout_t layout, const ncclEpHandleConfig_t* config,
                                 size_t* size_out, int num_topk) {
    return boundary([&] {
        expect_output(size_out, "size_out");
        *size_out = crossdock::Handle::memory_bytes(*groups().find(ep_group), layout, config, num_topk);
    });
}

ncclResult_t ncclEpInitHandle(ncclEpHandle_t* handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                              const ncclEpHandleConfig_t* config, int num_topk, const ncclEpTensor_t* handle_mem) {
    return boundary([&] {
        expect_output(handle, "handle");
        *handle = nullptr;
        *handle =
            static_cast<ncclEpHandle_t>(handles().add(make_handle(ep_group, layout, config, num_topk, handle_mem)));
    });
}

ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx,
                                const ncclEpLayoutInfo_t* layout_info, cudaStream_t stream) {
    return boundary([&] { handles().find(handle)->update(topk_idx, layout_info, stream); });
}

ncclResult_t ncclEpCreateHandle(ncclEpHandle_t* handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* layout_info,
                                const ncclEpHandleConfig_t* config, cudaStream_t stream) {
    return boundary([&] {
        expect_output(handle, "handle");
        *handle = nullptr;
        const crossdock::Tensor routing = crossdock::read_local_tensor(topk_idx, "topk_idx");
        require(routing.ndim == 2, ncclInvalidArgument, "topk_idx has {} dimensions, expected 2: [tokens, top-k]",
                routing.ndim);
        require(routing.sizes[1] <= INT32_MAX, ncclInvalidArgument, "topk_idx has {} columns, allowed: at most {}",
                routing.sizes[1], INT32_MAX);
        auto created = make_handle(ep_group, layout, config, static_cast<int>(routing.sizes[1]), nullptr);
        created->update(topk_idx, layout_info, stream);
        *handle = static_cast<ncclEpHandle_t>(handles().add(std::move(created)));
    });
}

ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle) {
    return boundary([&] {
        if (handle != nullptr) handles().remove(handle)->cancel_pending();
    });
}

ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                            const ncclEpDispatchOutputs_t* outputs, const ncclEpLayoutInfo_t* layout_info,
                            const ncclEpDispatchConfig_t* config, cudaStream_t stream) {
    return boundary([&] { handles().find(handle)->dispatch(inputs, outputs, layout_info, config, stream); });
}

ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t* inputs,
                           const ncclEpCombineOutputs_t* outputs, const ncclEpCombineConfig_t* config,
                           cudaStream_t stream) {
    return boundary([&] { handles().find(handle)->combine(inputs, outputs, config, stream); });
}

ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t* config, cudaStream_t stream) {
    return boundary([&] { handles().find(handle)->complete(config, stream); });
}

ncclResult_t ncclEpMaskQuery(ncclEpGroup_t ep_group, int* mask_status, cudaStream_t stream) {
    return boundary([&] { groups().find(ep_group)->mask_query(mask_status, stream); });
}

ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t ep_group, const int* mask, cudaStream_t stream) {
    return boundary([&] { groups().find(ep_group)->mask_update(mask, stream); });
}

ncclResult_t ncclEpMaskClean(ncclEpGroup_t ep_group, cudaStream_t stream) {
    return boundary([&] { groups().find(ep_group)->mask_clean(stream); });
}

ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t ep_group, int* error_out) {
    return boundary([&] {
        const auto group = groups().find(ep_group);
        expect_output(error_out, "error_out");
        *error_out = group->async_error();
    });
}

ncclResult_t ncclEpErrorClear(ncclEpGroup_t ep_group) {
    return boundary([&] { groups().find(ep_group)->clear_error(); });
}
