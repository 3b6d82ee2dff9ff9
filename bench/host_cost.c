// SPDX-License-Identifier: Apache-2.0
//
// What a dispatch call costs the host in C: the loop that host_cost.py runs beside its own, on the same handle.
#include <time.h>

#include "crossdock.h"

#define TENSOR(memory, type, ...)                                                                                   \
    &(ncclEpTensor_t) {                                                                                             \
        NCCL_EP_TENSOR_INIT_INLINE, .data = memory, .datatype = type,                                               \
                                    .ndim = sizeof((size_t[]){__VA_ARGS__}) / sizeof(size_t), .sizes = (size_t[]) { \
            __VA_ARGS__                                                                                             \
        }                                                                                                           \
    }

static double now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

// The mean of `calls` calls in us, or -1 if one fails. One rank with one expert and one token of 4 floats, so that next
// to nothing is moved and no peer is waited for; descriptors are made for each call, as in most programs.
double mean_dispatch_us(ncclEpHandle_t handle, void* token, void* rows, void* count, cudaStream_t stream, int calls) {
    const double start = now_us();
    for (int call = 0; call < calls; ++call) {
        ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
        ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        ncclEpLayoutInfo_t layout_info = NCCL_EP_LAYOUT_INFO_INIT;
        inputs.tokens = TENSOR(token, ncclFloat32, 1, 4);
        outputs.tokens = TENSOR(rows, ncclFloat32, 1, 1, 4);
        layout_info.expert_counters = TENSOR(count, ncclInt32, 1);
        if (ncclEpDispatch(handle, &inputs, &outputs, &layout_info, NULL, stream) != ncclSuccess) return -1;
    }
    return (now_us() - start) / calls;
}
