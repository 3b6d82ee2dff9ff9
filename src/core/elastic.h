// SPDX-License-Identifier: Apache-2.0
// Reads and checks the structs of elastic operations (crossdock.h), for handles of both modes.
#pragma once

#include "core/group_config.h"
#include "core/tensor.h"
#include "crossdock.h"
#include "kernels/elastic.h"

namespace crossdock {

// The extents that an elastic operation's tensors must have.
struct ElasticSizes {
    size_t tokens;  // of this rank
    size_t topk;
    size_t ranks;
    size_t local_experts;
    size_t max_token_bytes;  // of a row with what travels beside it
    bool by_expert;
    std::optional<ncclDataType_t> id_type;  // of topk_idx, where the caller's memory is read
};

struct ElasticDispatch {
    Tensor tokens;
    Tensor out_tokens;
    ElasticDispatchArgs args;
};
// Adds the call's tensors to memory. The alignment is the caller's, 0 as 1.
ElasticDispatch read_elastic_dispatch(Communicator& communicator, const crossdockElasticDispatch_t& call,
                                      const ElasticSizes& sizes, CallMemory& memory);

struct ElasticCombine {
    Tensor tokens;
    Tensor out_tokens;
    ElasticCombineArgs args;
};
ElasticCombine read_elastic_combine(Communicator& communicator, const crossdockElasticCombine_t& call,
                                    const ElasticSizes& sizes, CallMemory& memory);

}  // namespace crossdock
