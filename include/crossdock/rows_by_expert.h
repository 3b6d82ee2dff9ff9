/* SPDX-License-Identifier: Apache-2.0
 *
 * crossdock/rows_by_expert.h: rows by rank, each token once, as rows by expert, each token once for every choice of an
 * expert here, and back. A part of crossdock.h, which includes it.
 *
 * There are N rows by rank of K choices each, which makes N * K pairs: pair n * K + k is column k of row n. There are M
 * rows by expert. Those of an expert are its zone, in the order of their pairs: one row may be there several times.
 * Zones follow each other, each rounded up to the alignment. Pairs whose place would be M or more are dropped.
 *
 * Local, without a group. On a GPU a call is one kernel, enqueued on the stream and capturable; on the host it is done
 * when it returns. Nothing is kept.
 */
#ifndef CROSSDOCK_ROWS_BY_EXPERT_H_
#define CROSSDOCK_ROWS_BY_EXPERT_H_

#include <stdint.h>

#include "nccl_ep.h"

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* ---- Rows by expert ---- */

/* Where rows by rank have their places among rows by expert. Arrays are dense, row-major, unless strides are given;
 * these count elements. */
typedef struct {
    unsigned int size;        /* sizeof(crossdockRowPlaces_t) */
    unsigned int magic;       /* NCCL_EP_MAGIC */
    int device;               /* the GPU that all memory is on; -1: the host */
    ncclDataType_t id_type;   /* of ids: ncclInt32 or ncclInt64 */
    const void* ids;          /* in [N, K]: 0 .. L - 1; what is none, such as -1, has no place */
    uint64_t num_rows;        /* N */
    uint64_t num_expanded;    /* M */
    unsigned int num_topk;    /* K, at most 65536; N * K and M are below 2^31 */
    unsigned int num_experts; /* L, 1 .. 32768 */
    const int32_t* counts;    /* in [L]: how often each expert occurs in ids */
    unsigned int alignment;   /* of the zones, 1 .. 2^31 - 1 */
    int32_t* places;          /* out [N, K]: the row by expert of each pair, -1: none */
    int32_t* more_places;     /* out: the same again, K columns of rows that are ... */
    int64_t more_stride;      /* ... so many elements apart; or NULL */
    int32_t* sources;         /* out [M]: the pair of each row by expert; -1: none, it fills up a zone; -2: none, it is
                                 behind all zones */
} crossdockRowPlaces_t;

/* InvalidArgument: NULL where an array is needed, a number that is not allowed, a type or device that is not there. */
ncclResult_t crossdockPlaceRows(const crossdockRowPlaces_t* places, cudaStream_t stream);

/* Copies rows by rank to their places, and with each row its scales, and of every pair its weight. */
typedef struct {
    unsigned int size;                 /* sizeof(crossdockExpandedRows_t) */
    unsigned int magic;                /* NCCL_EP_MAGIC */
    int device;                        /* as above */
    int zeros_in_gaps;                 /* 1: rows that fill up zones become zeros; 0: they stay as they are */
    const int32_t* places;             /* in [N, K], as crossdockPlaceRows makes them */
    const int32_t* sources;            /* in [M], likewise; with zeros_in_gaps */
    uint64_t num_rows;                 /* N */
    uint64_t num_expanded;             /* M */
    unsigned int num_topk;             /* K, at most 65536; N * K and M are below 2^31 */
    unsigned int num_scales;           /* S */
    uint64_t row_bytes;                /* any number below 2^31 */
    const void* rows;                  /* in [N, row_bytes] */
    void* expanded_rows;               /* out [M, row_bytes] */
    const uint32_t* scales;            /* in [N, S], or NULL */
    int64_t scale_strides[2];          /* from row to row, and from column to column */
    uint32_t* expanded_scales;         /* out [M, S], with scales */
    int64_t expanded_scale_strides[2]; /* likewise */
    const float* weights;              /* in [N, K], or NULL */
    float* expanded_weights;           /* out [M], with weights */
} crossdockExpandedRows_t;

/* InvalidArgument: as above, or one of scales and expanded_scales, or of weights and expanded_weights, is NULL. */
ncclResult_t crossdockExpandRows(const crossdockExpandedRows_t* rows, cudaStream_t stream);

/* Adds bf16 rows by expert up to rows by rank: the rows of a row's pairs, in fp32, column by column from 0 on, rounded
 * at most once. A row without pairs is 0. What rows without a pair hold does not matter. */
typedef struct {
    unsigned int size;       /* sizeof(crossdockReducedRows_t) */
    unsigned int magic;      /* NCCL_EP_MAGIC */
    int device;              /* as above */
    ncclDataType_t sum_type; /* ncclFloat32 or ncclBfloat16 */
    const int32_t* places;   /* in [N, K], as crossdockPlaceRows makes them */
    uint64_t num_rows;       /* N */
    uint64_t num_expanded;   /* M */
    unsigned int num_topk;   /* K, at most 65536; N * K and M are below 2^31 */
    unsigned int hidden;     /* H, below 2^30 */
    const void* rows;        /* in [M, H] bf16 */
    void* sums;              /* out [N, H] */
    const float* weights;    /* in [M], or NULL */
    float* pair_weights;     /* out [N, K], with weights: that of each pair, 0 where it has no place */
} crossdockReducedRows_t;

/* InvalidArgument: as above, or one of weights and pair_weights is NULL. */
ncclResult_t crossdockReduceRows(const crossdockReducedRows_t* rows, cudaStream_t stream);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_ROWS_BY_EXPERT_H_ */
