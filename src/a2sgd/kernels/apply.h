// SPDX-License-Identifier: Apache-2.0
// The second half of a step, second kernel: moves the entries.
#pragma once

#include "a2sgd/kernels/arguments.h"

namespace crossdock {
namespace {

CROSSDOCK_DEVICE void a2sgd_apply(const Ctx& ctx, const A2sgdArgs& args) {
    const A2sgdState& state = *args.state;
    if (state.applies == 0) return;
    const uint64_t warps = uint64_t{ctx.num_blocks()} * ctx.num_warps();
    const uint64_t warp = uint64_t{ctx.block_idx()} * ctx.num_warps() + ctx.warp_idx();
    CROSSDOCK_ROLLED
    for (uint64_t i = warp; i < args.num_chunks; i += warps) {
        const A2sgdChunk chunk = args.chunks[i];
        shift_by_sign(ctx, chunk.dtype, chunk.entries, chunk.count, state.up, state.down);
    }
}

}  // namespace
}  // namespace crossdock
