// SPDX-License-Identifier: Apache-2.0
// Dispatch, send half: every token goes once to each rank that hosts one of its experts, into this source's own slots
// there.
#pragma once

#include "device/row_stage.h"
#include "kernels/ll/operation.h"

namespace crossdock {

// A block's shared memory: one description for the launch and the kernel. Offsets in bytes.
struct LlDispatchShared {
    uint32_t expert_counts;  // i32 [experts]: send: tokens counted so far; receive: rows of each (source, local
                             // expert), then first rows
    uint32_t rank_counts;    // i32 [ranks + 1]: send: rows counted so far; receive: rows_before
    uint32_t plans;          // [warps][3 * topk] i32
    uint32_t stages;         // [warps][stage_bytes]
    uint32_t stage_bytes;
    uint32_t tail;  // in a stage's data, behind a full chunk: scales and header
    uint32_t bytes;

    CROSSDOCK_HOST_DEVICE static constexpr LlDispatchShared of(const LlDispatchArgs& args) {
        const LlCommon& c = args.common;
        LlDispatchShared shared{};
        uint64_t at = 128;
        shared.expert_counts = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * c.arena.num_experts, 16);
        shared.rank_counts = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * (c.arena.num_ranks + 1), 16);
        shared.plans = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{12} * c.topk * c.warps_per_block, 128);
        shared.stages = static_cast<uint32_t>(at);
        shared.tail = c.chunk_bytes;
        shared.stage_bytes = static_cast<uint32_t>(
            align_up(uint64_t{128} + c.chunk_bytes + align_up(args.scale_bytes, 16) + row_header_bytes(c.topk), 128));
        shared.bytes = static_cast<uint32_t>(at + uint64_t{shared.stage_bytes} * c.warps_per_block);
        return shared;
    }
};

inline namespace CROSSDOCK_WORLD {

// Where one token's choices go.
struct TokenPlan {
    int32_t* expert_ids;  // -1: dropped
    int32_t* positions;   // among this source's rows for that expert
    int32_t* slots;       // at the expert's rank, at the first choice of each rank; -1 elsewhere
};

CROSSDOCK_DEVICE TokenPlan plan_of_warp(const Ctx& ctx, const LlDispatchArgs& args, const LlDispatchShared& shared,
                                        int warp) {
    int32_t* plan = reinterpret_cast<int32_t*>(ctx.shared_memory() + shared.plans) +
                    3 * args.common.topk * static_cast<uint32_t>(warp);
    return {plan, plan + args.common.topk, plan + 2 * args.common.topk};
}

// No earlier choice of the token goes to that rank.
CROSSDOCK_DEVICE bool is_first_of_rank(const LlCommon& c, const int32_t* expert_ids, uint32_t k) {
    const int rank = rank_of_expert(c, expert_ids[k]);
    if (rank < 0) return false;
    for (uint32_t i = 0; i < k; ++i) {
        if (rank_of_expert(c, expert_ids[i]) == rank) return false;
    }
    return true;
}

// Counts, over tokens [0, end), the choices of each expert and the rows of each rank.
CROSSDOCK_DEVICE void count_tokens(const Ctx& ctx, const LlCommon& c, uint32_t end, int* expert_counts,
                                   int* rank_counts) {
    for (uint32_t i = static_cast<uint32_t>(thread_idx(ctx)); i < c.arena.num_experts;
         i += static_cast<uint32_t>(num_threads(ctx))) {
        expert_counts[i] = 0;
    }
    for (uint32_t i = static_cast<uint32_t>(thread_idx(ctx)); i < c.arena.num_ranks;
         i += static_cast<uint32_t>(num_threads(ctx))) {
        rank_counts[i] = 0;
    }
    ctx.block_sync();
    for (uint32_t token = static_cast<uint32_t>(thread_idx(ctx)); token < end;
         token += static_cast<uint32_t>(num_threads(ctx))) {
        int32_t ids[kMaxTopk];
        for (uint32_t k = 0; k < c.topk; ++k) {
            ids[k] = expert_id(c, token, k);
            if (ids[k] >= 0) ctx.add_shared(expert_counts + ids[k], 1);
            if (is_first_of_rank(c, ids, k)) ctx.add_shared(rank_counts + rank_of_expert(c, ids[k]), 1);
        }
    }
    ctx.block_sync();
}

// Tells every peer how many rows, and how many choices of each of its experts, this source sends it; ahead of the rows,
// so that the receiver knows every row's final place before the first one lands. A word carries its epoch: no order
// among them is needed. The entry word is stored with release: whoever sees it may write over outputs that this rank
// has read until now.
CROSSDOCK_DEVICE void announce_counts(const Ctx& ctx, const LlDispatchArgs& args, const Operation& operation,
                                      const int* expert_counts, const int* rank_counts) {
    const LlCommon& c = args.common;
    const uint32_t experts_per_rank = c.arena.experts_per_rank();
    for (int peer = ctx.warp_idx(); peer < static_cast<int>(c.arena.num_ranks); peer += ctx.num_warps()) {
        const uint32_t has_credit =
            ctx.warp_broadcast(is_leader(ctx) && wait_credit(ctx, c, operation, peer) ? 1u : 0u);
        if (has_credit == 0) continue;
        uint64_t* words = count_words(c, peer, operation.buffer, c.rank);
        if (is_leader(ctx)) {
            if (!c.expert_major) {
                ctx.store_release_system(entry_word(c, peer, operation.buffer, c.rank),
                                         pack_word(operation.epoch, args.direct));
            }
            ctx.store_relaxed_system(words, pack_word(operation.epoch, static_cast<uint64_t>(rank_counts[peer])));
        }
        if (!c.expert_major) continue;
        for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < experts_per_rank; i += kLanes) {
            const int count = expert_counts[static_cast<uint32_t>(peer) * experts_per_rank + i];
            ctx.store_relaxed_system(words + 1 + i, pack_word(operation.epoch, static_cast<uint64_t>(count)));
        }
    }
}

// One warp. Advances the counts past the token.
CROSSDOCK_DEVICE void plan_token(const Ctx& ctx, const LlCommon& c, uint32_t token, const TokenPlan& plan,
                                 int* expert_counts, int* rank_counts) {
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes)
        plan.expert_ids[k] = expert_id(c, token, k);
    ctx.warp_sync();
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
        const int32_t id = plan.expert_ids[k];
        int32_t position = id < 0 ? 0 : expert_counts[id];
        for (uint32_t i = 0; i < k; ++i) position += id >= 0 && plan.expert_ids[i] == id ? 1 : 0;
        plan.positions[k] = position;
        plan.slots[k] = is_first_of_rank(c, plan.expert_ids, k) ? rank_counts[rank_of_expert(c, id)] : -1;
    }
    ctx.warp_sync();
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
        if (plan.expert_ids[k] >= 0) ctx.add_shared(expert_counts + plan.expert_ids[k], 1);
        if (plan.slots[k] >= 0) ctx.add_shared(rank_counts + rank_of_expert(c, plan.expert_ids[k]), 1);
    }
    ctx.warp_sync();
}

// Quantises elements [first, first + num) of a bf16 row to e4m3, one fp32 scale a block of 128, into the stage.
CROSSDOCK_DEVICE void quantise_fp8(const Ctx& ctx, const std::byte* row, uint32_t first, uint32_t num,
                                   bool round_scales, std::byte* target, float* scales) {
    constexpr uint32_t kPerLane = kFp8Block / kLanes;
    for (uint32_t block = 0; block < num / kFp8Block; ++block) {
        const uint32_t lane_first = block * kFp8Block + static_cast<uint32_t>(ctx.lane()) * kPerLane;
        float values[kPerLane];
        float largest = 1e-4f;
        for (uint32_t i = 0; i < kPerLane; ++i) {
            values[i] = load_element<DType::kBf16>(row, first + lane_first + i);
            largest = larger(largest, absolute(values[i]));
        }
        largest = ctx.warp_max(largest);
        float scale = largest / 448.0f;
        float multiplier = 448.0f / largest;
        if (round_scales) {
            // The next power of two: the exponent, and one more if there is any mantissa.
            const uint32_t exponent = (bits_of(scale) >> 23) + ((bits_of(scale) & 0x7FFFFFu) != 0 ? 1u : 0u);
            scale = float_of(exponent << 23);
            multiplier = 1.0f / scale;
        }
        for (uint32_t i = 0; i < kPerLane; ++i) {
            target[lane_first + i] = static_cast<std::byte>(float_to_e4m3(values[i] * multiplier));
        }
        if (is_leader(ctx)) scales[(first / kFp8Block) + block] = scale;
    }
}

// Scales and header follow the row's last chunk, in the stage as on the wire. FP8 scales were put there by
// quantise_fp8.
CROSSDOCK_DEVICE void fill_tail(const Ctx& ctx, const LlDispatchArgs& args, uint32_t token, const TokenPlan& plan,
                                uint32_t direct, std::byte* tail) {
    const LlCommon& c = args.common;
    if (args.recipe == LlRecipe::kBytes && args.scale_bytes > 0) {
        copy_words(ctx, tail, args.scales + uint64_t{token} * args.scale_bytes, args.scale_bytes);
    }
    RowHeader* header = reinterpret_cast<RowHeader*>(tail + align_up(args.scale_bytes, 16));
    int32_t* ids = reinterpret_cast<int32_t*>(header + 1);
    if (is_leader(ctx)) *header = {token, direct, {0, 0}};
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
        ids[k] = plan.expert_ids[k];
        if (c.expert_major) {
            ids[c.topk + k] = plan.positions[k];
        } else {
            reinterpret_cast<float*>(ids)[c.topk + k] = args.topk_weights[uint64_t{token} * c.topk + k];
        }
    }
}

// What peers allow to be written straight into their tensors: known when they have entered this operation, which also
// says that they are done with the previous contents.
CROSSDOCK_DEVICE uint32_t wait_direct(const Ctx& ctx, const LlDispatchArgs& args, const Operation& operation,
                                      int peer) {
    if (args.direct == 0) return 0;
    uint64_t allowed = 0;
    const LlCommon& c = args.common;
    wait_word(ctx, c, operation, WaitStep::kEntry, peer, entry_word(c, c.rank, operation.buffer, peer), allowed);
    return args.direct & static_cast<uint32_t>(allowed);
}

// One warp sends one token to all its ranks.
CROSSDOCK_DEVICE void send_token(const Ctx& ctx, const LlDispatchArgs& args, const LlDispatchShared& shared,
                                 const Operation& operation, RowStage& stage, uint32_t token, const TokenPlan& plan) {
    const LlCommon& c = args.common;
    const uint32_t tail_bytes = static_cast<uint32_t>(align_up(args.scale_bytes, 16)) + row_header_bytes(c.topk);
    const std::byte* source = args.tokens + uint64_t{token} * args.source_row_bytes;

    uint32_t first = 0;
    do {
        const uint32_t left = args.row_bytes - first;
        const uint32_t chunk = left < c.chunk_bytes ? left : c.chunk_bytes;
        const bool is_last = first + chunk == args.row_bytes;
        std::byte* tail = stage.fill() + shared.tail;
        if (args.recipe == LlRecipe::kBytes) {
            stage.load(ctx, source + first, chunk);
        } else {
            quantise_fp8(ctx, source, first, chunk, args.round_scales, stage.fill(), reinterpret_cast<float*>(tail));
        }
        if (is_last) fill_tail(ctx, args, token, plan, args.direct, tail);
        stage.filled(ctx);
        if (args.recipe == LlRecipe::kBytes) stage.wait_loaded(ctx);
        if (is_leader(ctx)) {
            for (uint32_t k = 0; k < c.topk; ++k) {
                if (plan.slots[k] < 0) continue;
                const int peer = rank_of_expert(c, plan.expert_ids[k]);
                const uint64_t slot =
                    static_cast<uint64_t>(c.rank) * c.arena.max_tokens + static_cast<uint32_t>(plan.slots[k]);
                if (first == 0) {
                    if (!wait_credit(ctx, c, operation, peer)) {
                        plan.slots[k] = -1;  // lost: nothing is sent
                        continue;
                    }
                    ctx.note_slot_written(c.rank, peer, c.peers.at(peer, 0), operation.buffer, slot, operation.epoch);
                }
                std::byte* target = slot_of(c, peer, operation.buffer, slot);
                const uint32_t direct = wait_direct(ctx, args, operation, peer);
                if ((direct & kDirectTokens) != 0) {
                    stage.store(ctx, args.token_windows.at(peer, slot * args.row_bytes + first), 0, chunk);
                    if (is_last) stage.store(ctx, target + args.row_bytes, shared.tail, tail_bytes);
                } else if (is_last && chunk == shared.tail) {
                    stage.store(ctx, target + first, 0, chunk + tail_bytes);  // one piece, on the wire as in the stage
                } else {
                    stage.store(ctx, target + first, 0, chunk);
                    if (is_last) stage.store(ctx, target + args.row_bytes, shared.tail, tail_bytes);
                }
                if (is_last && (direct & kDirectScales) != 0) {
                    stage.store(ctx, args.scale_windows.at(peer, slot * args.scale_bytes), shared.tail,
                                args.scale_bytes);
                }
                if (is_last) stage.end_group(ctx);
            }
            if (!is_last) stage.end_group(ctx);
        }
        first += chunk;
        if (!is_last) stage.wait_reusable(ctx);
    } while (first < args.row_bytes);

    if (is_leader(ctx)) {
        int unflagged = 0;
        for (uint32_t k = 0; k < c.topk; ++k) unflagged += plan.slots[k] >= 0 ? 1 : 0;
        for (uint32_t k = 0; k < c.topk; ++k) {
            if (plan.slots[k] < 0) continue;
            stage.wait_stores(ctx, --unflagged);
            ctx.fence_async_copies();
            const uint64_t slot =
                static_cast<uint64_t>(c.rank) * c.arena.max_tokens + static_cast<uint32_t>(plan.slots[k]);
            ctx.store_release_system(row_flag(c, rank_of_expert(c, plan.expert_ids[k]), operation.buffer, slot),
                                     pack_word(operation.epoch, 0));
        }
    }
    stage.wait_reusable(ctx);
}

// Blocks share the tokens in contiguous runs; the last block announces the counts and sends nothing unless it is alone.
CROSSDOCK_DEVICE void send_tokens(const Ctx& ctx, const LlDispatchArgs& args, const LlDispatchShared& shared,
                                  const Operation& operation, RowStage& stage) {
    const LlCommon& c = args.common;
    int* expert_counts = reinterpret_cast<int*>(ctx.shared_memory() + shared.expert_counts);
    int* rank_counts = reinterpret_cast<int*>(ctx.shared_memory() + shared.rank_counts);

    if (ctx.block_idx() == ctx.num_blocks() - 1) {
        count_tokens(ctx, c, c.num_tokens, expert_counts, rank_counts);
        announce_counts(ctx, args, operation, expert_counts, rank_counts);
        ctx.block_sync();
        if (ctx.num_blocks() > 1) return;
    }
    const uint64_t senders = static_cast<uint64_t>(ctx.num_blocks() > 1 ? ctx.num_blocks() - 1 : 1);
    const uint64_t sender = static_cast<uint64_t>(ctx.block_idx());
    const uint32_t begin = static_cast<uint32_t>(c.num_tokens * sender / senders);
    const uint32_t end = static_cast<uint32_t>(c.num_tokens * (sender + 1) / senders);
    if (begin == end) return;

    count_tokens(ctx, c, begin, expert_counts, rank_counts);
    const uint32_t warps = static_cast<uint32_t>(ctx.num_warps());
    for (uint32_t first = begin; first < end; first += warps) {
        if (ctx.warp_idx() == 0) {
            for (uint32_t i = 0; i < warps && first + i < end; ++i) {
                plan_token(ctx, c, first + i, plan_of_warp(ctx, args, shared, static_cast<int>(i)), expert_counts,
                           rank_counts);
            }
        }
        ctx.block_sync();
        const uint32_t token = first + static_cast<uint32_t>(ctx.warp_idx());
        if (token < end) {
            send_token(ctx, args, shared, operation, stage, token, plan_of_warp(ctx, args, shared, ctx.warp_idx()));
        }
        ctx.block_sync();
    }
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
