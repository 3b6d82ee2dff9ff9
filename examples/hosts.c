/* SPDX-License-Identifier: Apache-2.0
 *
 * One process per rank, on one host or on many: started by torchrun, mpirun or srun, or by hand (docs/deployment.md).
 * Each rank has an expert, which multiplies by its number plus one, and a token that goes to its own expert and to the
 * next one's.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "crossdock.h"

enum { kHidden = 4, kTopk = 2 };

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

int main(void) {
    ncclComm_t comm;
    int rank, num_ranks;
    check(crossdockCommInitFromEnvironment(&comm));
    check(crossdockCommUserRank(comm, &rank));
    check(crossdockCommCount(comm, &num_ranks));

    ncclEpGroup_t group;
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.num_experts = (unsigned int)num_ranks;
    config.max_dispatch_tokens_per_rank = 1;
    config.max_token_bytes = kHidden * sizeof(float);
    check(ncclEpCreateGroup(&group, comm, &config));

    float token[kHidden] = {(float)rank, 1, 2, 3}, sum[kHidden], weights[kTopk] = {0.5f, 0.5f};
    int choices[kTopk] = {rank, (rank + 1) % num_ranks}, count;
    const size_t topk = num_ranks > 1 ? kTopk : 1; /* a token's experts are different */
    ncclEpHandle_t handle;
    check(ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, (int)topk, NULL));
    check(ncclEpUpdateHandle(handle, TENSOR(choices, ncclInt32, 1, topk), NULL, NULL));

    float* received = calloc((size_t)num_ranks * kHidden, sizeof(float));
    ncclEpDispatchInputs_t from = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t to = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t layout = NCCL_EP_LAYOUT_INFO_INIT;
    from.tokens = TENSOR(token, ncclFloat32, 1, kHidden);
    to.tokens = TENSOR(received, ncclFloat32, 1, (size_t)num_ranks, kHidden);
    layout.expert_counters = TENSOR(&count, ncclInt32, 1);
    check(ncclEpDispatch(handle, &from, &to, &layout, NULL, NULL));

    for (int i = 0; i < count * kHidden; ++i) received[i] *= (float)(rank + 1);

    ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    back.tokens = TENSOR(received, ncclFloat32, 1, (size_t)num_ranks, kHidden);
    outputs.tokens = TENSOR(sum, ncclFloat32, 1, kHidden);
    outputs.topk_weights = TENSOR(weights, ncclFloat32, 1, topk);
    check(ncclEpCombine(handle, &back, &outputs, NULL, NULL));

    float factor = 0;
    for (size_t k = 0; k < topk; ++k) factor += weights[k] * (float)(choices[k] + 1);
    int num_wrong = 0;
    for (int i = 0; i < kHidden; ++i) num_wrong += sum[i] != token[i] * factor;
    crossdockTraffic_t traffic = CROSSDOCK_TRAFFIC_INIT;
    check(crossdockGroupTraffic(group, &traffic));
    char host[64] = "";
    gethostname(host, sizeof host - 1);
    printf("rank %d of %d on %s, a host of %d: (%g %g %g %g) became (%g %g %g %g), %s\n", rank, num_ranks, host,
           traffic.lsa_team_size, token[0], token[1], token[2], token[3], sum[0], sum[1], sum[2], sum[3],
           num_wrong == 0 ? "as expected" : "WRONG");

    free(received);
    check(ncclEpHandleDestroy(handle));
    check(ncclEpGroupDestroy(group));
    check(crossdockCommDestroy(comm));
    return num_wrong == 0 ? 0 : 1;
}
