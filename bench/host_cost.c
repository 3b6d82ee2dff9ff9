// SPDX-License-Identifier: Apache-2.0
//
// What a dispatch call costs the host in C, to compare with host_cost.py: one rank, one token of 16 bytes, so that next
// to nothing is moved and nobody is waited for. Prints the smallest mean of several rounds, in us.
#include <stdio.h>
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

int main(void) {
    enum { kRounds = 50, kCalls = 2000 };
    ncclComm_t comm;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    float token[4] = {1, 2, 3, 4}, rows[4];
    int expert = 0, count = 0;
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.num_experts = 1;
    config.max_dispatch_tokens_per_rank = 1;
    config.max_token_bytes = sizeof token;
    if (crossdockCommInitAll(&comm, 1) != ncclSuccess || ncclEpCreateGroup(&group, comm, &config) != ncclSuccess ||
        ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, TENSOR(&expert, ncclInt32, 1, 1), NULL, NULL,
                           NULL) != ncclSuccess) {
        fprintf(stderr, "%s\n", crossdockGetLastError());
        return 1;
    }
    double best = 1e9;
    for (int round = 0; round < kRounds; ++round) {
        const double start = now_us();
        for (int call = 0; call < kCalls; ++call) {
            ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
            ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
            ncclEpLayoutInfo_t layout_info = NCCL_EP_LAYOUT_INFO_INIT;
            inputs.tokens = TENSOR(token, ncclFloat32, 1, 4);
            outputs.tokens = TENSOR(rows, ncclFloat32, 1, 1, 4);
            layout_info.expert_counters = TENSOR(&count, ncclInt32, 1);
            if (ncclEpDispatch(handle, &inputs, &outputs, &layout_info, NULL, NULL) != ncclSuccess) return 1;
        }
        const double mean = (now_us() - start) / kCalls;
        if (mean < best) best = mean;
    }
    printf("C: %.2f us a dispatch call\n", best);
    ncclEpHandleDestroy(handle);
    ncclEpGroupDestroy(group);
    crossdockCommDestroy(comm);
    return 0;
}
