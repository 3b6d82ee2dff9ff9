// SPDX-License-Identifier: Apache-2.0
// The second half of a step, first kernel: averages all ranks' means. One block.
#pragma once

#include "a2sgd/kernels/arguments.h"
#include "kernels/remote.h"
#include "kernels/wait.h"

namespace crossdock {
namespace {

CROSSDOCK_DEVICE bool wait_means(const Ctx& ctx, const A2sgdArgs& args, const Operation& operation, uint32_t peer,
                                 TaggedWord& word) {
    const uint64_t step = operation.epoch;
    const TaggedWord* arriving = means_word(args, args.rank, step, peer);
    if (is_remote(args.reach, peer)) {
        const bool came =
            wait_signal(ctx, args.scope, args.reach, operation, WaitStep::kMeans, Signal::kData, peer, step);
        word = ctx.load_tagged(arriving);
        // A signal follows its word, so no peer's step has sent another one.
        if (came && word_epoch(word.tag) != step)
            record_expired_wait(ctx, args.scope, operation, WaitStep::kMeans, peer, step, word_epoch(word.tag));
        return came && word_epoch(word.tag) == step;
    }
    return wait_until(
        ctx, args.scope, operation, WaitStep::kMeans, peer, step,
        [&] {
            word = ctx.load_tagged(arriving);
            return word_epoch(word.tag);
        },
        [&](uint64_t seen) { return seen == step; });
}

// One thread. Averages the means in the order of ranks, in fp64.
CROSSDOCK_DEVICE void settle_means(const Ctx& ctx, const A2sgdArgs& args, const TaggedWord* words, bool all_came) {
    A2sgdState& state = *args.state;
    state.applies = 0;
    if (!all_came) return;
    A2sgdReport report{};
    report.step = state.step;
    report.num_positive = state.sums.num_positive;
    report.nonfinite_rank = report.nonfinite_piece = -1;
    double sums[2] = {0, 0};
    CROSSDOCK_ROLLED
    for (uint32_t rank = 0; rank < args.arena.num_ranks; ++rank) {
        sums[0] += static_cast<double>(float_of(static_cast<uint32_t>(words[rank].payload)));
        sums[1] += static_cast<double>(float_of(static_cast<uint32_t>(words[rank].payload >> 32)));
        const uint64_t nonfinite = word_payload(words[rank].tag);
        if (nonfinite == 0) continue;
        if (report.num_nonfinite_ranks++ > 0) continue;
        report.nonfinite_rank = static_cast<int32_t>(rank);
        report.nonfinite_piece = static_cast<int32_t>(nonfinite) - 1;
    }
    const uint64_t own = words[args.rank].payload;
    for (uint32_t i = 0; i < 2; ++i) {
        report.own[i] = float_of(static_cast<uint32_t>(own >> (32 * i)));
        report.mean[i] = static_cast<float>(sums[i] / static_cast<double>(args.arena.num_ranks));
    }
    report.skipped = args.skips_nonfinite && report.num_nonfinite_ranks > 0 ? 1 : 0;
    state.up = report.mean[0] - report.own[0];
    state.down = report.own[1] - report.mean[1];
    state.applies = report.skipped != 0 ? 0 : 1;
    *args.report = report;
    ctx.fence_system();
}

CROSSDOCK_DEVICE void a2sgd_means(const Ctx& ctx, const A2sgdArgs& args) {
    auto* words = reinterpret_cast<TaggedWord*>(ctx.shared_memory());
    uint32_t* num_missing = reinterpret_cast<uint32_t*>(words + args.arena.num_ranks);
    if (thread_idx(ctx) == 0) *num_missing = 0;
    ctx.block_sync();
    Operation operation;
    operation.epoch = args.state->step;
    operation.start_ns = ctx.now_ns();
    CROSSDOCK_ROLLED
    for (uint32_t peer = thread_idx(ctx); peer < args.arena.num_ranks; peer += num_threads(ctx)) {
        if (has_failed(ctx, args.scope) || !wait_means(ctx, args, operation, peer, words[peer]))
            ctx.add_shared(num_missing, 1);
    }
    ctx.block_sync();
    if (thread_idx(ctx) == 0) settle_means(ctx, args, words, *num_missing == 0);
}

}  // namespace
}  // namespace crossdock
