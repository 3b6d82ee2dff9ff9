// SPDX-License-Identifier: Apache-2.0
//
// Expert-parallel communication for Mixture-of-Experts layers: ncclEpDispatch carries every token to the ranks that
// host its experts, ncclEpCombine returns the experts' outputs to the source ranks and sums them.
//
//     ncclEpCreateGroup(&group, comm, &group_config);                       // once, collective
//     ncclEpInitHandle(&handle, group, layout, NULL, num_topk, NULL);       // once per layer or micro-batch
//     ncclEpUpdateHandle(handle, topk_idx, NULL, stream);                   // new routing
//     ncclEpDispatch(handle, &inputs, &outputs, &layout_info, NULL, stream);
//     ...                                                                   // the experts, on the same stream
//     ncclEpCombine(handle, &combine_inputs, &combine_outputs, NULL, stream);
//
// Letters used below: R ranks, E experts, L = E / R experts per rank (expert e lives on rank e / L), K experts per
// token, M = max_dispatch_tokens_per_rank, B tokens of this rank in this step (0 <= B <= M), H elements of a token row,
// S scales of a token, C = max_recv_tokens_per_rank, N rows of a high-throughput receive tensor. LL is the low-latency
// algorithm, HT the high-throughput one.
//
// Rules for all functions
// - The result is ncclSuccess or an error. A wrong argument never aborts, exits, throws or traps. After an error the
//   group stays usable, and no output has been written unless a function says otherwise.
// - Errors:
//     ncclInvalidArgument     a mandatory pointer is NULL, a struct or tensor is malformed, a value is out of range
//     ncclInvalidUsage        each argument is valid, but not in this combination or at this time
//     ncclUnhandledCudaError  CUDA failed; nothing is leaked
//     ncclSystemError         the system failed; nothing is leaked
//     ncclRemoteError         the group failed, see ncclEpCreateGroup
// - Work is enqueued on the given stream and on no other that the caller can see; NULL is the legacy default stream.
//   The caller orders streams.
// - "Local" calls do not communicate. "Collective" calls are made by every rank of the communicator. All ranks make the
//   dispatches, combines, completes and (HT) updates of a group in the same order.
// - Calls on different groups may run in different threads at once. The caller serialises calls on one group.
// - Structs, tensor descriptors and their sizes arrays are read during the call only. The memory that tensors point to
//   must live until the enqueued work is done.
// - "Capturable" calls may be recorded into a CUDA graph. Replays may repeat, and alternate with other graphs and with
//   eager calls, as long as all ranks run the same sequence.
// - Objects belong to the process that created them. After fork() every call of the child on a communicator, group or
//   handle of its parent is ncclInvalidUsage, and the child's exit does not affect the parent. The child may create its
//   own, but not on GPUs, since CUDA does not survive a fork.
// - Waits for peers are bounded by the timeout T (timeout_ns of the group), so that a lost rank is an error. The most
//   that a wait lasts:
//                                                                    without masks  with masks
//     LL, from when the operation (of a split one: this half) began on this rank's device
//       for a rank that has not entered the operation                T              T
//       for one that has: it may wait for a lost one itself          T              2 T
//       for this rank's own part                                     T              3 T
//       for the caller's experts (crossdockHandleSetOverlap)         7/8 T          7/8 T
//     HT, from when the wait began
//       for a rank that is silent: from its last heartbeat           T              T
//       for one that is not, since it waits for a lost one itself    2 T            2 (R + 1) T
//       for this rank's own part                                     2 (R + 1) T    4 (R + 1) T
//     ncclEpMaskClean (LL: per communication buffer of the group)                   3 T
//     ncclEpGroupDestroy, once the device has done its work          T              T
//   With masks, ranks may be lost one after the other, and each costs its own wait. The caller's own work on the device
//   or the stream is not bounded.
// - The communicator may also be one of crossdock.h, whose ranks are threads or processes on CPUs. "Device memory" is
//   then host memory.
#ifndef NCCL_EP_H_
#define NCCL_EP_H_

#include <stddef.h>
#include <stdint.h>

#include "cuda.h"
#include "nccl.h"
#include "nccl_ep/ep_enums.h"

#define NCCL_EP_MAJOR 0
#define NCCL_EP_MINOR 2
#define NCCL_EP_PATCH 0
#define NCCL_EP_VERSION_CODE (NCCL_EP_MAJOR * 10000 + NCCL_EP_MINOR * 100 + NCCL_EP_PATCH)

// The feature level that a caller was compiled for. It is passed in ncclEpGroupConfig_t::version. The library serves
// callers of all three versions:
//   2  appends fields to five structs; adds recipes, int32 routing and eager mode
//   3  adds SM counts per operation (dispatch_num_sms, combine_num_sms) and NCCL_EP_COMB_QUANT_MXFP8
#define NCCL_EP_API_VERSION 3

// The second field of every struct: of a tensor descriptor, and of everything else.
#define NCCL_EP_TENSOR_MAGIC 0xCAFECAFEu
#define NCCL_EP_MAGIC 0xC00FFFEEu

// Two 4-bit floats packed in one byte; a row of H such values is declared with H / 2 elements.
#ifndef ncclFloat4x2
#define ncclFloat4x2 ((ncclDataType_t)12)
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---- Types ----
//
// Every struct starts with its size and a magic number, which its INIT macro sets. Structs only grow at their end. The
// library reads a field only if `size` covers all of it, and otherwise takes 0. So callers that were compiled against
// an older header, or a newer one, keep working. Bytes beyond `size` are never read. A size below the struct's V1 size
// is an ncclInvalidArgument.

typedef struct ncclEpGroup* ncclEpGroup_t;
typedef struct ncclEpHandle* ncclEpHandle_t;

// A dense row-major tensor, described by the caller. `size` is at least 48.
typedef struct ncclEpTensor {
    unsigned int size;
    unsigned int magic;  // NCCL_EP_TENSOR_MAGIC; descriptors of ncclEpTensorAlloc carry another one
    unsigned int ndim;
    ncclDataType_t datatype;
    void* data;            // device memory, or NULL for a tensor that only its window names
    ncclWindow_t win_hdl;  // window of ncclCommWindowRegister, or NULL
    uint64_t win_offset;   // bytes from the window's start; if `data` is set too, both name the same address
    size_t* sizes;         // ndim extents, the caller's; an extent of 0 is legal, and then `data` may be NULL
} ncclEpTensor_t;

typedef struct {
    unsigned int size;
    unsigned int magic;
} ncclEpTensorAllocConfig_t;

// Device memory hooks. Only API calls that create or destroy a group or handle call them, on the thread of that call,
// and never during capture. Memory from alloc_fn is passed to free_fn once, with the same context. A group's next
// handles reuse the memory of destroyed ones. This memory is freed with the group, or earlier if it is large.
typedef cudaError_t (*ncclEpAllocFn_t)(void** ptr, size_t size, void* context);
typedef cudaError_t (*ncclEpFreeFn_t)(void* ptr, void* context);

// Set both functions or none. They provide the device memory that no peer reaches:
//   - for the group: less than 1 KiB, and 4 bytes per rank;
//   - for each communication buffer: less than 1 KiB;
//   - for each handle without memory of the caller: ncclEpHandleMemSize bytes.
// The communication buffers themselves are by far the largest part. They are symmetric windows, which only NCCL can
// allocate (ncclMemAlloc). An HT group has one. An LL group has one, and one more for each handle that needs a larger
// one than all before it. crossdockGroupMemoryUse (crossdock.h) returns how much of each a group has.
typedef struct {
    ncclEpAllocFn_t alloc_fn;
    ncclEpFreeFn_t free_fn;
    void* context;
} ncclEpAllocConfig_t;

// Equal on all ranks, except `alloc`.
typedef struct {
    unsigned int size;
    unsigned int magic;
    unsigned int version;  // NCCL_EP_API_VERSION; other values are accepted
    ncclEpAlgorithm_t algorithm;
    unsigned int num_experts;                   // E > 0, a multiple of R
    unsigned int max_dispatch_tokens_per_rank;  // M > 0
    // LL: ignored. HT: C >= M, how many rows (FLAT) or padded slots (expert-major) a rank can receive. NCCL_EP_AUTO:
    // eager mode; the caller sizes the receive tensors after each update.
    unsigned int max_recv_tokens_per_rank;
    unsigned int max_token_bytes;        // > 0; bound for token row + scale row, any call (HT: a multiple of 16)
    unsigned long int rdma_buffer_size;  // LL; bytes, a hint. NCCL_EP_AUTO, or a value from nccl_ep/common.hpp
    unsigned int num_qp_per_rank;        // a hint, or NCCL_EP_AUTO
    unsigned int num_channels;           // accepted, without effect: max_num_sms bounds what an operation occupies
    unsigned int max_num_sms;            // most SMs an operation occupies, 1 .. those of the device, or NCCL_EP_AUTO
    ncclEpAllocConfig_t alloc;
    unsigned int enable_mask;  // LL; a rank that does not answer is masked instead of failing the group
    uint64_t timeout_ns;       // T, see above; 0: 100 s; at most 2^48. NCCL_EP_TIMEOUT_MS (ms) overrides it
    // Version 2
    ncclEpZeroCopyMode_t zero_copy;
    // HT: rows beyond C. LL expert-major: rows of an expert beyond R*M, which only repeated ids bring. Trap fails the
    // group, otherwise they are dropped.
    ncclEpOverflowPolicy_t overflow_policy;
    unsigned int num_topk;  // HT: bound of K of all handles, <= E; eager expert-major needs it
    unsigned char padding_v2[4];
    // Version 3. Of these, the first that is set counts: the environment's NCCL_EP_DISPATCH_SMS or NCCL_EP_COMBINE_SMS,
    // its NCCL_EP_COMM_SMS, the field here, max_num_sms.
    unsigned int dispatch_num_sms;  // most SMs a dispatch occupies, 1 .. those of the device, or NCCL_EP_AUTO
    unsigned int combine_num_sms;   // the same for a combine
} ncclEpGroupConfig_t;

// Counts and positions of received rows: 1-D device tensors, all optional unless a call says otherwise.
typedef struct {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t* expert_counters;     // [L] rows of each local expert
    ncclEpTensor_t* src_rank_counters;   // [R] int32, rows from each source rank (LL rank-major)
    ncclEpTensor_t* expert_offsets;      // [L] first row of each expert's zone (expert-major)
    ncclEpTensor_t* recv_total_counter;  // [1] rows received in all
    // Version 2
    ncclEpExpertIdKind_t recv_topk_idx_kind;  // numbering in outputs->topk_idx
    unsigned char padding_v2[4];
} ncclEpLayoutInfo_t;

typedef struct {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t* tokens;
    ncclEpTensor_t* topk_weights;
    ncclEpTensor_t* scales;
} ncclEpDispatchInputs_t;

typedef struct {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t* tokens;
    ncclEpTensor_t* topk_weights;
    ncclEpTensor_t* scales;
    ncclEpTensor_t* topk_idx;
} ncclEpDispatchOutputs_t;

typedef struct {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t* tokens;
    ncclEpTensor_t* topk_weights;
    // Version 2
    ncclEpTensor_t* scales;
} ncclEpCombineInputs_t;

typedef struct {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t* tokens;
    ncclEpTensor_t* topk_weights;  // LL expert-major: read, not written
} ncclEpCombineOutputs_t;

typedef struct {
    unsigned int size;
    unsigned int magic;
    size_t dispatch_output_per_expert_alignment;  // HT expert-major: rows; a power of two; 0 and 1: none
} ncclEpHandleConfig_t;

typedef struct {
    unsigned int size;
    unsigned int magic;
    unsigned int send_only;     // LL: only the send half, ncclEpComplete does the rest; HT: ignored
    unsigned int round_scales;  // DS_FP8E3M4: scales rounded up to powers of two
    ncclEpPassDir_t pass_direction;
    // Version 2
    union {
        ncclEpDispQuant_t quant_recipe;
        ncclEpDispQuant_t quantization_recipe;  // earlier spelling
    };
} ncclEpDispatchConfig_t;

typedef struct {
    unsigned int size;
    unsigned int magic;
    unsigned int send_only;
    ncclEpPassDir_t pass_direction;
    // Version 2
    union {
        ncclEpCombQuant_t quant_recipe;
        ncclEpCombQuant_t quantization_recipe;  // earlier spelling
    };
} ncclEpCombineConfig_t;

typedef struct ncclEpCompleteConfig {
    unsigned int size;
    unsigned int magic;
} ncclEpCompleteConfig_t;

// ---- Sizes and versions of the structs ----
//
// For each struct: its size, its current version, and for each released version n the literal size (Vn_SIZE) and the
// last field (Vn_LAST_FIELD).

// The bytes of `type` up to and including `field`.
#define NCCL_EP_FIELD_END(type, field) (offsetof(type, field) + sizeof(((type*)0)->field))
// Whether *ptr is there and its `size` covers `field`.
#define NCCL_EP_HAS_FIELD(ptr, type, field) ((ptr) != NULL && (ptr)->size >= NCCL_EP_FIELD_END(type, field))

#define NCCL_EP_TENSOR_SIZE ((unsigned int)sizeof(ncclEpTensor_t))
#define NCCL_EP_TENSOR_CURRENT_VERSION 1
#define NCCL_EP_TENSOR_V1_SIZE 48
#define NCCL_EP_TENSOR_V1_LAST_FIELD sizes

#define NCCL_EP_TENSOR_ALLOC_CONFIG_SIZE ((unsigned int)sizeof(ncclEpTensorAllocConfig_t))
#define NCCL_EP_TENSOR_ALLOC_CONFIG_CURRENT_VERSION 1
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE 8
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_LAST_FIELD magic

#define NCCL_EP_GROUP_CONFIG_SIZE ((unsigned int)sizeof(ncclEpGroupConfig_t))
#define NCCL_EP_GROUP_CONFIG_CURRENT_VERSION 3
#define NCCL_EP_GROUP_CONFIG_V1_SIZE 96
#define NCCL_EP_GROUP_CONFIG_V1_LAST_FIELD timeout_ns
#define NCCL_EP_GROUP_CONFIG_V2_SIZE 112
#define NCCL_EP_GROUP_CONFIG_V2_LAST_FIELD padding_v2
#define NCCL_EP_GROUP_CONFIG_V3_SIZE 120
#define NCCL_EP_GROUP_CONFIG_V3_LAST_FIELD combine_num_sms

#define NCCL_EP_LAYOUT_INFO_SIZE ((unsigned int)sizeof(ncclEpLayoutInfo_t))
#define NCCL_EP_LAYOUT_INFO_CURRENT_VERSION 2
#define NCCL_EP_LAYOUT_INFO_V1_SIZE 40
#define NCCL_EP_LAYOUT_INFO_V1_LAST_FIELD recv_total_counter
#define NCCL_EP_LAYOUT_INFO_V2_SIZE 48
#define NCCL_EP_LAYOUT_INFO_V2_LAST_FIELD padding_v2

#define NCCL_EP_DISPATCH_INPUTS_SIZE ((unsigned int)sizeof(ncclEpDispatchInputs_t))
#define NCCL_EP_DISPATCH_INPUTS_CURRENT_VERSION 1
#define NCCL_EP_DISPATCH_INPUTS_V1_SIZE 32
#define NCCL_EP_DISPATCH_INPUTS_V1_LAST_FIELD scales

#define NCCL_EP_DISPATCH_OUTPUTS_SIZE ((unsigned int)sizeof(ncclEpDispatchOutputs_t))
#define NCCL_EP_DISPATCH_OUTPUTS_CURRENT_VERSION 1
#define NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE 40
#define NCCL_EP_DISPATCH_OUTPUTS_V1_LAST_FIELD topk_idx

#define NCCL_EP_COMBINE_INPUTS_SIZE ((unsigned int)sizeof(ncclEpCombineInputs_t))
#define NCCL_EP_COMBINE_INPUTS_CURRENT_VERSION 2
#define NCCL_EP_COMBINE_INPUTS_V1_SIZE 24
#define NCCL_EP_COMBINE_INPUTS_V1_LAST_FIELD topk_weights
#define NCCL_EP_COMBINE_INPUTS_V2_SIZE 32
#define NCCL_EP_COMBINE_INPUTS_V2_LAST_FIELD scales

#define NCCL_EP_COMBINE_OUTPUTS_SIZE ((unsigned int)sizeof(ncclEpCombineOutputs_t))
#define NCCL_EP_COMBINE_OUTPUTS_CURRENT_VERSION 1
#define NCCL_EP_COMBINE_OUTPUTS_V1_SIZE 24
#define NCCL_EP_COMBINE_OUTPUTS_V1_LAST_FIELD topk_weights

#define NCCL_EP_HANDLE_CONFIG_SIZE ((unsigned int)sizeof(ncclEpHandleConfig_t))
#define NCCL_EP_HANDLE_CONFIG_CURRENT_VERSION 1
#define NCCL_EP_HANDLE_CONFIG_V1_SIZE 16
#define NCCL_EP_HANDLE_CONFIG_V1_LAST_FIELD dispatch_output_per_expert_alignment

#define NCCL_EP_DISPATCH_CONFIG_SIZE ((unsigned int)sizeof(ncclEpDispatchConfig_t))
#define NCCL_EP_DISPATCH_CONFIG_CURRENT_VERSION 2
#define NCCL_EP_DISPATCH_CONFIG_V1_SIZE 20
#define NCCL_EP_DISPATCH_CONFIG_V1_LAST_FIELD pass_direction
#define NCCL_EP_DISPATCH_CONFIG_V2_SIZE 24
#define NCCL_EP_DISPATCH_CONFIG_V2_LAST_FIELD quant_recipe

#define NCCL_EP_COMBINE_CONFIG_SIZE ((unsigned int)sizeof(ncclEpCombineConfig_t))
#define NCCL_EP_COMBINE_CONFIG_CURRENT_VERSION 2
#define NCCL_EP_COMBINE_CONFIG_V1_SIZE 16
#define NCCL_EP_COMBINE_CONFIG_V1_LAST_FIELD pass_direction
#define NCCL_EP_COMBINE_CONFIG_V2_SIZE 20
#define NCCL_EP_COMBINE_CONFIG_V2_LAST_FIELD quant_recipe

#define NCCL_EP_COMPLETE_CONFIG_SIZE ((unsigned int)sizeof(ncclEpCompleteConfig_t))
#define NCCL_EP_COMPLETE_CONFIG_CURRENT_VERSION 1
#define NCCL_EP_COMPLETE_CONFIG_V1_SIZE 8
#define NCCL_EP_COMPLETE_CONFIG_V1_LAST_FIELD magic

#ifdef __cplusplus
#define NCCL_EP_STATIC_ASSERT(condition, message) static_assert(condition, message)
#else
#define NCCL_EP_STATIC_ASSERT(condition, message) _Static_assert(condition, message)
#endif
// That version `v` (V1, V2, V3) of struct `X` (GROUP_CONFIG, ...) ends where its frozen size says.
#define NCCL_EP_STATIC_ASSERT_BOUNDARY(type, X, v)                                                             \
    NCCL_EP_STATIC_ASSERT(NCCL_EP_FIELD_END(type, NCCL_EP_##X##_##v##_LAST_FIELD) == NCCL_EP_##X##_##v##_SIZE, \
                          #type " must keep its frozen size")

// ---- Initialisers ----
//
// Each sets size and magic (and the group's version) and zeroes the rest. They are compound literals (in C++ a GNU
// extension), so a declaration, a later assignment and an expression can use them.

#define NCCL_EP_STRUCT_INIT(type, magic_value) \
    __extension__(type) { .size = (unsigned int)sizeof(type), .magic = (magic_value) }

// The two designators alone, for use inside a larger initialiser.
#define NCCL_EP_TENSOR_INIT_INLINE .size = NCCL_EP_TENSOR_SIZE, .magic = NCCL_EP_TENSOR_MAGIC
#define NCCL_EP_TENSOR_INIT NCCL_EP_STRUCT_INIT(ncclEpTensor_t, NCCL_EP_TENSOR_MAGIC)
#define NCCL_EP_TENSOR_ALLOC_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpTensorAllocConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_GROUP_CONFIG_INIT                                                                 \
    __extension__(ncclEpGroupConfig_t) {                                                          \
        .size = NCCL_EP_GROUP_CONFIG_SIZE, .magic = NCCL_EP_MAGIC, .version = NCCL_EP_API_VERSION \
    }
#define NCCL_EP_LAYOUT_INFO_INIT NCCL_EP_STRUCT_INIT(ncclEpLayoutInfo_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_INPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchInputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_OUTPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchOutputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_INPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineInputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_OUTPUTS_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineOutputs_t, NCCL_EP_MAGIC)
#define NCCL_EP_HANDLE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpHandleConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_DISPATCH_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpDispatchConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMBINE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpCombineConfig_t, NCCL_EP_MAGIC)
#define NCCL_EP_COMPLETE_CONFIG_INIT NCCL_EP_STRUCT_INIT(ncclEpCompleteConfig_t, NCCL_EP_MAGIC)

// ---- Functions ----

#pragma GCC visibility push(default)

// Writes NCCL_EP_VERSION_CODE of the library. Local, capturable.
ncclResult_t ncclEpGetVersion(int* version);

// Makes a tensor descriptor with a library-owned copy of the `ndim` extents (extents of 0 are legal; ndim 1..4); data,
// window and offset are 0 and the caller's to fill. No device memory is involved. `config` may be NULL. Local.
ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t** tensor, unsigned int ndim, ncclDataType_t datatype, const size_t* sizes,
                               const ncclEpTensorAllocConfig_t* config);

// Frees a descriptor of ncclEpTensorAlloc, not the memory it names. NULL is a success; a descriptor from elsewhere, or
// one whose `sizes` pointer was replaced, is an ncclInvalidArgument and nothing is freed. Local.
ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t* tensor);

// Makes a group on a communicator, which is borrowed until ncclEpGroupDestroy returns; several groups may share one.
// Collective, blocking, not capturable. *ep_group is written on success only.
//
// How a group fails. A group without masks fails if a wait for a peer outlasts the timeout, or if a peer announces a
// number out of range (which is not used). Then the outputs of that operation are undefined, later calls return
// ncclRemoteError, and only ncclEpGroupDestroy still works. On a GPU a group fails between two calls, so the message is
// also printed to stderr at once, unless NCCL_EP_QUIET=1.
//
// While groups and handles are made, ranks connect and map memory. These waits last at least 60 s for each rank (ranks
// on CPUs: CROSSDOCK_JOIN_TIMEOUT_MS), and T if that is longer.
//
// ncclInvalidArgument:
//   - E is 0, not a multiple of R, or above 2^20;
//   - M is 0 or above 2^24 - 1, in LL above (2^24 - 1) / 64; R*M is above 2^31 - 1; LL: E * L is above 2^31 - 1;
//   - max_token_bytes is 0 or above 2^30; HT: it is not a multiple of 16;
//   - HT: C is below M, and not 0;
//   - num_topk is above E; an enum has an unknown value.
// ncclInvalidUsage:
//   - the GPU's compute capability is below 8.0, this build has no code for it, or more SMs are asked for than it has
//     (these are checked first);
//   - one allocator hook is set without the other;
//   - eager mode with DROP, or with R * M * num_topk above 2^31 - 1;
//   - values differ between ranks;
//   - NCCL or the topology has no device API;
//   - environment variables contradict each other.
ncclResult_t ncclEpCreateGroup(ncclEpGroup_t* ep_group, ncclComm_t comm, const ncclEpGroupConfig_t* config);

// Destroys a group. Collective, not capturable. It waits until the device has done all work of this process, on all
// streams (the group's own operations end within their bounds), and then at most T for the other ranks. Afterwards:
//   - graphs that hold operations of the group must not be launched;
//   - its handles can be destroyed, and every other use of them is ncclInvalidUsage. They may be destroyed before, too.
// NULL is a success. If several threads destroy one group or handle, one succeeds and the others get
// ncclInvalidArgument.
ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group);

// The bytes of device memory that a handle needs, if it is to live in memory of the caller: positive, the same on all
// ranks, constant for the group's life. `config` may be NULL. num_topk <= 0: HT answers for the largest possible K, LL
// with ncclInvalidArgument. Local.
ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t ep_group, ncclEpLayout_t layout, const ncclEpHandleConfig_t* config,
                                 size_t* size_out, int num_topk);

// Makes a handle without routing. Not capturable. It does not disturb live handles, running operations and captured
// graphs. On failure *handle is NULL.
//
// HT: local.
// LL: local if the group has communication memory for it. That is so
//   - for every K up to the group's num_topk, if that is set;
//   - for what fits into rdma_buffer_size, if that is set;
//   - for what an earlier handle needed.
// Otherwise it is collective and blocks until all ranks have come, like ncclEpCreateGroup. Callers that set neither of
// the two fields therefore make LL handles on all ranks, in the same order.
//
// num_topk: K, 1 .. E and at most 64. In HT, -1 takes the group's num_topk, or the largest K if that is 0.
//
// handle_mem: NULL, or a 1-D ncclUint8 tensor of at least ncclEpHandleMemSize bytes. The caller keeps it, untouched,
// until ncclEpHandleDestroy. With NULL, the handle takes the group's memory, first that of destroyed handles.
//
// Routing in handle_mem (HT). All routing of a handle is in its memory. A second handle of the same group over the same
// memory, or over a copy of it, with the same layout, K and alignment, uses the routing of the first without an update.
//   - The second handle's first use reads and checks the routing, which waits for the stream. It does neither if the
//     first handle still lives when the second is made.
//   - What an update cannot have left there, or what a handle of another group, layout, K or alignment has written, is
//     ncclInvalidUsage.
//   - Between the last use of a routing and the next update, the memory may hold anything.
//   - The caller may copy another routing of such a handle into the memory. If B differs, the next use reads it again.
//   - In a capture nothing is read: B is that of the tensors. A replay uses what the memory holds then, which must be
//     such a routing, for the same B. num_topk -1 and eager mode are ncclInvalidUsage in a capture, before anything is
//     captured.
//
// ncclInvalidArgument: a layout that the algorithm does not have, an alignment that is not a power of two, a K out of
// range, a handle_mem of wrong shape, type or size. ncclInvalidUsage: K above the group's num_topk (HT).
ncclResult_t ncclEpInitHandle(ncclEpHandle_t* handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                              const ncclEpHandleConfig_t* config, int num_topk, const ncclEpTensor_t* handle_mem);

// Binds the routing of the next operations: topk_idx [B, K], int32 or int64, global expert ids. A negative id, or one
// that is >= E, drops that choice; duplicates are legal. In HT, a token that names an expert twice has one row there,
// with the weight of one of these choices. Repeating the call without a dispatch between is legal.
//
// LL: local, enqueues nothing, layout_info NULL. topk_idx is borrowed: dispatch and combine read its memory when they
// execute. So it must not change from the dispatch to the end of the matching combine, and a graph replay reads what it
// holds then. After other memory or another B is bound, a combine needs a dispatch before it.
//
// HT: collective, capturable, does not block the host. topk_idx is copied in stream order. layout_info may be NULL; its
// recv_total_counter, expert_counters (expert-major: padded) and expert_offsets are written. They are int32 or int64,
// FLAT's expert_counters int32. Must agree on all ranks: that the call is an update, the handle's layout, and K. B may
// differ.
ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx,
                                const ncclEpLayoutInfo_t* layout_info, cudaStream_t stream);

// ncclEpInitHandle with K = topk_idx->sizes[1] and memory of the library, then ncclEpUpdateHandle. If either fails,
// *handle is NULL and nothing remains.
ncclResult_t ncclEpCreateHandle(ncclEpHandle_t* handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout,
                                const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* layout_info,
                                const ncclEpHandleConfig_t* config, cudaStream_t stream);

// Destroys a handle, even while its work is queued or a send_only operation of it is pending. Local, does not wait.
// Later handles of the group reuse its memory. Memory of the caller's allocator returns there in ncclEpGroupDestroy at
// the latest. Graphs that hold the handle's operations may still be launched; if it was made with handle_mem, only
// while that memory lives. NULL is a success.
ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle);

// Sends this rank's B tokens to the ranks of their experts and receives what others send here. Collective. It enqueues;
// in LL it never blocks the host. It can be captured; in HT this needs a fixed C.
//
// LL, expert-major:
//   - inputs->tokens [B, H], outputs->tokens [L, R*M, H]. There are no topk_weights and no outputs->topk_idx.
//   - layout_info->expert_counters [L] int32 is required, and is written. The first expert_counters[l] rows of
//     outputs->tokens[l] hold one row for each (source rank, token, k) with topk_idx equal to this rank's expert l, in
//     this order. Rows past them are not written.
//   - expert_offsets and recv_total_counter may be given, as int32 or int64. They get l * R*M, and the sum of
//     expert_counters.
//   - Choices past an expert's R*M rows are dropped and add nothing to combine. Only duplicates within a row of
//     topk_idx can reach that number.
//
// LL, rank-major:
//   - inputs->tokens [B, H], inputs->topk_weights [B, K] fp32.
//   - outputs->tokens [R, M, H] has one row for each (source rank, token) with an expert here, with tokens in order.
//   - outputs->topk_weights [R, M, K] fp32 has the weights of all K choices, in the order of the source.
//   - outputs->topk_idx [R, M, K] int32 has the ids of the choices with an expert here (recv_topk_idx_kind), and -1 for
//     the others and in all unused rows.
//   - layout_info may be NULL. Its src_rank_counters [R] int32 are written, and so is their sum in its
//     recv_total_counter, int32 or int64. expert_offsets is ignored.
//
// HT:
//   - outputs->tokens [N, H], with rows in the order of source rank and token.
//   - Flat: outputs->topk_weights [N, K] fp32, outputs->topk_idx [N, K] int64.
//   - Expert-major: outputs->topk_weights [N] fp32. Each expert has a zone, padded with zero rows to the alignment. The
//     counters of layout_info that are given are written as in an update.
//   - In all unused rows, to the end of the tensor or of the budget, topk_idx is -1 and weights are 0.
//   - BWD has neither weights nor topk_idx.
//   - With NCCL_EP_OVERFLOW_DROP the first C rows (expert-major: slots) in this order arrive, and no others. Counters
//     count what arrives; recv_total_counter counts what would have come without a budget. NVIDIA's library may also
//     drop tokens whose slots are below C, and has zeros there.
//   - Every row that is counted, except padding, has arrived and holds its own token and weight. With ht_masks, it is
//     zero if its rank was lost.
//
// Recipes and data types:
//   NONE        tokens are bf16, fp16 or fp32, or of one byte: e4m3, e5m2, ncclFloat4x2, uint8, int8. Outputs have the
//               type of the inputs. No scales.
//   FWD         tokens as with NONE; inputs->scales [B, S], and outputs->scales shaped as outputs->tokens with S for H,
//               of fp32, fp16, bf16, e4m3, e5m2 or uint8.
//   DS_FP8E3M4  bf16 in, e4m3 out; outputs->scales fp32 with the last extent H / 128. For each 128 elements, amax =
//               max(1e-4, max |x|). The scale is amax * (1 / 448) in fp32, the stored value x * (448 / amax) in e4m3,
//               rounded to nearest even. With round_scales, the scale is rounded up to a power of two, and the stored
//               value is x / scale.
//
// Memory of the tensors:
//   - Rows of tokens and of forwarded scales are multiples of 16 bytes.
//   - Tokens begin at a multiple of 16 bytes, and so do forwarded scales in a window. Every other tensor begins at a
//     multiple of its element.
//   - No output may share bytes with an input.
//   - Any tensor may be named by its window alone.
//   - Nobody may touch outputs in windows that peers write, from the moment when any rank may start the operation.
//   - HT, one LSA team: if inputs->tokens (and inputs->scales) are in windows, and outputs are expert-major or in plain
//     memory, receivers read rows there, without a copy through the library's memory. Between two ranks this happens
//     only if both have their inputs at the same place of the same window.
//
// send_only: until ncclEpComplete has run, inputs must not change, and outputs and counters are undefined. A group can
// have two send_only operations pending (dispatches and combines together), or one if zero_copy is on. More are
// ncclInvalidUsage. ncclEpComplete ends one, and so does destroying its handle.
//
// What must agree on all ranks:
//   LL  the call itself, layout and K, the recipe, the type of inputs->tokens, the bytes of a row of outputs->tokens
//       and of outputs->scales
//   HT  the call itself, the update whose routing is used, layout and K, the direction, the recipe, the type of the
//       tokens, the bytes of a row and of its scales. In a group of one team, a rank that sends and receives no rows
//       may pass other types and bytes.
//   Windows that peers write: the window, and win_offset of outputs->tokens and outputs->scales. In LL rank-major this
//       holds for the ranks that have the same outputs in windows, in HT flat for the ranks that have windows at all.
//       Ranks compare hashes. Two windows that are not the same one are noticed only on CPUs, or if their sizes differ.
//   Windows of inputs need not agree.
// If ranks differ, all get ncclInvalidUsage, and the group has failed. The message names the quantity, two ranks and
// their values. On GPUs the next call of the group returns it. There are two exceptions:
//   - HT, windows that differ: a rank that does not reach the odd rank's window learns of it from others. It gets
//     ncclRemoteError, which names the odd rank.
//   - LL combine: a rank may succeed if it has no tokens at the experts of the odd rank. Its result is right, and its
//     next dispatch gets the error if another rank has noticed the difference (with masks: ncclRemoteError, when the
//     timeout is over).
//
// ncclInvalidArgument: a tensor is missing, forbidden here, misaligned, or of another shape or type; an output is over
// an input; rows are larger than max_token_bytes.
// ncclInvalidUsage: no routing is bound; a send_only operation of this handle is pending; BWD in LL; eager HT in a
// capture, except a backward pass whose number of rows the caller has asked for since the update.
ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                            const ncclEpDispatchOutputs_t* outputs, const ncclEpLayoutInfo_t* layout_info,
                            const ncclEpDispatchConfig_t* config, cudaStream_t stream);

// Returns the experts' outputs to the source ranks and sums them, after a dispatch of this handle. Collective,
// enqueues, never blocks the host, capturable.
//   - Rows are where dispatch put them. inputs->tokens may be the tensor that dispatch filled.
//   - outputs->tokens [B, H] is another tensor of the same type (bf16, fp16, fp32). All its rows are written: a token
//     without experts gets zeros.
//   - H may differ from dispatch's.
//   - Sums are in fp32 and in a fixed order, so results are bitwise equal from run to run. In an invariant group
//     (crossdockCreateGroup) they do not depend on the number of ranks or the machine either, nor, with weights of 1,
//     on the mode.
//
// LL, expert-major:
//   - inputs->tokens [L, R*M, H]. outputs->topk_weights [B, K] fp32 is an input.
//   - A token's result is the sum over k, ascending, of weight times row, rounded once.
//
// LL, rank-major:
//   - inputs->tokens [R, M, H]. The caller has weighted the rows and summed them over the local experts.
//   - A token's result is the sum of its ranks' rows, in the order of the first k of each, rounded once.
//
// HT:
//   - inputs->tokens [N, H]. The caller has weighted the rows. Flat: the caller has also summed them over the local
//     experts.
//   - BWD also takes inputs->topk_weights, shaped as dispatch's outputs, and returns outputs->topk_weights [B, K] fp32.
//
// Must agree in LL: the call itself, layout and K, the recipe, type and bytes of a row of inputs->tokens, and who sums
// (crossdockHandleSetSums). A rank that has no token at the rank that differs learns of it only in its next dispatch.
// Must agree in HT: as for ncclEpDispatch, of inputs->tokens.
//
// NVFP4 (LL): bf16 tokens, H a multiple of 32, inputs->scales [.., 1] fp32 with 2688 / amax of each row, or 0.
// MXFP8 (HT expert-major, either direction): bf16 tokens, H a multiple of 32, no scales. Each rank's sum for a token is
//   rounded to bf16, as with NONE. It is sent as e4m3 with one e8m0 scale per 32 elements. The scale is the smallest
//   power of two, at least 2^-127, with which no element is larger than 448. The source rank adds these sums in fp32
//   and rounds once. A result differs from the exact sum by what NONE allows and, for each rank's sum x, by at most the
//   largest of |x| / 16, 2^-17 times the largest magnitude of its 32 elements, and 2^-137. A block that holds an
//   infinity or a NaN becomes NaN.
//
// ncclInvalidUsage: NVFP4 on a device without 4-bit conversions (checked first, in every mode and layout); MXFP8 with
// several LSA teams; nothing was dispatched; LL: other routing was bound since the last dispatch; and as for
// ncclEpDispatch.
ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t* inputs,
                           const ncclEpCombineOutputs_t* outputs, const ncclEpCombineConfig_t* config,
                           cudaStream_t stream);

// Runs the receive half of the handle's pending send_only operation on this stream. With nothing pending, and in HT, it
// succeeds and does nothing. Every rank must call it. `config` may be NULL. Capturable together with its send.
ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t* config, cudaStream_t stream);

// ---- Masks: LL groups with enable_mask, ncclInvalidUsage for others ----
//
// A rank that does not answer within the timeout is masked on the ranks that waited for it: dispatch receives no rows
// from it and sends it none, combine leaves its contributions out. Masks are local views.

// Copies R ints (1 active, 0 masked) to device memory. Local, enqueues, capturable.
ncclResult_t ncclEpMaskQuery(ncclEpGroup_t ep_group, int* mask_status, cudaStream_t stream);

// Sets all R entries from host memory, which may be reused on return; values other than 0 are active. A rank of an LL
// group whose own entry is 0 gets no rows of its own tokens either. Local.
ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t ep_group, const int* mask, cudaStream_t stream);

// Readmits all participating ranks. Collective over the surviving ranks, blocks until the stream is done, not
// capturable. The async error stays.
ncclResult_t ncclEpMaskClean(ncclEpGroup_t ep_group, cudaStream_t stream);

// Writes 1 if a timeout masked a rank since the last ncclEpErrorClear, else 0. Local, host only.
ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t ep_group, int* error_out);

// Sets the async error back to 0. Local, host only.
ncclResult_t ncclEpErrorClear(ncclEpGroup_t ep_group);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif  // NCCL_EP_H_
