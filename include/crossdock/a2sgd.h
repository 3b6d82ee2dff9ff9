/* SPDX-License-Identifier: Apache-2.0
 *
 * crossdock/a2sgd.h: A2SGD, gradient averaging for data parallelism with 64 bits per rank and step. The conventions are
 * those of crossdock.h. A forked child cannot use its parent's objects (InvalidUsage).
 */
#ifndef CROSSDOCK_A2SGD_H_
#define CROSSDOCK_A2SGD_H_

#include "crossdock.h"

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* Bhattacharya, Yu, Chowdhury, "O(1) Communication for Distributed SGD through Two-Level Gradient Averaging" (2020,
 * arXiv 2006.07405). With a the mean of a rank's non-negative gradient entries and b the mean magnitude of its negative
 * ones (0 where there are none), and A and B the means of a and b over the ranks, a step replaces every entry g by
 *     g + (A - a)  where g >= 0,      g - (B - b)  where g < 0.
 * So a and b, 64 bits per rank, are all that ranks exchange, however large the gradient is. docs/a2sgd.md says what
 * this is good for, and what not.
 *
 * All pieces of a gradient count as one flat gradient. A step has two halves, so that other work can run between them:
 * begin reads the gradient once and sends, end waits and applies. Do not change the gradient between them. Both are
 * enqueued on the stream (on CPUs they are done when the call returns). Both are capturable, together or one by one, as
 * long as every begin is followed by its end.
 *
 * The order of sums depends only on the pieces' sizes: a piece is summed in runs of 4096 entries, and a run in 256
 * columns. So results are bitwise the same from run to run and on every backend. */
typedef struct crossdockA2sgd* crossdockA2sgd_t;

typedef struct {
    void* data;              /* device memory, aligned to its type; may be NULL where count is 0 */
    size_t count;            /* entries */
    ncclDataType_t datatype; /* ncclFloat32, ncclFloat16 or ncclBfloat16 */
    const char* name;        /* for reports and messages, copied; NULL: "piece I" */
} crossdockA2sgdPiece_t;

typedef enum {
    CROSSDOCK_A2SGD_SUMS_FP32 = 0, /* columns in fp32, at most 16 entries each; all above that in fp64 */
    CROSSDOCK_A2SGD_SUMS_FP64 = 1  /* everything in fp64 */
} crossdockA2sgdSums_t;

typedef struct {
    unsigned int size;         /* sizeof(crossdockA2sgdConfig_t) */
    unsigned int magic;        /* NCCL_EP_MAGIC */
    crossdockA2sgdSums_t sums; /* the same on every rank */
    int skip_nonfinite;        /* 1: where any rank's gradient is not finite, no rank's is changed in this step, and the
                                  report says "skipped". 0: all ranks' gradients become NaN, as with an all-reduce.
                                  The same on every rank */
    uint64_t timeout_ns;       /* of a step's wait for the others; 0: 100 s. NCCL_EP_TIMEOUT_MS comes before it */
    int lsa_team_size;         /* as in crossdockGroupOptions_t */
} crossdockA2sgdConfig_t;

#define CROSSDOCK_A2SGD_CONFIG_INIT \
    { sizeof(crossdockA2sgdConfig_t), NCCL_EP_MAGIC, CROSSDOCK_A2SGD_SUMS_FP32, 0, 0, 0 }

/* Collective. pieces are this rank's; how the gradient is cut, and the pieces' types, may differ between ranks. config
 * NULL: the defaults.
 * InvalidArgument: a pointer is NULL, a type or an option is none of the above, data is not aligned, num_pieces not in
 * 1..16777214. InvalidUsage on every rank, with ranks and numbers: the pieces hold no entry, ranks hold different
 * numbers of entries, or their options differ. RemoteError: a rank did not come within the timeout. */
ncclResult_t crossdockA2sgdCreate(crossdockA2sgd_t* a2sgd, ncclComm_t comm, const crossdockA2sgdPiece_t* pieces,
                                  size_t num_pieces, const crossdockA2sgdConfig_t* config);

/* Other memory for the same gradient, from the next begin on: the pieces must hold the same number of entries in all.
 * Local. Cheap if the pieces are the same as before; otherwise it waits for the issued steps and cannot be captured.
 * InvalidUsage: between the halves of a step. */
ncclResult_t crossdockA2sgdSetPieces(crossdockA2sgd_t a2sgd, const crossdockA2sgdPiece_t* pieces, size_t num_pieces);

/* The halves of a step; all ranks run the same steps. RemoteError, from the first call after the wait has expired on
 * (CPUs: from that end): a rank, which the message names, did not come; the gradient is unchanged, and the object can
 * only be destroyed. InvalidUsage: begin after begin, or end without begin. */
ncclResult_t crossdockA2sgdBegin(crossdockA2sgd_t a2sgd, cudaStream_t stream);
ncclResult_t crossdockA2sgdEnd(crossdockA2sgd_t a2sgd, cudaStream_t stream);

/* What the last step saw. */
typedef struct {
    unsigned int size;          /* in: sizeof(crossdockA2sgdReport_t) */
    unsigned int magic;         /* in: NCCL_EP_MAGIC */
    uint64_t step;              /* its number, from 1; 0: no step has ended yet, and the rest is zero */
    uint64_t count;             /* entries of the gradient ... */
    uint64_t num_nonnegative;   /* ... and how many of this rank's were not negative */
    float a, b;                 /* this rank's means */
    float mean_a, mean_b;       /* those of all ranks: A and B */
    int num_nonfinite_ranks;    /* whose gradients held a NaN or an infinity, or sums beyond what the type holds */
    int nonfinite_rank;         /* the first of them; -1: none */
    int nonfinite_piece;        /* its first such piece; -1: none */
    const char* nonfinite_name; /* this rank's name for the piece of that number; NULL: none. Valid until SetPieces */
    int skipped;                /* 1: the gradients were left as they were */
} crossdockA2sgdReport_t;

#define CROSSDOCK_A2SGD_REPORT_INIT \
    { sizeof(crossdockA2sgdReport_t), NCCL_EP_MAGIC, 0, 0, 0, 0, 0, 0, 0, 0, -1, -1, NULL, 0 }

/* Local; waits for all issued steps, but not for replays of graphs. */
ncclResult_t crossdockA2sgdReport(crossdockA2sgd_t a2sgd, crossdockA2sgdReport_t* report);

/* Collective: waits until the device has done all work of this process, then at most the timeout for the other ranks.
 * NULL: nothing. */
ncclResult_t crossdockA2sgdDestroy(crossdockA2sgd_t a2sgd);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_A2SGD_H_ */
