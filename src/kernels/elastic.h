// SPDX-License-Identifier: Apache-2.0
// What kernels of both modes receive for an elastic dispatch or combine (crossdock.h), beside their own arguments.
#pragma once

#include "device/context.h"

namespace crossdock {

// A row's scales: where element (row, column) of 4 bytes lies.
struct ElasticScales {
    std::byte* data;
    int64_t strides[2];  // in elements

    CROSSDOCK_HOST_DEVICE uint32_t* at(uint64_t row, uint32_t column) const {
        return reinterpret_cast<uint32_t*>(data) + static_cast<int64_t>(row) * strides[0] +
               static_cast<int64_t>(column) * strides[1];
    }
};

// Pointers are device memory; null: not asked for.
struct ElasticDispatchArgs {
    uint32_t rows;         // of the outputs by row; none is written beyond
    uint32_t source_rows;  // of `sources`
    uint32_t alignment;    // 1 and more
    uint32_t origin_stride;
    uint32_t num_scales;  // of 4 bytes, of a row
    bool ids_are_64_bit;  // out_topk_idx
    bool zero_padding;
    bool own_weights_only;
    bool with_weights;
    ElasticScales scales;  // this rank's tokens'
    ElasticScales out_scales;
    const float* topk_weights;  // [tokens][topk]
    void* out_topk_idx;         // by rank: [rows][topk]
    float* out_weights;         // by rank: [rows][topk]; by expert: [rows]
    int32_t* sources;           // [source rows][topk + 2]
    int32_t* rank_ends;         // [ranks]
    int32_t* expert_counts;     // [local experts]
    int32_t* expert_ends;       // [local experts]
    int32_t* statistics;        // [local experts]
    void* topk_idx_copy;        // [tokens][topk] of the type of topk_idx; LL
};

struct ElasticCombineArgs {
    uint32_t rows;  // of the tensor of rows
    bool with_weights;
    const float* weights;      // by rank: [rows][topk]; by expert: [rows]
    float* out_weights;        // [tokens][topk]
    const std::byte* bias[2];  // [tokens][row_bytes]
};

}  // namespace crossdock
