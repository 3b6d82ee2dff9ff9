// SPDX-License-Identifier: Apache-2.0
// Finds where the rows of an LL dispatch came from, using what it left in its handle (crossdockHandleSources). No
// operation depends on it. One block.
#pragma once

#include "kernels/ll/peers.h"

namespace crossdock {

struct LlSourcesArgs {
    LlCommon common;
    int32_t* tokens;  // [local experts][ranks * max tokens]; places without a row are not written
    int64_t* ranges;  // [local experts][ranks]
};

namespace {

// One lane. Writes the tokens of the rows of one expert from one source, and returns their number.
CROSSDOCK_DEVICE int64_t name_tokens(const LlSourcesArgs& args, uint32_t expert, int source) {
    const LlCommon& c = args.common;
    int64_t num = 0;
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < received_from(c, source)->rows; ++i) {
        const RowRecord* record = row_record(c, source, i);
        const int32_t* rows = reinterpret_cast<const int32_t*>(record + 1);
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < c.topk; ++k) {
            if (rows[k] < 0 || static_cast<uint32_t>(rows[k]) / c.offsets.num_slots != expert) continue;
            args.tokens[rows[k]] = static_cast<int32_t>(record->token_idx);
            ++num;
        }
    }
    return num;
}

CROSSDOCK_DEVICE void ll_sources(const Ctx& ctx, const LlSourcesArgs& args) {
    ctx.wait_for_previous_kernels();
    const uint32_t experts = args.common.offsets.experts_per_rank;
    const uint32_t num_ranks = args.common.arena.num_ranks;
    const uint32_t thread = thread_idx(ctx);
    const uint32_t threads = num_threads(ctx);
    CROSSDOCK_ROLLED
    for (uint32_t i = thread; i < experts * num_ranks; i += threads)
        args.ranges[i] = name_tokens(args, i / num_ranks, i % num_ranks);
    ctx.block_sync();
    CROSSDOCK_ROLLED
    for (uint32_t expert = thread; expert < experts; expert += threads) {
        int64_t first = 0;
        CROSSDOCK_ROLLED
        for (uint32_t source = 0; source < num_ranks; ++source) {
            int64_t* range = args.ranges + expert * num_ranks + source;
            const int64_t num = *range;
            *range = first << 32 | num;
            first += num;
        }
    }
}

}  // namespace
}  // namespace crossdock
