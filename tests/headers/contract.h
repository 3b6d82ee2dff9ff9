// SPDX-License-Identifier: Apache-2.0
// The binary contract of nccl_ep.h, and of what crossdock.h has renamed, for contract.c and contract.cpp: written out
// as numbers, so that an edit of the header that would break a compiled caller does not compile here.
#include <stdio.h>
#include <string.h>

#include "crossdock.h"
#include "crossdock/a2sgd.h"
#include "nccl_ep.h"

#define VALUE(name, value) NCCL_EP_STATIC_ASSERT((long)(name) == (value), #name " must be " #value)
#define SIZE(type, bytes) NCCL_EP_STATIC_ASSERT(sizeof(type) == (bytes), #type " must have " #bytes " bytes")
#define FIELD(type, field, offset, bytes)                                                                  \
    NCCL_EP_STATIC_ASSERT(offsetof(type, field) == (offset), #type "::" #field " must start at " #offset); \
    NCCL_EP_STATIC_ASSERT(NCCL_EP_FIELD_END(type, field) == (offset) + (bytes), #type "::" #field          \
                                                                                      " must "             \
                                                                                      "have " #bytes)
// The macros of one struct: current size and version, and the released sizes with their last fields.
#define MACROS_V1(type, X, bytes)            \
    VALUE(NCCL_EP_##X##_SIZE, bytes);        \
    VALUE(NCCL_EP_##X##_CURRENT_VERSION, 1); \
    VALUE(NCCL_EP_##X##_V1_SIZE, bytes);     \
    NCCL_EP_STATIC_ASSERT_BOUNDARY(type, X, V1)
#define MACROS_V2(type, X, v1_bytes, bytes)      \
    VALUE(NCCL_EP_##X##_SIZE, bytes);            \
    VALUE(NCCL_EP_##X##_CURRENT_VERSION, 2);     \
    VALUE(NCCL_EP_##X##_V1_SIZE, v1_bytes);      \
    VALUE(NCCL_EP_##X##_V2_SIZE, bytes);         \
    NCCL_EP_STATIC_ASSERT_BOUNDARY(type, X, V1); \
    NCCL_EP_STATIC_ASSERT_BOUNDARY(type, X, V2)

#define MACROS_V3(type, X, v1_bytes, v2_bytes, bytes) \
    VALUE(NCCL_EP_##X##_SIZE, bytes);                 \
    VALUE(NCCL_EP_##X##_CURRENT_VERSION, 3);          \
    VALUE(NCCL_EP_##X##_V1_SIZE, v1_bytes);           \
    VALUE(NCCL_EP_##X##_V2_SIZE, v2_bytes);           \
    VALUE(NCCL_EP_##X##_V3_SIZE, bytes);              \
    NCCL_EP_STATIC_ASSERT_BOUNDARY(type, X, V1);      \
    NCCL_EP_STATIC_ASSERT_BOUNDARY(type, X, V2);      \
    NCCL_EP_STATIC_ASSERT_BOUNDARY(type, X, V3)

SIZE(ncclEpTensor_t, 48);
FIELD(ncclEpTensor_t, size, 0, 4);
FIELD(ncclEpTensor_t, magic, 4, 4);
FIELD(ncclEpTensor_t, ndim, 8, 4);
FIELD(ncclEpTensor_t, datatype, 12, 4);
FIELD(ncclEpTensor_t, data, 16, 8);
FIELD(ncclEpTensor_t, win_hdl, 24, 8);
FIELD(ncclEpTensor_t, win_offset, 32, 8);
FIELD(ncclEpTensor_t, sizes, 40, 8);
MACROS_V1(ncclEpTensor_t, TENSOR, 48);

SIZE(ncclEpTensorAllocConfig_t, 8);
FIELD(ncclEpTensorAllocConfig_t, size, 0, 4);
FIELD(ncclEpTensorAllocConfig_t, magic, 4, 4);
MACROS_V1(ncclEpTensorAllocConfig_t, TENSOR_ALLOC_CONFIG, 8);

SIZE(ncclEpAllocConfig_t, 24);
FIELD(ncclEpAllocConfig_t, alloc_fn, 0, 8);
FIELD(ncclEpAllocConfig_t, free_fn, 8, 8);
FIELD(ncclEpAllocConfig_t, context, 16, 8);

SIZE(ncclEpGroupConfig_t, 120);
FIELD(ncclEpGroupConfig_t, size, 0, 4);
FIELD(ncclEpGroupConfig_t, magic, 4, 4);
FIELD(ncclEpGroupConfig_t, version, 8, 4);
FIELD(ncclEpGroupConfig_t, algorithm, 12, 4);
FIELD(ncclEpGroupConfig_t, num_experts, 16, 4);
FIELD(ncclEpGroupConfig_t, max_dispatch_tokens_per_rank, 20, 4);
FIELD(ncclEpGroupConfig_t, max_recv_tokens_per_rank, 24, 4);
FIELD(ncclEpGroupConfig_t, max_token_bytes, 28, 4);
FIELD(ncclEpGroupConfig_t, rdma_buffer_size, 32, 8);
FIELD(ncclEpGroupConfig_t, num_qp_per_rank, 40, 4);
FIELD(ncclEpGroupConfig_t, num_channels, 44, 4);
FIELD(ncclEpGroupConfig_t, max_num_sms, 48, 4);
FIELD(ncclEpGroupConfig_t, alloc, 56, 24);
FIELD(ncclEpGroupConfig_t, enable_mask, 80, 4);
FIELD(ncclEpGroupConfig_t, timeout_ns, 88, 8);
FIELD(ncclEpGroupConfig_t, zero_copy, 96, 4);
FIELD(ncclEpGroupConfig_t, overflow_policy, 100, 4);
FIELD(ncclEpGroupConfig_t, num_topk, 104, 4);
FIELD(ncclEpGroupConfig_t, padding_v2, 108, 4);
FIELD(ncclEpGroupConfig_t, dispatch_num_sms, 112, 4);
FIELD(ncclEpGroupConfig_t, combine_num_sms, 116, 4);
MACROS_V3(ncclEpGroupConfig_t, GROUP_CONFIG, 96, 112, 120);

SIZE(ncclEpLayoutInfo_t, 48);
FIELD(ncclEpLayoutInfo_t, size, 0, 4);
FIELD(ncclEpLayoutInfo_t, magic, 4, 4);
FIELD(ncclEpLayoutInfo_t, expert_counters, 8, 8);
FIELD(ncclEpLayoutInfo_t, src_rank_counters, 16, 8);
FIELD(ncclEpLayoutInfo_t, expert_offsets, 24, 8);
FIELD(ncclEpLayoutInfo_t, recv_total_counter, 32, 8);
FIELD(ncclEpLayoutInfo_t, recv_topk_idx_kind, 40, 4);
FIELD(ncclEpLayoutInfo_t, padding_v2, 44, 4);
MACROS_V2(ncclEpLayoutInfo_t, LAYOUT_INFO, 40, 48);

SIZE(ncclEpDispatchInputs_t, 32);
FIELD(ncclEpDispatchInputs_t, size, 0, 4);
FIELD(ncclEpDispatchInputs_t, magic, 4, 4);
FIELD(ncclEpDispatchInputs_t, tokens, 8, 8);
FIELD(ncclEpDispatchInputs_t, topk_weights, 16, 8);
FIELD(ncclEpDispatchInputs_t, scales, 24, 8);
MACROS_V1(ncclEpDispatchInputs_t, DISPATCH_INPUTS, 32);

SIZE(ncclEpDispatchOutputs_t, 40);
FIELD(ncclEpDispatchOutputs_t, size, 0, 4);
FIELD(ncclEpDispatchOutputs_t, magic, 4, 4);
FIELD(ncclEpDispatchOutputs_t, tokens, 8, 8);
FIELD(ncclEpDispatchOutputs_t, topk_weights, 16, 8);
FIELD(ncclEpDispatchOutputs_t, scales, 24, 8);
FIELD(ncclEpDispatchOutputs_t, topk_idx, 32, 8);
MACROS_V1(ncclEpDispatchOutputs_t, DISPATCH_OUTPUTS, 40);

SIZE(ncclEpCombineInputs_t, 32);
FIELD(ncclEpCombineInputs_t, size, 0, 4);
FIELD(ncclEpCombineInputs_t, magic, 4, 4);
FIELD(ncclEpCombineInputs_t, tokens, 8, 8);
FIELD(ncclEpCombineInputs_t, topk_weights, 16, 8);
FIELD(ncclEpCombineInputs_t, scales, 24, 8);
MACROS_V2(ncclEpCombineInputs_t, COMBINE_INPUTS, 24, 32);

SIZE(ncclEpCombineOutputs_t, 24);
FIELD(ncclEpCombineOutputs_t, size, 0, 4);
FIELD(ncclEpCombineOutputs_t, magic, 4, 4);
FIELD(ncclEpCombineOutputs_t, tokens, 8, 8);
FIELD(ncclEpCombineOutputs_t, topk_weights, 16, 8);
MACROS_V1(ncclEpCombineOutputs_t, COMBINE_OUTPUTS, 24);

SIZE(ncclEpHandleConfig_t, 16);
FIELD(ncclEpHandleConfig_t, size, 0, 4);
FIELD(ncclEpHandleConfig_t, magic, 4, 4);
FIELD(ncclEpHandleConfig_t, dispatch_output_per_expert_alignment, 8, 8);
MACROS_V1(ncclEpHandleConfig_t, HANDLE_CONFIG, 16);

SIZE(ncclEpDispatchConfig_t, 24);
FIELD(ncclEpDispatchConfig_t, size, 0, 4);
FIELD(ncclEpDispatchConfig_t, magic, 4, 4);
FIELD(ncclEpDispatchConfig_t, send_only, 8, 4);
FIELD(ncclEpDispatchConfig_t, round_scales, 12, 4);
FIELD(ncclEpDispatchConfig_t, pass_direction, 16, 4);
FIELD(ncclEpDispatchConfig_t, quant_recipe, 20, 4);
FIELD(ncclEpDispatchConfig_t, quantization_recipe, 20, 4);
MACROS_V2(ncclEpDispatchConfig_t, DISPATCH_CONFIG, 20, 24);

SIZE(ncclEpCombineConfig_t, 20);
FIELD(ncclEpCombineConfig_t, size, 0, 4);
FIELD(ncclEpCombineConfig_t, magic, 4, 4);
FIELD(ncclEpCombineConfig_t, send_only, 8, 4);
FIELD(ncclEpCombineConfig_t, pass_direction, 12, 4);
FIELD(ncclEpCombineConfig_t, quant_recipe, 16, 4);
FIELD(ncclEpCombineConfig_t, quantization_recipe, 16, 4);
MACROS_V2(ncclEpCombineConfig_t, COMBINE_CONFIG, 16, 20);

SIZE(ncclEpCompleteConfig_t, 8);
FIELD(ncclEpCompleteConfig_t, size, 0, 4);
FIELD(ncclEpCompleteConfig_t, magic, 4, 4);
MACROS_V1(ncclEpCompleteConfig_t, COMPLETE_CONFIG, 8);

SIZE(crossdockGroupOptions_t, 20);
FIELD(crossdockGroupOptions_t, lsa_team_size, 12, 4);
FIELD(crossdockGroupOptions_t, invariant, 16, 4);
SIZE(crossdockTraffic_t, 64);
FIELD(crossdockTraffic_t, lsa_team_size, 8, 4);
SIZE(crossdockA2sgdConfig_t, 32);
FIELD(crossdockA2sgdConfig_t, lsa_team_size, 24, 4);

VALUE(NCCL_EP_MAJOR, 0);
VALUE(NCCL_EP_MINOR, 2);
VALUE(NCCL_EP_PATCH, 0);
VALUE(NCCL_EP_VERSION_CODE, 200);
VALUE(NCCL_EP_API_VERSION, 3);
VALUE(NCCL_EP_AUTO, 0);
VALUE(NCCL_EP_MAGIC, 0xC00FFFEE);
VALUE(NCCL_EP_TENSOR_MAGIC, 0xCAFECAFE);
VALUE(ncclFloat4x2, 12);

VALUE(NCCL_EP_ALGO_LOW_LATENCY, 0);
VALUE(NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);

VALUE(NCCL_EP_LAYOUT_UNSET, 0);
VALUE(NCCL_EP_LAYOUT_EXPERT_MAJOR, 1);
VALUE(NCCL_EP_LAYOUT_RANK_MAJOR, 2);
VALUE(NCCL_EP_LAYOUT_FLAT, 3);

VALUE(NCCL_EP_FWD_PASS, 0);
VALUE(NCCL_EP_BWD_PASS, 1);

VALUE(NCCL_EP_OVERFLOW_AUTO, 0);
VALUE(NCCL_EP_OVERFLOW_TRAP, 1);
VALUE(NCCL_EP_OVERFLOW_DROP, 2);

VALUE(NCCL_EP_ZERO_COPY_AUTO, 0);
VALUE(NCCL_EP_ZERO_COPY_OFF, 1);
VALUE(NCCL_EP_ZERO_COPY_ON, 2);

VALUE(NCCL_EP_EXPERT_ID_AUTO, 0);
VALUE(NCCL_EP_EXPERT_ID_LOCAL, 1);
VALUE(NCCL_EP_EXPERT_ID_GLOBAL, 2);

VALUE(NCCL_EP_DISP_QUANT_NONE, 0);
VALUE(NCCL_EP_DISP_QUANT_FWD, 1);
VALUE(NCCL_EP_DISP_QUANT_DS_FP8E3M4, 2);

VALUE(NCCL_EP_DISPATCH_QUANT_NONE, 0);
VALUE(NCCL_EP_DISPATCH_QUANT_SCALES_FORWARD, 1);
VALUE(NCCL_EP_DISPATCH_QUANT_DS_FP8E3M4, 2);

VALUE(NCCL_EP_COMB_QUANT_NONE, 0);
VALUE(NCCL_EP_COMB_QUANT_NVFP4, 1);
VALUE(NCCL_EP_COMB_QUANT_MXFP8, 2);
VALUE(NCCL_EP_COMBINE_QUANT_NONE, 0);

VALUE(ncclSuccess, 0);
VALUE(ncclUnhandledCudaError, 1);
VALUE(ncclSystemError, 2);
VALUE(ncclInternalError, 3);
VALUE(ncclInvalidArgument, 4);
VALUE(ncclInvalidUsage, 5);
VALUE(ncclRemoteError, 6);
VALUE(ncclInProgress, 7);
VALUE(ncclTimeout, 8);

VALUE(ncclInt8, 0);
VALUE(ncclUint8, 1);
VALUE(ncclInt32, 2);
VALUE(ncclUint32, 3);
VALUE(ncclInt64, 4);
VALUE(ncclUint64, 5);
VALUE(ncclFloat16, 6);
VALUE(ncclFloat32, 7);
VALUE(ncclFloat64, 8);
VALUE(ncclBfloat16, 9);
VALUE(ncclFloat8e4m3, 10);
VALUE(ncclFloat8e5m2, 11);

VALUE(cudaSuccess, 0);
VALUE(cudaErrorInvalidValue, 1);
VALUE(cudaErrorMemoryAllocation, 2);
VALUE(cudaErrorUnknown, 999);
VALUE(NCCL_UNIQUE_ID_BYTES, 128);

SIZE(ncclEpAlgorithm_t, 4);
SIZE(ncclEpLayout_t, 4);
SIZE(ncclEpPassDir_t, 4);
SIZE(ncclEpOverflowPolicy_t, 4);
SIZE(ncclEpZeroCopyMode_t, 4);
SIZE(ncclEpExpertIdKind_t, 4);
SIZE(ncclEpDispQuant_t, 4);
SIZE(ncclEpCombQuant_t, 4);
SIZE(ncclEpDispatchQuantizationRecipe_t, 4);
SIZE(ncclEpCombineQuantizationRecipe_t, 4);
SIZE(ncclResult_t, 4);
SIZE(ncclDataType_t, 4);
SIZE(cudaError_t, 4);
SIZE(ncclUniqueId, 128);

// The checks below return 0 or the line of the first failure.

// An initialiser serves in a declaration, in an assignment and in an expression, and zeroes bytes begin .. end-1.
#define CHECK_INIT(type, init, magic_value, begin, end)                                        \
    do {                                                                                       \
        type declared = init;                                                                  \
        type assigned;                                                                         \
        memset(&assigned, 0xff, sizeof(type));                                                 \
        assigned = init;                                                                       \
        if (declared.size != sizeof(type) || declared.magic != (magic_value)) return __LINE__; \
        if (assigned.size != sizeof(type) || assigned.magic != (magic_value)) return __LINE__; \
        if ((init).size != sizeof(type)) return __LINE__;                                      \
        for (size_t i = (begin); i < (end); ++i)                                               \
            if (((const unsigned char*)&declared)[i] != 0) return __LINE__;                    \
    } while (0)

static int check_initialisers(void) {
    CHECK_INIT(ncclEpTensor_t, NCCL_EP_TENSOR_INIT, 0xCAFECAFEu, 8, sizeof(ncclEpTensor_t));
    CHECK_INIT(ncclEpTensorAllocConfig_t, NCCL_EP_TENSOR_ALLOC_CONFIG_INIT, 0xC00FFFEEu, 8,
               sizeof(ncclEpTensorAllocConfig_t));
    CHECK_INIT(ncclEpGroupConfig_t, NCCL_EP_GROUP_CONFIG_INIT, 0xC00FFFEEu, 12, 52);
    CHECK_INIT(ncclEpLayoutInfo_t, NCCL_EP_LAYOUT_INFO_INIT, 0xC00FFFEEu, 8, sizeof(ncclEpLayoutInfo_t));
    CHECK_INIT(ncclEpDispatchInputs_t, NCCL_EP_DISPATCH_INPUTS_INIT, 0xC00FFFEEu, 8, sizeof(ncclEpDispatchInputs_t));
    CHECK_INIT(ncclEpDispatchOutputs_t, NCCL_EP_DISPATCH_OUTPUTS_INIT, 0xC00FFFEEu, 8, sizeof(ncclEpDispatchOutputs_t));
    CHECK_INIT(ncclEpCombineInputs_t, NCCL_EP_COMBINE_INPUTS_INIT, 0xC00FFFEEu, 8, sizeof(ncclEpCombineInputs_t));
    CHECK_INIT(ncclEpCombineOutputs_t, NCCL_EP_COMBINE_OUTPUTS_INIT, 0xC00FFFEEu, 8, sizeof(ncclEpCombineOutputs_t));
    CHECK_INIT(ncclEpHandleConfig_t, NCCL_EP_HANDLE_CONFIG_INIT, 0xC00FFFEEu, 8, sizeof(ncclEpHandleConfig_t));
    CHECK_INIT(ncclEpDispatchConfig_t, NCCL_EP_DISPATCH_CONFIG_INIT, 0xC00FFFEEu, 8, sizeof(ncclEpDispatchConfig_t));
    CHECK_INIT(ncclEpCombineConfig_t, NCCL_EP_COMBINE_CONFIG_INIT, 0xC00FFFEEu, 8, sizeof(ncclEpCombineConfig_t));
    CHECK_INIT(ncclEpCompleteConfig_t, NCCL_EP_COMPLETE_CONFIG_INIT, 0xC00FFFEEu, 8, sizeof(ncclEpCompleteConfig_t));
    return 0;
}

static int check_use(void) {
    size_t sizes[2] = {3, 4};
    ncclEpTensor_t tensor = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclFloat4x2, .sizes = sizes};
    if (tensor.ndim != 2 || tensor.sizes[1] != 4 || tensor.data != NULL) return __LINE__;

    // The group's initialiser also carries the API version; the fields behind the padding at byte 52 are zero too.
    ncclEpGroupConfig_t group = NCCL_EP_GROUP_CONFIG_INIT;
    if (group.version != NCCL_EP_API_VERSION) return __LINE__;
    if (group.alloc.alloc_fn != NULL || group.alloc.free_fn != NULL || group.alloc.context != NULL) return __LINE__;
    if (group.enable_mask != 0 || group.timeout_ns != 0 || group.num_topk != 0) return __LINE__;
    if (group.zero_copy != NCCL_EP_ZERO_COPY_AUTO || group.overflow_policy != NCCL_EP_OVERFLOW_AUTO) return __LINE__;
    if (group.dispatch_num_sms != 0 || group.combine_num_sms != 0) return __LINE__;

    // A caller of the first API version has no recipe, whatever lies behind its struct.
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    config.quantization_recipe = NCCL_EP_DISPATCH_QUANT_SCALES_FORWARD;
    if (config.quant_recipe != NCCL_EP_DISP_QUANT_FWD) return __LINE__;
    if (!NCCL_EP_HAS_FIELD(&config, ncclEpDispatchConfig_t, quant_recipe)) return __LINE__;
    config.size = NCCL_EP_DISPATCH_CONFIG_V1_SIZE;
    if (NCCL_EP_HAS_FIELD(&config, ncclEpDispatchConfig_t, quant_recipe)) return __LINE__;
    const ncclEpDispatchConfig_t* none = NULL;
    if (NCCL_EP_HAS_FIELD(none, ncclEpDispatchConfig_t, send_only)) return __LINE__;
    return 0;
}

static int report(int line) {
    if (line != 0) fprintf(stderr, "%s:%d: this check failed\n", __FILE__, line);
    return line != 0;
}
