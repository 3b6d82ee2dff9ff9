// SPDX-License-Identifier: Apache-2.0
// Dispatch, send half: every token goes once to each rank that hosts one of its experts, into this source's own slots
// there.
#pragma once

#include "kernels/ll/dispatch_plan.h"
#include "kernels/ll/far.h"
#include "kernels/ll/line_rows.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

// A row and its scales, one after the other, are what lines carry.
CROSSDOCK_DEVICE uint32_t line_row_bytes(const auto& args) {
    return args.row_bytes + static_cast<uint32_t>(align_up(args.scale_bytes, 16));
}

// Tells every peer how many rows, and how many choices of each of its experts, this source sends it; ahead of the rows,
// so that the receiver knows every row's final place before the first one lands. A word carries its epoch: no order
// among them is needed.
CROSSDOCK_DEVICE void announce_counts(const Ctx& ctx, const auto& c, const Operation& operation,
                                      const RoutingCounts& counts) {
    const uint32_t experts = c.offsets.experts_per_rank;
    const uint64_t form = sends_in_lines(c) ? kLineRows : 0;
    CROSSDOCK_ROLLED
    for (int peer = ctx.warp_idx(); peer < static_cast<int>(c.arena.num_ranks); peer += ctx.num_warps()) {
        if (ctx.warp_broadcast(is_leader(ctx) && wait_credit(ctx, c, operation, peer) ? 1u : 0u) == 0) continue;
        uint64_t* words = is_remote(c.reach, peer) ? reinterpret_cast<uint64_t*>(in_outbox(c, outbox_counts(c, peer)))
                                                   : count_words(c, operation, peer, c.rank);
        CROSSDOCK_ROLLED
        for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i <= (c.expert_major ? experts : 0); i += kLanes) {
            const uint64_t count =
                i == 0 ? form | static_cast<uint64_t>(counts.ranks[peer])
                       : static_cast<uint64_t>(counts.experts[static_cast<uint32_t>(peer) * experts + i - 1]);
            ctx.store_relaxed_system(words + i, pack_word(operation.epoch, count));
        }
    }
}

// One block of 128 bf16 elements as e4m3 with one fp32 scale. One warp; a lane has its share of the elements.
inline constexpr uint32_t kFp8PerLane = kFp8Block / kLanes;
static_assert(kFp8PerLane * kLanes == kFp8Block, "a block's elements are the lanes' shares");

CROSSDOCK_DEVICE void quantise_fp8_block(const Ctx& ctx, const float (&values)[kFp8PerLane], bool round_scales,
                                         std::byte* target, float* scale_target) {
    float largest = 1e-4f;
    for (uint32_t i = 0; i < kFp8PerLane; ++i) largest = larger(largest, absolute(values[i]));
    largest = ctx.warp_max(largest);
    float scale = largest * (1.0f / 448.0f);  // not divided: the same bits as DeepEP's
    float multiplier = 448.0f / largest;
    if (round_scales) {
        // The next power of two: the exponent, and one more if there is any mantissa.
        const uint32_t exponent = (bits_of(scale) >> 23) + ((bits_of(scale) & 0x7FFFFFu) != 0 ? 1u : 0u);
        scale = float_of(exponent << 23);
        multiplier = 1.0f / scale;
    }
    store_e4m3(values, multiplier, target + static_cast<uint32_t>(ctx.lane()) * kFp8PerLane);
    if (is_leader(ctx)) *scale_target = scale;
}

// A run of tokens [first, first + num) on its way out, one in each stage, and which part of their rows.
struct Batch {
    uint32_t first;
    uint32_t num;
    uint32_t round;      // counts the loads of each stage
    uint32_t row_first;  // bytes [row_first, row_first + chunk) of the rows
    uint32_t chunk;
    bool is_last_chunk;
};

CROSSDOCK_DEVICE Batch batch_of(const auto& args, uint32_t first, uint32_t end, uint32_t round, uint32_t row_first) {
    const auto& c = args.common;
    if (args.kOneBatch) return {first, end - first, 0, 0, args.row_bytes, true};
    const uint32_t left = args.row_bytes - row_first;
    const uint32_t chunk = left < c.crew.chunk_bytes ? left : c.crew.chunk_bytes;
    return {first,        end - first < c.crew.num_stages ? end - first : c.crew.num_stages, round, row_first, chunk,
            chunk == left};
}

// Begins to bring the rows into the stages.
CROSSDOCK_DEVICE void load_batch(const Ctx& ctx, const auto& args, const LlDispatchShared& shared, const Batch& batch) {
    if (args.recipe != LlRecipe::kBytes || !has_duty(ctx, 0)) return;
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < batch.num; ++i) {
        const RowStage stage = stage_of(ctx, shared, i);
        const std::byte* row = args.tokens + uint64_t{batch.first + i} * args.source_row_bytes;
        if (is_leader(ctx)) stage.load(ctx, row + batch.row_first, batch.chunk);
        if (batch.is_last_chunk && args.scale_bytes > 0) {
            copy_words(ctx, stage.data() + shared.tail, args.scales + uint64_t{batch.first + i} * args.scale_bytes,
                       args.scale_bytes);
            stage.filled();
        }
    }
    stage_of(ctx, shared, 0).loaded_for_block(ctx);
}

CROSSDOCK_DEVICE void quantise_batch(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                     const Batch& batch) {
    if (args.recipe != LlRecipe::kFp8) return;
    constexpr uint32_t kBlocksAtOnce = 8;  // under way together
    const uint32_t blocks = batch.chunk / kFp8Block;
    const uint32_t warps = static_cast<uint32_t>(ctx.num_warps());
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < batch.num; ++i) {
        const std::byte* row = args.tokens + uint64_t{batch.first + i} * args.source_row_bytes;
        const RowStage stage = stage_of(ctx, shared, i);
        float* scales = reinterpret_cast<float*>(stage.data() + shared.tail) + batch.row_first / kFp8Block;
        CROSSDOCK_ROLLED
        for (uint32_t first = static_cast<uint32_t>(ctx.warp_idx()); first < blocks; first += kBlocksAtOnce * warps) {
            float values[kBlocksAtOnce][kFp8PerLane];
            CROSSDOCK_UNROLL
            for (uint32_t j = 0; j < kBlocksAtOnce; ++j) {
                const uint32_t block = first + j * warps < blocks ? first + j * warps : first;
                load_elements<DType::kBf16>(
                    row, batch.row_first + block * kFp8Block + static_cast<uint32_t>(ctx.lane()) * kFp8PerLane,
                    values[j]);
            }
            CROSSDOCK_UNROLL
            for (uint32_t j = 0; j < kBlocksAtOnce; ++j) {
                const uint32_t block = first + j * warps;
                if (block >= blocks) break;
                quantise_fp8_block(ctx, values[j], args.round_scales, stage.data() + block * kFp8Block, scales + block);
            }
        }
    }
    stage_of(ctx, shared, 0).filled();
}

// What peers allow to be written straight into their tensors: known when they have entered this operation, which also
// says that they are done with the previous contents. Who allows the same parts has them at the same offsets
// (WindowTerm).
CROSSDOCK_DEVICE uint32_t wait_direct(const Ctx& ctx, const auto& args, const Operation& operation, int peer) {
    if (args.direct == 0 || peer == args.common.rank) return args.direct;
    TaggedWord entry{};
    const bool allows = wait_entry(ctx, args.common, operation, peer, entry) && is_of(entry, operation);
    return allows && Entry::parts(entry) == args.direct ? args.direct : 0;
}

// A token and one of its ranks.
struct Trip {
    uint32_t token;
    uint32_t stage;
    uint32_t target;
    int peer;
    uint32_t slot_of_source;
    uint64_t slot;
    std::byte* row;  // null: the peer is lost
};

CROSSDOCK_DEVICE Trip trip_of(const auto& c, const Batch& batch, const TokenPlan& plan, uint32_t stage,
                              uint32_t target) {
    const uint32_t slot = static_cast<uint32_t>(plan.slots[target]);
    return {batch.first + stage, stage, target, plan.ranks[plan.choices[target]], slot, slot_of(c, c.rank, slot),
            plan.rows[target]};
}

// A batch's trips, one after the other.
CROSSDOCK_DEVICE bool find_trip(const Ctx& ctx, const auto& args, const LlDispatchShared& shared, const Batch& batch,
                                uint32_t number, Trip& trip) {
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < batch.num; ++i) {
        const TokenPlan plan = token_plan(ctx, args, shared, i);
        const uint32_t targets = static_cast<uint32_t>(*plan.num_targets);
        if (number < targets) {
            trip = trip_of(args.common, batch, plan, i, number);
            return true;
        }
        number -= targets;
    }
    return false;
}

CROSSDOCK_DEVICE void note_slot_sent(const Ctx& ctx, const auto& c, const Operation& operation, const Trip& trip) {
    ctx.note_slot_written(c.rank, trip.peer, arena_of(c, trip.peer), operation.buffer, trip.slot, operation.epoch);
}

// Which token a row is and where its choices go. One warp.
CROSSDOCK_DEVICE void send_header(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                  const Operation& operation, const Trip& trip, uint32_t direct) {
    const auto& c = args.common;
    const TokenPlan plan = token_plan(ctx, args, shared, trip.stage);
    TaggedWord* words =
        is_remote(c.reach, trip.peer)
            ? reinterpret_cast<TaggedWord*>(in_outbox(c, outbox_header(c, trip.peer, trip.slot_of_source)))
            : header_words(c, operation, trip.peer, static_cast<uint32_t>(trip.slot));
    const uint64_t tag = pack_word(operation.epoch, 0);
    const uint32_t first_choice = !c.expert_major ? 0 : choices_before(ctx, args, shared, trip.stage, trip.peer);
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i <= c.topk; i += kLanes) {
        uint64_t payload = 0;
        if (i == 0) {
            payload = RowLabel{trip.token, trip.target, direct, first_choice}.payload();
        } else {
            const uint32_t k = i - 1;
            payload = uint64_t{plan.extras[k]} << 32 | static_cast<uint32_t>(plan.expert_ids[k]);
        }
        ctx.store_tagged(words + i, payload, tag);
    }
}

// The plain form of a chunk, by one thread.
CROSSDOCK_DEVICE void store_chunk(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                  const Operation& operation, const Batch& batch, const Trip& trip) {
    const RowStage stage = stage_of(ctx, shared, trip.stage);
    const uint32_t scale_area = static_cast<uint32_t>(align_up(args.scale_bytes, 16));
    const uint32_t direct = wait_direct(ctx, args, operation, trip.peer);
    const bool sends_scales = batch.is_last_chunk && args.scale_bytes > 0;
    if ((direct & kDirectTokens) != 0) {
        stage.store(ctx, args.token_windows.at(trip.peer, trip.slot * args.row_bytes + batch.row_first), 0,
                    batch.chunk);
    } else if (sends_scales && direct == 0 && batch.chunk == shared.tail) {
        stage.store(ctx, trip.row + batch.row_first, 0, batch.chunk + scale_area);  // one piece, as in the stage
    } else {
        stage.store(ctx, trip.row + batch.row_first, 0, batch.chunk);
    }
    if (sends_scales && (direct & kDirectScales) != 0) {
        stage.store(ctx, args.scale_windows.at(trip.peer, trip.slot * args.scale_bytes), shared.tail, args.scale_bytes);
    } else if (sends_scales && (direct != 0 || batch.chunk != shared.tail)) {
        stage.store(ctx, trip.row + args.row_bytes, shared.tail, scale_area);
    }
    stage.end_group(ctx);
    ctx.mark(Step::kDispatchStored);
}

// What a token's way to one rank is in bytes: row, scales, header.
CROSSDOCK_DEVICE uint64_t bytes_of_trip(const auto& args) {
    return uint64_t{line_row_bytes(args)} + args.common.offsets.header_stride;
}

// A chunk of a row into the outbox. Leader only.
CROSSDOCK_DEVICE void store_in_outbox(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                      const Batch& batch, uint32_t stage_idx) {
    const auto& c = args.common;
    const RowStage stage = stage_of(ctx, shared, stage_idx);
    std::byte* row = in_outbox(c, outbox_row(c, batch.first + stage_idx));
    stage.store(ctx, row + batch.row_first, 0, batch.chunk);
    if (batch.is_last_chunk && args.scale_bytes > 0) {
        stage.store(ctx, row + args.row_bytes, shared.tail, static_cast<uint32_t>(align_up(args.scale_bytes, 16)));
    }
    stage.end_group(ctx);
}

// A token's row for other domains goes into the outbox once, and from there into its slot at each of its ranks
// elsewhere.
CROSSDOCK_DEVICE void put_row(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                              const Operation& operation, const Batch& batch, const TokenPlan& plan, uint32_t stage) {
    if constexpr (!kHasGinPeers) return;
    const auto& c = args.common;
    const uint32_t targets = static_cast<uint32_t>(*plan.num_targets);
    bool is_stored = false;
    CROSSDOCK_ROLLED
    for (uint32_t target = 0; target < targets; ++target) {
        const Trip trip = trip_of(c, batch, plan, stage, target);
        if (trip.row == nullptr || !is_remote(c.reach, trip.peer)) continue;
        if (batch.row_first == 0) send_header(ctx, args, shared, operation, trip, 0);
        if (!is_leader(ctx)) continue;
        if (batch.row_first == 0) note_slot_sent(ctx, c, operation, trip);
        if (!is_stored) store_in_outbox(ctx, args, shared, batch, stage);
        if (!is_stored && batch.is_last_chunk) {
            RowStage::wait_stores(ctx);
            ctx.fence_landed();
        }
        is_stored = true;
        if (!batch.is_last_chunk) continue;
        put(ctx, c.reach, trip.peer, offset_of_row(c, operation, static_cast<uint32_t>(trip.slot)),
            outbox_row(c, trip.token), line_row_bytes(args));
        count_rows(ctx, c.reach, trip.peer, 1, 0);
    }
    ctx.warp_sync();
}

// Behind the rows: headers and counts, and the signal. Without rows the first count is all there is to say.
CROSSDOCK_DEVICE void finish_puts(const Ctx& ctx, const auto& args, const Operation& operation) {
    const auto& c = args.common;
    tell_far_peers(ctx, c, operation, [&](int peer) {
        const uint64_t counts = outbox_counts(c, peer);
        const uint64_t first = *reinterpret_cast<const uint64_t*>(in_outbox(c, counts));
        const uint32_t rows = static_cast<uint32_t>(word_payload(first) % kLineRows);
        // This rank's own number, but from memory that others may write.
        if (!expect_number(ctx, c, operation, PeerNumber::kRows, c.rank, c.arena.max_tokens, rows)) return;
        if (rows > 0) {
            put(ctx, c.reach, peer, offset_of_header(c, operation, slot_of(c, c.rank, 0)), outbox_header(c, peer, 0),
                uint64_t{rows} * c.offsets.header_stride);
        }
        const Raise data = raise_of(c.reach, Signal::kData, peer, operation.epoch);
        if (rows > 0 && c.expert_major) {
            put_and_raise(ctx, c.reach, peer, offset_of_counts(c, operation, c.rank), counts, c.offsets.count_stride,
                          data);
        } else {
            put_value_and_raise(ctx, c.reach, peer, offset_of_counts(c, operation, c.rank), first, data);
        }
    });
}

// A token's headers go ahead of its row: while that comes into its stage, and so that its flags, behind all that a warp
// has stored, need not wait for them. By a warp.
CROSSDOCK_DEVICE void send_headers(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                   const Operation& operation, const Batch& batch, const TokenPlan& plan,
                                   uint32_t stage) {
    const auto& c = args.common;
    const uint32_t targets = static_cast<uint32_t>(*plan.num_targets);
    CROSSDOCK_ROLLED
    for (uint32_t target = 0; target < targets; ++target) {
        const Trip trip = trip_of(c, batch, plan, stage, target);
        if (trip.row == nullptr || is_remote(c.reach, trip.peer)) continue;
        if (is_leader(ctx)) note_slot_sent(ctx, c, operation, trip);
        if (is_leader(ctx)) count_rows(ctx, c.reach, trip.peer, 1, bytes_of_trip(args));
        send_header(ctx, args, shared, operation, trip, args.direct);
    }
}

// Rows in plain form: the warp that planned a token sends it, a lane to each of its ranks, up to the flags.
CROSSDOCK_DEVICE void send_plain(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                 const Operation& operation, const Batch& batch) {
    const auto& c = args.common;
    const uint32_t stage = static_cast<uint32_t>(ctx.warp_idx());
    if (stage >= batch.num) return;
    const TokenPlan plan = token_plan(ctx, args, shared, stage);
    const uint32_t targets = static_cast<uint32_t>(*plan.num_targets);
    const auto for_own_trips = [&](auto act) {
        CROSSDOCK_ROLLED
        for (uint32_t target = static_cast<uint32_t>(ctx.lane()); target < targets; target += kLanes) {
            const Trip trip = trip_of(c, batch, plan, stage, target);
            if (trip.row != nullptr && !is_remote(c.reach, trip.peer)) act(trip);
        }
        ctx.warp_sync();
    };
    if (batch.row_first == 0) send_headers(ctx, args, shared, operation, batch, plan, stage);
    if (args.recipe == LlRecipe::kBytes) stage_of(ctx, shared, stage).wait_loaded(ctx, batch.round);
    ctx.mark(Step::kDispatchLoaded);
    put_row(ctx, args, shared, operation, batch, plan, stage);
    for_own_trips([&](const Trip& trip) { store_chunk(ctx, args, shared, operation, batch, trip); });
    if (batch.is_last_chunk) {
        RowStage::wait_stores(ctx);
        ctx.mark(Step::kDispatchLanded);
        for_own_trips([&](const Trip& trip) {
            ctx.store_landed_system(row_flag(c, operation, trip.peer, static_cast<uint32_t>(trip.slot)),
                                    pack_word(operation.epoch, 0));
        });
        ctx.mark(Step::kDispatchFlagged);
    }
    stage_of(ctx, shared, stage).wait_reusable(ctx);
    ctx.warp_sync();
}

// Rows in line form: all warps share every row's groups of lines, and the headers.
CROSSDOCK_DEVICE void send_lines(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                 const Operation& operation, const Batch& batch) {
    const auto& c = args.common;
    const uint64_t tag = line_tag(operation.epoch, 0);
    const uint32_t warp = static_cast<uint32_t>(ctx.warp_idx());
    const uint32_t warps = static_cast<uint32_t>(ctx.num_warps());
    const uint32_t part = static_cast<uint32_t>(ctx.block_idx()) & ((1u << c.log2_blocks_per_token) - 1);
    Trip trip{};
    CROSSDOCK_ROLLED
    for (uint32_t number = warp; part == 0 && find_trip(ctx, args, shared, batch, number, trip); number += warps) {
        if (trip.row == nullptr) continue;
        if (is_leader(ctx)) note_slot_sent(ctx, c, operation, trip);
        send_header(ctx, args, shared, operation, trip, 0);
    }
    const LineRow row(line_row_bytes(args));
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < batch.num; ++i) {
        const RowStage stage = stage_of(ctx, shared, i);
        const TokenPlan plan = token_plan(ctx, args, shared, i);
        if (args.recipe == LlRecipe::kBytes) stage.wait_loaded(ctx, batch.round);
        ctx.mark(Step::kDispatchLoaded);
        const int targets = *plan.num_targets;
        CROSSDOCK_ROLLED
        for (uint32_t group = part * warps + warp; group < row.groups(); group += warps << c.log2_blocks_per_token) {
            LineGroup lines;
            lines.read(ctx, row, group, stage.data());
            CROSSDOCK_ROLLED
            for (int target = 0; target < targets; ++target) {
                if (plan.rows[target] != nullptr) lines.store(ctx, row, group, plan.rows[target], tag);
            }
        }
        ctx.mark(Step::kDispatchStored);
    }
}

// Blocks share the tokens in contiguous runs; the last block announces the counts and sends nothing unless it is alone.
struct TokenRun {
    uint32_t begin;
    uint32_t end;
};

CROSSDOCK_DEVICE TokenRun tokens_of_block(const Ctx& ctx, const auto& c) {
    const uint32_t block = static_cast<uint32_t>(ctx.block_idx());
    if (block >= c.send_blocks) return {c.num_tokens, c.num_tokens};
    const uint32_t begin = (block >> c.log2_blocks_per_token) * c.tokens_per_block;
    const uint32_t end = begin + c.tokens_per_block;
    return {begin < c.num_tokens ? begin : c.num_tokens, end < c.num_tokens ? end : c.num_tokens};
}

// A block counts the tokens before its own, the last block all.
CROSSDOCK_DEVICE uint32_t tokens_to_count(const Ctx& ctx, const auto& c) {
    return ctx.block_idx() == ctx.num_blocks() - 1 ? c.num_tokens : tokens_of_block(ctx, c).begin;
}

CROSSDOCK_DEVICE TokenIds load_first_ids(const Ctx& ctx, const auto& c) {
    return load_ids(c, static_cast<uint32_t>(thread_idx(ctx)), tokens_to_count(ctx, c), 0);
}

CROSSDOCK_DEVICE void load_first_batch(const Ctx& ctx, const auto& args, const LlDispatchShared& shared) {
    const TokenRun run = tokens_of_block(ctx, args.common);
    if (run.begin < run.end) load_batch(ctx, args, shared, batch_of(args, run.begin, run.end, 0, 0));
}

// Where nothing is sent after all: what has set out must arrive before its stage is gone.
CROSSDOCK_DEVICE void abandon_first_batch(const Ctx& ctx, const auto& args, const LlDispatchShared& shared) {
    const TokenRun run = tokens_of_block(ctx, args.common);
    if (run.begin == run.end || args.recipe != LlRecipe::kBytes || !has_duty(ctx, 0)) return;
    const Batch batch = batch_of(args, run.begin, run.end, 0, 0);
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < batch.num; ++i) stage_of(ctx, shared, i).wait_loaded(ctx, batch.round);
}

// A warp plans the token in its stage: load_plan before a barrier of the block, plan_token behind it.
template <typename PlanOne>
CROSSDOCK_DEVICE void for_own_plans(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                    const Batch& batch, PlanOne plan_one) {
    const uint32_t stage = static_cast<uint32_t>(ctx.warp_idx());
    if (stage < batch.num) plan_one(stage, token_plan(ctx, args, shared, stage));
}

CROSSDOCK_DEVICE void load_plans(const Ctx& ctx, const auto& args, const LlDispatchShared& shared, const Batch& batch) {
    for_own_plans(ctx, args, shared, batch,
                  [&](uint32_t stage, const TokenPlan& plan) { load_plan(ctx, args, batch.first + stage, plan); });
}

// Before the operation is known: what the first rows need of the routing is looked up.
CROSSDOCK_DEVICE void load_first_plans(const Ctx& ctx, const auto& args, const LlDispatchShared& shared) {
    const TokenRun run = tokens_of_block(ctx, args.common);
    if (run.begin == run.end) return;
    load_plans(ctx, args, shared, batch_of(args, run.begin, run.end, 0, 0));
}

// Behind a barrier and before the next one: the counts of earlier tokens, and rows that are quantised.
CROSSDOCK_DEVICE void prepare_send(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                   const TokenIds& first_ids) {
    const auto& c = args.common;
    const TokenRun run = tokens_of_block(ctx, c);
    count_tokens(ctx, c, 0, tokens_to_count(ctx, c), first_ids, routing_counts(ctx, shared));
    if (run.begin < run.end) quantise_batch(ctx, args, shared, batch_of(args, run.begin, run.end, 0, 0));
}

// The last block announces how many rows come, and from where.
CROSSDOCK_DEVICE void announce(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                               const Operation& operation) {
    const auto& c = args.common;
    const RoutingCounts counts = routing_counts(ctx, shared);
    announce_counts(ctx, c, operation, counts);
    if (ctx.num_blocks() > 1) return;
    ctx.block_sync();
    clear_counts(ctx, c, counts);
    ctx.block_sync();
}

CROSSDOCK_DEVICE void send_tokens(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                  const Operation& operation) {
    const auto& c = args.common;
    const RoutingCounts counts = routing_counts(ctx, shared);
    if (ctx.block_idx() == ctx.num_blocks() - 1) announce(ctx, args, shared, operation);
    const TokenRun run = tokens_of_block(ctx, c);
    const bool in_lines = sends_in_lines(c);
    uint32_t round = 0;
    CROSSDOCK_ROLLED
    for (uint32_t first = run.begin; first < run.end; first += c.crew.num_stages) {
        CROSSDOCK_ROLLED
        for (uint32_t row_first = 0; row_first < args.row_bytes; row_first += c.crew.chunk_bytes, ++round) {
            const Batch batch = batch_of(args, first, run.end, round, row_first);
            if (!args.kOneBatch && round > 0) {
                load_batch(ctx, args, shared, batch);
                quantise_batch(ctx, args, shared, batch);
                if (row_first == 0) load_plans(ctx, args, shared, batch);
                ctx.block_sync();
            }
            if (row_first == 0) {
                for_own_plans(ctx, args, shared, batch, [&](uint32_t stage, const TokenPlan& plan) {
                    plan_token(ctx, args, shared, operation, stage, counts, plan);
                });
            }
            ctx.mark(Step::kDispatchPlanned);
            if (in_lines) {
                ctx.block_sync();
                send_lines(ctx, args, shared, operation, batch);
            } else {
                send_plain(ctx, args, shared, operation, batch);
            }
            if (batch.first + batch.num == run.end && batch.is_last_chunk) return;
            ctx.block_sync();
        }
        const uint32_t next = first + c.crew.num_stages;
        count_tokens(ctx, c, first, next, load_ids(c, first + static_cast<uint32_t>(thread_idx(ctx)), next, 0), counts);
        ctx.block_sync();
    }
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
