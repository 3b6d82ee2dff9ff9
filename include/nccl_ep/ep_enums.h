// SPDX-License-Identifier: Apache-2.0
//
// The enumerations of nccl_ep.h. Include nccl_ep.h instead of this file, unless only the values are wanted: this file
// depends on nothing. All enumerations are plain C enumerations of four bytes; 0 is what a zeroed struct means.
#ifndef NCCL_EP_ENUMS_H_
#define NCCL_EP_ENUMS_H_

// "The library chooses", for every numeric configuration field that has a default.
#define NCCL_EP_AUTO 0

#ifdef __cplusplus
extern "C" {
#endif

// What a group is tuned for. It is fixed when the group is made.
typedef enum {
    // Few tokens (1 to some hundred per rank): one kernel per operation, no routing exchange, operations can be split.
    NCCL_EP_ALGO_LOW_LATENCY = 0,
    // Many tokens (a thousand and more per rank): routing is exchanged by ncclEpUpdateHandle, receive buffers are
    // dense.
    NCCL_EP_ALGO_HIGH_THROUGHPUT = 1
} ncclEpAlgorithm_t;

// How dispatched rows lie in the receive tensor. R ranks, M tokens per rank, L experts per rank, H elements per row.
typedef enum {
    // Not a layout; every function that takes a layout refuses it.
    NCCL_EP_LAYOUT_UNSET = 0,
    // Rows grouped by local expert. Low latency: [L, R*M, H]; high throughput: [N, H] in one zone per expert.
    NCCL_EP_LAYOUT_EXPERT_MAJOR = 1,
    // Rows grouped by source rank, one row a (source rank, token): [R, M, H]. Low latency only.
    NCCL_EP_LAYOUT_RANK_MAJOR = 2,
    // One row a (source rank, token), dense: [N, H]. High throughput only.
    NCCL_EP_LAYOUT_FLAT = 3
} ncclEpLayout_t;

// Direction of a training step. Low-latency groups know the forward pass only.
typedef enum {
    NCCL_EP_FWD_PASS = 0,
    // Dispatch carries gradients along the routing of the forward pass, combine also returns gradients of the weights.
    NCCL_EP_BWD_PASS = 1
} ncclEpPassDir_t;

// What happens when more rows arrive than max_recv_tokens_per_rank allows (high throughput).
typedef enum {
    // The same as NCCL_EP_OVERFLOW_TRAP.
    NCCL_EP_OVERFLOW_AUTO = 0,
    // The group fails with an error that names total and budget. No GPU trap; nothing is written out of bounds.
    NCCL_EP_OVERFLOW_TRAP = 1,
    // Rows past the budget are dropped in the deterministic row order, and everything continues.
    NCCL_EP_OVERFLOW_DROP = 2
} ncclEpOverflowPolicy_t;

// Whether the caller promises window-backed tensors. The results are the same in every mode.
typedef enum {
    // Windows are used where tensors have them; staging memory exists for those that have none.
    NCCL_EP_ZERO_COPY_AUTO = 0,
    // The same observable behaviour as NCCL_EP_ZERO_COPY_AUTO.
    NCCL_EP_ZERO_COPY_OFF = 1,
    // A call without the windows that its mode needs is refused; staging memory may be left out.
    NCCL_EP_ZERO_COPY_ON = 2
} ncclEpZeroCopyMode_t;

// Numbering of the expert ids that a receiver gets in outputs->topk_idx.
typedef enum {
    // The same as NCCL_EP_EXPERT_ID_LOCAL.
    NCCL_EP_EXPERT_ID_AUTO = 0,
    // 0 .. L-1 on the receiving rank.
    NCCL_EP_EXPERT_ID_LOCAL = 1,
    // 0 .. E-1, as in the sender's topk_idx.
    NCCL_EP_EXPERT_ID_GLOBAL = 2
} ncclEpExpertIdKind_t;

// What dispatch does to the rows and their scales on the way.
typedef enum {
    // Rows travel in the declared data type (bf16, fp16, fp32); scale tensors must be absent.
    NCCL_EP_DISP_QUANT_NONE = 0,
    // Already quantised rows and their scales travel unchanged, byte for byte.
    NCCL_EP_DISP_QUANT_FWD = 1,
    // bf16 rows are quantised to e4m3 with one fp32 scale a 128 elements. Low latency only.
    NCCL_EP_DISP_QUANT_DS_FP8E3M4 = 2,
    // Earlier spellings of the same values.
    NCCL_EP_DISPATCH_QUANT_NONE = NCCL_EP_DISP_QUANT_NONE,
    NCCL_EP_DISPATCH_QUANT_SCALES_FORWARD = NCCL_EP_DISP_QUANT_FWD,
    NCCL_EP_DISPATCH_QUANT_DS_FP8E3M4 = NCCL_EP_DISP_QUANT_DS_FP8E3M4
} ncclEpDispQuant_t;

// What combine does to the rows on the way.
typedef enum {
    // Rows travel in the declared data type (bf16, fp16, fp32).
    NCCL_EP_COMB_QUANT_NONE = 0,
    // bf16 rows travel as packed 4-bit floats with e4m3 block scales of 16 elements. Low latency only; on GPUs it needs
    // a device with 4-bit conversion instructions.
    NCCL_EP_COMB_QUANT_NVFP4 = 1,
    // bf16 rows travel as e4m3 with one e8m0 scale, a power of two, per 32 elements. High throughput, expert-major, all
    // ranks in one LSA team; no particular GPU is needed. Version 3.
    NCCL_EP_COMB_QUANT_MXFP8 = 2,
    // Earlier spelling of the same value.
    NCCL_EP_COMBINE_QUANT_NONE = NCCL_EP_COMB_QUANT_NONE
} ncclEpCombQuant_t;

// Earlier spellings of the type names.
typedef ncclEpDispQuant_t ncclEpDispatchQuantizationRecipe_t;
typedef ncclEpCombQuant_t ncclEpCombineQuantizationRecipe_t;

#ifdef __cplusplus
}
#endif

#endif  // NCCL_EP_ENUMS_H_
