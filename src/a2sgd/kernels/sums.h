// SPDX-License-Identifier: Apache-2.0
// The first half of a step: computes this rank's means and sends them to all ranks. The order of sums does not depend
// on the number of blocks: a segment's chunks one after the other, segments in 256 columns, columns by halves; in fp64.
#pragma once

#include "a2sgd/kernels/arguments.h"
#include "kernels/remote.h"

namespace crossdock {
namespace {

CROSSDOCK_DEVICE A2sgdSums no_sums() { return {0, 0, 0, kAllFinite, 0}; }

CROSSDOCK_DEVICE void add_sums(A2sgdSums& sums, const A2sgdSums& more) {
    sums.positive += more.positive;
    sums.negative += more.negative;
    sums.num_positive += more.num_positive;
    if (more.nonfinite_piece < sums.nonfinite_piece) sums.nonfinite_piece = more.nonfinite_piece;
}

CROSSDOCK_DEVICE A2sgdChunk chunk_at(const A2sgdArgs& args, uint64_t chunk_idx) {
    return chunk_idx < args.num_chunks ? args.chunks[chunk_idx] : A2sgdChunk{};
}

template <typename Sum>
CROSSDOCK_DEVICE A2sgdSums chunk_sums(const Ctx& ctx, const A2sgdChunk& chunk) {
    if (chunk.count == 0) return no_sums();
    const SignSums sums = sign_sums<Sum>(ctx, chunk.dtype, chunk.entries, chunk.count);
    return {sums.positive, sums.negative, sums.num_positive, sums.is_finite() ? kAllFinite : chunk.piece, 0};
}

template <typename Sum>
CROSSDOCK_DEVICE void sum_segments(const Ctx& ctx, const A2sgdArgs& args, A2sgdSumsShared& shared) {
    const uint64_t blocks = ctx.num_blocks();
    const uint32_t warp = ctx.warp_idx();
    const uint32_t warps = ctx.num_warps();
    uint32_t turn = 0;
    A2sgdChunk next = chunk_at(args, uint64_t{ctx.block_idx()} * kChunksOfSegment + warp);
    CROSSDOCK_ROLLED
    for (uint64_t segment = ctx.block_idx(); segment < args.num_segments; segment += blocks) {
        A2sgdSums* chunks = shared.chunks[turn];
        CROSSDOCK_ROLLED
        for (uint32_t i = warp; i < kChunksOfSegment; i += warps) {
            const A2sgdChunk chunk = next;  // the address of the following one is loaded meanwhile
            const bool is_last = i + warps >= kChunksOfSegment;
            next = chunk_at(
                args, is_last ? (segment + blocks) * kChunksOfSegment + warp : segment * kChunksOfSegment + i + warps);
            const A2sgdSums sums = chunk_sums<Sum>(ctx, chunk);
            if (is_leader(ctx)) chunks[i] = sums;
        }
        ctx.block_sync();
        if (thread_idx(ctx) == 0) {
            A2sgdSums sums = chunks[0];
            for (uint32_t i = 1; i < kChunksOfSegment; ++i) add_sums(sums, chunks[i]);
            args.partials[segment] = sums;
        }
        turn = 1 - turn;  // other warps may continue while these are added up
    }
}

// Returns true in the last block to arrive, which then sees the partial sums of all blocks.
CROSSDOCK_DEVICE bool is_last_block(const Ctx& ctx, const A2sgdArgs& args, A2sgdSumsShared& shared) {
    if (thread_idx(ctx) == 0) {
        const uint32_t before = ctx.add_acq_rel_device(&args.state->blocks_done, 1);
        shared.is_last = before + 1 == ctx.num_blocks() ? 1 : 0;
    }
    ctx.block_sync();
    return shared.is_last != 0;
}

CROSSDOCK_DEVICE void add_partials(const Ctx& ctx, const A2sgdArgs& args, A2sgdSumsShared& shared) {
    const uint32_t first = thread_idx(ctx);
    const uint32_t threads = num_threads(ctx);
    CROSSDOCK_ROLLED
    for (uint32_t column = first; column < kSignColumns; column += threads) {
        constexpr uint32_t kAtOnce = 4;  // loads in flight
        A2sgdSums sums = no_sums();
        CROSSDOCK_ROLLED
        for (uint64_t first_row = column; first_row < args.num_segments; first_row += kAtOnce * kSignColumns) {
            A2sgdSums rows[kAtOnce];
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                const uint64_t row = first_row + i * kSignColumns;
                rows[i] = row < args.num_segments ? args.partials[row] : no_sums();
            }
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) add_sums(sums, rows[i]);
        }
        shared.columns[column] = sums;
    }
    CROSSDOCK_ROLLED
    for (uint32_t stride = kSignColumns / 2; stride > 0; stride /= 2) {
        ctx.block_sync();
        CROSSDOCK_ROLLED
        for (uint32_t column = first; column < stride; column += threads)
            add_sums(shared.columns[column], shared.columns[column + stride]);
    }
    ctx.block_sync();
}

CROSSDOCK_DEVICE float mean_of(double sum, uint64_t num) {
    return static_cast<float>(sum / static_cast<double>(num > 0 ? num : 1));
}

// One thread. Counts the step and computes the means to send.
CROSSDOCK_DEVICE void settle_sums(const A2sgdArgs& args, A2sgdSumsShared& shared) {
    A2sgdState& state = *args.state;
    const A2sgdSums& sums = shared.columns[0];
    state.sums = sums;
    state.blocks_done = 0;
    ++state.step;
    const uint32_t a = bits_of(mean_of(sums.positive, sums.num_positive));
    const uint32_t b = bits_of(mean_of(sums.negative, args.count - sums.num_positive));
    shared.payload = uint64_t{b} << 32 | a;
    shared.tag = pack_word(state.step, sums.nonfinite_piece == kAllFinite ? 0 : uint64_t{1} + sums.nonfinite_piece);
}

CROSSDOCK_DEVICE void send_means(const Ctx& ctx, const A2sgdArgs& args, const A2sgdSumsShared& shared) {
    const uint64_t step = word_epoch(shared.tag);
    const uint64_t offset = args.arena.word_offset(step, args.rank);
    CROSSDOCK_ROLLED
    for (uint32_t peer = thread_idx(ctx); peer < args.arena.num_ranks; peer += num_threads(ctx)) {
        if (!is_remote(args.reach, peer)) {
            ctx.store_tagged(means_word(args, peer, step, args.rank), shared.payload, shared.tag);
            continue;
        }
        put_value(ctx, args.reach, peer, offset + offsetof(TaggedWord, payload), shared.payload);
        put_value(ctx, args.reach, peer, offset + offsetof(TaggedWord, tag), shared.tag);
        raise_signal(ctx, args.reach, Signal::kData, peer, step);
    }
}

// Sum: of columns, float or double.
template <typename Sum>
CROSSDOCK_DEVICE void a2sgd_sums(const Ctx& ctx, const A2sgdArgs& args) {
    auto& shared = *reinterpret_cast<A2sgdSumsShared*>(ctx.shared_memory());
    sum_segments<Sum>(ctx, args, shared);
    if (!is_last_block(ctx, args, shared)) return;
    add_partials(ctx, args, shared);
    if (thread_idx(ctx) == 0) settle_sums(args, shared);
    ctx.block_sync();
    send_means(ctx, args, shared);
}

}  // namespace
}  // namespace crossdock
