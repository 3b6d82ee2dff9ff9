/* SPDX-License-Identifier: Apache-2.0
 *
 * Low latency on GPUs: one thread per rank, one rank per GPU, communicators of NCCL. Every token goes to eight experts
 * that change nothing, with weights that sum to one, so that every token must return unchanged.
 *
 *     gpu_ll [RANKS]    ranks may share GPUs where NCCL_MULTI_RANK_GPU_ENABLE=1 is set
 */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crossdock.h"

enum { kTokens = 128, kHidden = 7168, kTopk = 8, kLocalExperts = 32, kMaxRanks = 64 };

#define TENSOR(memory, type, ...)                                                                               \
    &(ncclEpTensor_t) {                                                                                         \
        NCCL_EP_TENSOR_INIT_INLINE, .ndim = sizeof((size_t[]){__VA_ARGS__}) / sizeof(size_t), .datatype = type, \
                                    .data = memory, .sizes = (size_t[]) {                                       \
            __VA_ARGS__                                                                                         \
        }                                                                                                       \
    }

typedef struct {
    int rank;
    int num_ranks;
    int device;
    ncclUniqueId id;
    size_t num_wrong;
} Rank;

static void fail(const char* call, const char* message) {
    fprintf(stderr, "%s: %s\n", call, message);
    exit(1);
}

#define CHECK_CUDA(call)                              \
    do {                                              \
        cudaError_t result_ = (call);                 \
        if (result_ != cudaSuccess) {                 \
            fail(#call, cudaGetErrorString(result_)); \
        }                                             \
    } while (0)
#define CHECK_NCCL(call)                              \
    do {                                              \
        ncclResult_t result_ = (call);                \
        if (result_ != ncclSuccess) {                 \
            fail(#call, ncclGetErrorString(result_)); \
        }                                             \
    } while (0)
#define CHECK_EP(call)                            \
    do {                                          \
        if ((call) != ncclSuccess) {              \
            fail(#call, crossdockGetLastError()); \
        }                                         \
    } while (0)

static void* upload(const void* source, size_t bytes) {
    void* memory = NULL;
    CHECK_CUDA(cudaMalloc(&memory, bytes));
    if (source != NULL) {
        CHECK_CUDA(cudaMemcpy(memory, source, bytes, cudaMemcpyHostToDevice));
    }
    return memory;
}

static void* run_rank(void* argument) {
    Rank* rank = argument;
    const size_t num_experts = (size_t)rank->num_ranks * kLocalExperts;
    const size_t num_slots = (size_t)rank->num_ranks * kTokens;
    static const size_t token_bytes = sizeof(uint16_t) * kTokens * kHidden;

    /* bf16 tokens: the upper halves of floats between 1 and 2. */
    uint16_t* tokens = malloc(token_bytes);
    uint16_t* results = malloc(token_bytes);
    int32_t choices[kTokens][kTopk];
    float weights[kTokens][kTopk];
    for (size_t i = 0; i < (size_t)kTokens * kHidden; ++i) {
        tokens[i] = (uint16_t)(0x3f80 + (i * 7 + (size_t)rank->rank) % 128);
    }
    for (size_t t = 0; t < kTokens; ++t) {
        for (size_t k = 0; k < kTopk; ++k) {
            choices[t][k] = (int32_t)((t * 31 + k * 37 + (size_t)rank->rank) % num_experts);
            weights[t][k] = 1.0f / kTopk;
        }
    }

    CHECK_CUDA(cudaSetDevice(rank->device));
    cudaStream_t stream;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    ncclComm_t comm;
    CHECK_NCCL(ncclCommInitRank(&comm, rank->num_ranks, rank->id, rank->rank));
    void* device_tokens = upload(tokens, token_bytes);
    void* device_choices = upload(choices, sizeof choices);
    void* device_weights = upload(weights, sizeof weights);
    void* device_results = upload(NULL, token_bytes);
    void* rows = upload(NULL, sizeof(uint16_t) * kLocalExperts * num_slots * kHidden);
    void* counters = upload(NULL, sizeof(int32_t) * kLocalExperts);

    ncclEpGroup_t group;
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.num_experts = (unsigned)num_experts;
    config.max_dispatch_tokens_per_rank = kTokens;
    config.max_token_bytes = sizeof(uint16_t) * kHidden;
    CHECK_EP(ncclEpCreateGroup(&group, comm, &config));
    ncclEpHandle_t handle;
    CHECK_EP(ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, kTopk, NULL));
    CHECK_EP(ncclEpUpdateHandle(handle, TENSOR(device_choices, ncclInt32, kTokens, kTopk), NULL, stream));

    ncclEpDispatchInputs_t from = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t to = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t layout = NCCL_EP_LAYOUT_INFO_INIT;
    from.tokens = TENSOR(device_tokens, ncclBfloat16, kTokens, kHidden);
    to.tokens = TENSOR(rows, ncclBfloat16, kLocalExperts, num_slots, kHidden);
    layout.expert_counters = TENSOR(counters, ncclInt32, kLocalExperts);
    CHECK_EP(ncclEpDispatch(handle, &from, &to, &layout, NULL, stream));

    /* Here a model launches its experts on the same stream: `counters` says how many rows each of them has. */
    ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
    back.tokens = TENSOR(rows, ncclBfloat16, kLocalExperts, num_slots, kHidden);
    outputs.tokens = TENSOR(device_results, ncclBfloat16, kTokens, kHidden);
    outputs.topk_weights = TENSOR(device_weights, ncclFloat32, kTokens, kTopk);
    CHECK_EP(ncclEpCombine(handle, &back, &outputs, NULL, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));

    CHECK_CUDA(cudaMemcpy(results, device_results, token_bytes, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < (size_t)kTokens * kHidden; ++i) {
        rank->num_wrong += results[i] != tokens[i];
    }
    printf("rank %d on GPU %d: %zu of %d values wrong\n", rank->rank, rank->device, rank->num_wrong, kTokens * kHidden);

    CHECK_EP(ncclEpHandleDestroy(handle));
    CHECK_EP(ncclEpGroupDestroy(group));
    CHECK_NCCL(ncclCommDestroy(comm));
    void* memory[] = {device_tokens, device_choices, device_weights, device_results, rows, counters};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; ++i) {
        CHECK_CUDA(cudaFree(memory[i]));
    }
    CHECK_CUDA(cudaStreamDestroy(stream));
    free(tokens);
    free(results);
    return NULL;
}

int main(int argc, char** argv) {
    static Rank ranks[kMaxRanks];
    pthread_t threads[kMaxRanks];
    int num_devices = 0;
    CHECK_CUDA(cudaGetDeviceCount(&num_devices));
    char* end = "";
    const long num_ranks = argc > 1 ? strtol(argv[1], &end, 10) : num_devices;
    if (argc > 2 || *end != '\0' || num_ranks < 1 || num_ranks > kMaxRanks) {
        fprintf(stderr, "gpu_ll [RANKS]: RANKS is '%s', allowed: 1..%d\n", argc > 1 ? argv[1] : "0", kMaxRanks);
        return 2;
    }
    ncclUniqueId id;
    CHECK_NCCL(ncclGetUniqueId(&id));
    size_t num_wrong = 0;
    for (int r = 0; r < num_ranks; ++r) {
        ranks[r] = (Rank){.rank = r, .num_ranks = (int)num_ranks, .device = r % num_devices, .id = id};
        if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0) {
            fail("pthread_create", "no more threads");
        }
    }
    for (int r = 0; r < num_ranks; ++r) {
        pthread_join(threads[r], NULL);
        num_wrong += ranks[r].num_wrong;
    }
    return num_wrong == 0 ? 0 : 1;
}
