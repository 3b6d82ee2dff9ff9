/* SPDX-License-Identifier: Apache-2.0
 *
 * Four ranks with one expert each, on a CPU: every token goes to two experts, expert e multiplies it by e + 1, and the
 * weighted sums return. The ranks are fibers of this thread; with a communicator of crossdockCommInitAll they are
 * threads, of crossdockCommInitRank processes, and of NCCL GPUs: the calls between are the same.
 */
#include <stdio.h>
#include <stdlib.h>

#include "crossdock.h"
#include "crossdock/simulation.h"

enum { kRanks = 4, kTokens = 2, kHidden = 4, kTopk = 2, kSlots = kRanks * kTokens };

#define TENSOR(memory, type, ...)                                                                               \
    &(ncclEpTensor_t) {                                                                                         \
        NCCL_EP_TENSOR_INIT_INLINE, .ndim = sizeof((size_t[]){__VA_ARGS__}) / sizeof(size_t), .datatype = type, \
                                    .data = memory, .sizes = (size_t[]) {                                       \
            __VA_ARGS__                                                                                         \
        }                                                                                                       \
    }

static void check(ncclResult_t result) {
    if (result != ncclSuccess) {
        fprintf(stderr, "%s\n", crossdockGetLastError());
        exit(1);
    }
}

static void run_rank(ncclComm_t comm, int rank, void* context) {
    float tokens[kTokens][kHidden] = {{1 + rank, 0, 0, 1}, {0, 1 + rank, 2, 0}}, results[kTokens][kHidden];
    float received[kSlots][kHidden], weights[kTokens][kTopk] = {{0.5f, 0.5f}, {0.25f, 0.75f}};
    int choices[kTokens][kTopk] = {{0, 1}, {2, 3}}, count;

    ncclEpGroup_t group;
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.num_experts = kRanks;
    config.max_dispatch_tokens_per_rank = kTokens;
    config.max_token_bytes = sizeof tokens[0];
    check(ncclEpCreateGroup(&group, comm, &config));

    ncclEpHandle_t handle;
    check(ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, kTopk, NULL));
    check(ncclEpUpdateHandle(handle, TENSOR(choices, ncclInt32, kTokens, kTopk), NULL, NULL));

    ncclEpDispatchInputs_t from = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t to = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t layout = NCCL_EP_LAYOUT_INFO_INIT;
    from.tokens = TENSOR(tokens, ncclFloat32, kTokens, kHidden);
    to.tokens = TENSOR(received, ncclFloat32, 1, kSlots, kHidden);
    layout.expert_counters = TENSOR(&count, ncclInt32, 1);
    check(ncclEpDispatch(handle, &from, &to, &layout, NULL, NULL));

    for (int i = 0; i < count * kHidden; ++i) {
        received[i / kHidden][i % kHidden] *= rank + 1; /* the expert */
    }

    ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    back.tokens = TENSOR(received, ncclFloat32, 1, kSlots, kHidden);
    outputs.tokens = TENSOR(results, ncclFloat32, kTokens, kHidden);
    outputs.topk_weights = TENSOR(weights, ncclFloat32, kTokens, kTopk);
    check(ncclEpCombine(handle, &back, &outputs, NULL, NULL));

    printf("rank %d: its expert got %d rows; (%g %g %g %g) became (%g %g %g %g)\n", rank, count, tokens[0][0],
           tokens[0][1], tokens[0][2], tokens[0][3], results[0][0], results[0][1], results[0][2], results[0][3]);
    /* Token 0 went to experts 0 and 1, half each: times 1.5. Token 1 to experts 2 and 3: times 0.25 * 3 + 0.75 * 4. */
    for (int i = 0; i < kHidden; ++i) {
        *(int*)context += results[0][i] != tokens[0][i] * 1.5f || results[1][i] != tokens[1][i] * 3.75f;
    }
    check(ncclEpHandleDestroy(handle));
    check(ncclEpGroupDestroy(group));
}

int main(void) {
    int num_wrong = 0;
    check(crossdockRunSimulation(kRanks, NULL, run_rank, &num_wrong, NULL));
    return num_wrong == 0 ? 0 : 1;
}
