// SPDX-License-Identifier: Apache-2.0
// Dispatch, send half: every token is sent once to each rank that hosts one of its experts, into this source's own
// slots there. A slot's number is a count over the source's own earlier tokens, so every block computes it alone.
#pragma once

#include "kernels/ll/elastic_dispatch.h"
#include "kernels/ll/gin_peers.h"
#include "kernels/ll/ll128.h"

namespace crossdock {
namespace {

// Rows of scales may begin at any address that their element type allows.
CROSSDOCK_DEVICE bool is_word(const void* memory) { return reinterpret_cast<uintptr_t>(memory) % 4 == 0; }

// Copies a multiple of 4 bytes. All lanes.
CROSSDOCK_DEVICE void copy_words(const Ctx& ctx, void* target, const void* source, uint32_t bytes) {
    if (is_word(target) && is_word(source)) {
        for_lanes(ctx, bytes / 4,
                  [&](uint32_t i) { static_cast<uint32_t*>(target)[i] = static_cast<const uint32_t*>(source)[i]; });
    } else {
        for_lanes(ctx, bytes,
                  [&](uint32_t i) { static_cast<std::byte*>(target)[i] = static_cast<const std::byte*>(source)[i]; });
    }
}

// is_aligned: is_word(target).
CROSSDOCK_DEVICE void store_word(std::byte* target, uint32_t value, bool is_aligned) {
    if (is_aligned) {
        *reinterpret_cast<uint32_t*>(target) = value;
        return;
    }
    CROSSDOCK_UNROLL
    for (uint32_t i = 0; i < 4; ++i) target[i] = static_cast<std::byte>(value >> (8 * i));
}

// A row followed by its scales.
CROSSDOCK_DEVICE uint32_t bytes_with_scales(const auto& args) {
    return args.row_bytes + static_cast<uint32_t>(align_up(args.scale_bytes, 16));
}

// A block's counts of its rank's routing, in shared memory.
struct RoutingCounts {
    uint32_t* experts;  // [experts] choices
    uint32_t* ranks;    // [ranks] rows
};

// Counts tokens [begin, end), one per thread, if the ranks do not fit into a mask.
CROSSDOCK_DEVICE_RARE void count_tokens_of_many_ranks(const Ctx& ctx, const auto& c, uint32_t begin, uint32_t end,
                                                      RoutingCounts counts) {
    for_threads(ctx, end - begin, [&](uint32_t i) {
        const uint32_t token = begin + i;
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < c.topk; ++k) {
            const uint32_t id = expert_id(c, token, k);
            if (id == kDropped) continue;
            if (c.expert_major) ctx.add_shared(counts.experts + id, 1);
            const uint32_t rank = rank_of_expert(c, id);
            if (is_first_of_rank(c, token, k, rank)) ctx.add_shared(counts.ranks + rank, 1);
        }
    });
}

// A lane writes or reads the counts of so many experts at once.
inline constexpr uint32_t kExpertsAtOnce = kLanes > 1 ? 8 : 1;

// The experts of some of a token's choices.
struct TokenIds {
    static constexpr uint32_t kMost = 8;
    uint32_t ids[kMost];
};
// Choices as the caller passed them. Nothing waits for their loads until they are used.
struct GivenIds {
    int64_t ids[TokenIds::kMost] = {};
    uint32_t num = 0;  // how many of them, or more
};
struct GivenChoice {
    int64_t id = 0;
    float weight = 0.0f;  // rank-major
};

// Tokens [first, first + num) that are being sent, one per stage, and the part of their rows.
struct Batch {
    uint32_t first;
    uint32_t num;
    uint32_t row_first;  // bytes [row_first, row_first + chunk) of the rows
    uint32_t chunk;
    bool is_last_chunk;
};

// The row of a token for one of its ranks.
struct SendTask {
    uint32_t token;
    uint32_t stage;
    uint32_t target;  // of the token's
    uint32_t peer;
    uint32_t row_idx;  // among this source's rows there
    uint32_t slot;
    std::byte* row;  // null: the peer is lost, or it is this rank and the row stays
};

template <typename Op>
class DispatchSend {
  public:
    static constexpr KernelSteps kSteps{Step::kDispatchBegin, Step::kDispatchReady, Step::kDispatchHead,
                                        Step::kDispatchEnd};

    CROSSDOCK_DEVICE explicit DispatchSend(const Op& op)
        : op_(op), ctx_(op.ctx), args_(op.args), c_(op.c), shared_(op.args.shared) {}

    CROSSDOCK_DEVICE void init() {
        if (has_role(ctx_, WarpRole::kLoader)) {
            for_lanes(ctx_, c_.warp_layout.num_stages + c_.warp_layout.receive_stages,
                      [&](uint32_t i) { stage_at(i).init(); });
            RowStage::initialised();
            ctx_.warp_sync();
        }
        clear_counts();
        ctx_.block_sync();
    }

    // Loads the first rows and their routing before the operation is known.
    CROSSDOCK_DEVICE void fetch() {
        const GivenIds given = load_ids(op_.thread(), tokens_to_count(), 0);
        const TokenRun run = tokens();
        const bool has_tokens = run.begin < run.end;
        const Batch batch = batch_of(run.begin, run.end, 0);
        const GivenChoice choice = has_tokens ? load_choice(batch, op_.lane()) : GivenChoice{};
        if (has_tokens) load_batch(batch);
        if (has_tokens) load_first_blocks(batch);
        ctx_.mark(Step::kDispatchFetching);
        first_ids_ = experts_of(given);
        if (has_tokens) write_plans(batch, choice);
    }

    // After fetch and before the next block barrier: counts earlier tokens and quantises rows.
    CROSSDOCK_DEVICE void prepare() {
        empty_outbox(ctx_, c_);
        const TokenRun run = tokens();
        count_tokens(0, tokens_to_count(), first_ids_);
        if (run.begin < run.end) quantise_batch(batch_of(run.begin, run.end, 0), true);
    }

    template <typename Begin>
    CROSSDOCK_DEVICE bool run(Begin begin) {
        if (!begin()) {
            abandon();
            return false;
        }
        if (ctx_.block_idx() == ctx_.num_blocks() - 1) announce();
        send_tokens();
        finish_puts();
        return true;
    }

    // Rows for this rank stay in their stages, and the receive half finds their places.
    CROSSDOCK_DEVICE bool own_rows_stay() const {
        return op_.sends() && op_.receives() && !op_.own_rows_are_ll128() && args_.own_rows_stay;
    }
    // Rank-major places follow from the slots, so the send half already stores these rows.
    CROSSDOCK_DEVICE bool own_rows_are_placed() const {
        return own_rows_stay() && !c_.expert_major && !is_elastic(args_);
    }
    // The number of this block's tokens, one per stage, if rows stay.
    CROSSDOCK_DEVICE uint32_t num_staged() const {
        const TokenRun run = tokens();
        return own_rows_stay() ? run.end - run.begin : 0;
    }
    CROSSDOCK_DEVICE RowStage stage_at(uint32_t i) const { return stage_of(ctx_, shared_, i); }
    // Returns false if the token has no row for this rank.
    CROSSDOCK_DEVICE bool find_own_row(uint32_t stage, SendTask& task) const {
        const TokenRun run = tokens();
        const TokenPlan of_token = plan_of(stage);
        if (*of_token.own_target == kDropped) return false;
        task = task_of(batch_of(run.begin, run.end, 0), of_token, stage, *of_token.own_target);
        return true;
    }
    // Word i of a row's header: 0 is its origin, the others are choices.
    CROSSDOCK_DEVICE uint64_t header_word(const SendTask& task, uint32_t direct, uint32_t first_choice,
                                          uint32_t i) const {
        if (i == 0) return RowOrigin{task.token, task.target, direct, first_choice}.payload();
        const TokenPlan of_token = plan_of(task.stage);
        const uint32_t k = i - 1;
        const uint32_t id = of_token.expert_ids[k];
        if (is_elastic(args_)) {
            const uint32_t number = c_.expert_major ? of_token.numbers[k] : 0;
            return ElasticChoice{id == kDropped ? ElasticChoice::kNoExpert : id, number & ElasticChoice::kMostTokens,
                                 number >> kRepeatsShift != 0, of_token.weights[k]}
                .payload();
        }
        return uint64_t{c_.expert_major ? of_token.numbers[k] : of_token.weights[k]} << 32 | id;
    }
    // One warp. The number of choices on a rank of the tokens before the one in `stage`; 0 in rank-major and elastic.
    CROSSDOCK_DEVICE uint32_t choices_before(uint32_t stage, uint32_t rank) const {
        if (!c_.expert_major || is_elastic(args_)) return 0;
        const uint32_t experts = c_.offsets.experts_per_rank;
        const uint32_t* of_rank = counts().experts + rank * experts;
        int choices = 0;
        for_lanes(ctx_, experts, [&](uint32_t i) { choices += of_rank[i]; });
        CROSSDOCK_ROLLED
        for (uint32_t earlier = 0; earlier < stage; ++earlier) {
            const uint32_t* ranks = plan_of(earlier).ranks;
            for_lanes(ctx_, c_.topk, [&](uint32_t k) { choices += ranks[k] == rank; });
        }
        return ctx_.warp_sum(choices);
    }

  private:
    // Waits for loads that were issued: they must land before the stages' memory is freed.
    CROSSDOCK_DEVICE void abandon() {
        const TokenRun run = tokens();
        if (run.begin == run.end || args_.wire != LlDispatchWire::kBytes || !has_role(ctx_, WarpRole::kLoader)) return;
        const Batch batch = batch_of(run.begin, run.end, 0);
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < batch.num; ++i) stage_at(i).wait_loaded(ctx_, round_);
    }

    CROSSDOCK_DEVICE TokenPlan plan_of(uint32_t stage) const {
        std::byte* plans = shared_.plans.in(ctx_.shared_memory());
        return view_of<TokenPlan>(plans + view_bytes<TokenPlan>(c_.topk) * stage, c_.topk);
    }

    // Each block sends a contiguous run of tokens; the last block announces the counts, and sends only if it is the
    // only block.
    struct TokenRun {
        uint32_t begin;
        uint32_t end;
    };
    CROSSDOCK_DEVICE TokenRun tokens() const {
        const uint32_t block = op_.block();
        if (block >= c_.send_blocks) return {c_.num_tokens, c_.num_tokens};
        const uint32_t begin = (block >> c_.log2_blocks_per_token) * c_.tokens_per_block;
        const uint32_t end = begin + c_.tokens_per_block;
        return {begin < c_.num_tokens ? begin : c_.num_tokens, end < c_.num_tokens ? end : c_.num_tokens};
    }
    // A block counts the tokens before its own, the last block all tokens.
    CROSSDOCK_DEVICE uint32_t tokens_to_count() const {
        return ctx_.block_idx() == ctx_.num_blocks() - 1 ? c_.num_tokens : tokens().begin;
    }
    CROSSDOCK_DEVICE Batch batch_of(uint32_t first, uint32_t end, uint32_t row_first) const {
        if (args_.kOneBatch) return {first, end - first, 0, args_.row_bytes, true};
        const LlWarpLayout& layout = c_.warp_layout;
        const uint32_t left = args_.row_bytes - row_first;
        const uint32_t chunk = left < layout.chunk_bytes ? left : layout.chunk_bytes;
        return {first, end - first < layout.num_stages ? end - first : layout.num_stages, row_first, chunk,
                chunk == left};
    }

    // Counting.

    CROSSDOCK_DEVICE RoutingCounts counts() const {
        return {shared_.expert_counts.in(ctx_.shared_memory()), shared_.rank_counts.in(ctx_.shared_memory())};
    }
    // Followed by a block barrier.
    CROSSDOCK_DEVICE void clear_counts() const {
        for_threads(ctx_, c_.arena.num_experts, [&](uint32_t i) { counts().experts[i] = 0; });
        for_threads(ctx_, c_.arena.num_ranks, [&](uint32_t i) { counts().ranks[i] = 0; });
    }
    // Rank-major, only the counts that are announced are by expert, too, and only of elastic dispatches.
    CROSSDOCK_DEVICE bool counts_experts() const {
        return c_.expert_major || (is_elastic(args_) && ctx_.block_idx() == ctx_.num_blocks() - 1);
    }
    // Choices [base, base + kMost) of a token, if it is below `end`.
    CROSSDOCK_DEVICE GivenIds load_ids(uint32_t token, uint32_t end, uint32_t base) const {
        GivenIds given;
        given.num = token < end ? c_.topk - base : 0;
        if (given.num > 0) {
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < TokenIds::kMost; ++i)
                given.ids[i] = given_id(c_, token, i < given.num ? base + i : base);
        }
        return given;
    }
    CROSSDOCK_DEVICE TokenIds experts_of(const GivenIds& given) const {
        TokenIds loaded;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < TokenIds::kMost; ++i)
            loaded.ids[i] = i < given.num ? expert_of(c_, given.ids[i]) : kDropped;
        return loaded;
    }
    // Counts tokens [begin, end), one per lane. first: the choices of this thread's first token. Followed by a block
    // barrier.
    CROSSDOCK_DEVICE void count_tokens(uint32_t begin, uint32_t end, TokenIds first) const {
        constexpr uint32_t kRanksInMask = 64;  // bits of `ranks`
        const RoutingCounts counted = counts();
        if (c_.arena.num_ranks > kRanksInMask) return count_tokens_of_many_ranks(ctx_, c_, begin, end, counted);
        const uint32_t threads = op_.threads();
        CROSSDOCK_ROLLED
        for (uint32_t warp_token = begin + op_.warp() * kLanes; warp_token < end; warp_token += threads) {
            const uint32_t token = warp_token + op_.lane();
            uint64_t ranks = 0;
            CROSSDOCK_ROLLED
            for (uint32_t base = 0;;) {
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < TokenIds::kMost; ++i) {
                    if (first.ids[i] == kDropped) continue;
                    ranks |= uint64_t{1} << rank_of_expert(c_, first.ids[i]);
                    if (counts_experts() && (!is_elastic(args_) || is_counted(op_, token, base, i, first.ids)))
                        ctx_.add_shared(counted.experts + first.ids[i], 1);
                }
                base += TokenIds::kMost;
                if (!has_choices_from(c_, base)) break;
                first = experts_of(load_ids(token, end, base));
            }
            CROSSDOCK_ROLLED
            for (uint32_t rank = 0; rank < c_.arena.num_ranks; ++rank) {
                const uint32_t rows = ctx_.warp_count((ranks >> rank & 1) != 0);
                if (is_leader(ctx_) && rows > 0) ctx_.add_shared(counted.ranks + rank, rows);
            }
            if (c_.kFewTokens) break;
            first = experts_of(load_ids(token + threads, end, 0));
        }
    }

    // The last block tells every peer how many rows, and choices of each of its experts, this source sends it. The
    // counts are sent before the rows, so that the receiver knows every row's final place before the first row lands.
    // Every word carries its epoch, so the words need no order.
    CROSSDOCK_DEVICE void announce() const {
        const RoutingCounts counted = counts();
        const uint32_t experts = c_.offsets.experts_per_rank;
        const uint64_t form = op_.own_rows_are_ll128() ? kLl128Rows : 0;
        CROSSDOCK_ROLLED
        for (uint32_t peer = op_.warp(); peer < c_.arena.num_ranks; peer += op_.warps()) {
            if (!op_.wait_credit_as_warp(peer)) continue;
            uint64_t* words = op_.is_gin_peer(peer)
                                  ? reinterpret_cast<uint64_t*>(in_outbox(c_, outbox_counts(c_, peer)))
                                  : op_.counts(peer, c_.rank);
            const auto store = [&](uint32_t i, uint64_t count) {
                ctx_.store_relaxed_system(words + i, pack_word(op_.epoch, count));
            };
            if (is_leader(ctx_)) store(0, form | counted.ranks[peer]);
            if (!counts_experts()) continue;
            const uint32_t* of_experts = counted.experts + peer * experts;
            CROSSDOCK_ROLLED
            for (uint32_t first = op_.lane(); first < experts; first += kExpertsAtOnce * kLanes) {
                uint32_t choices[kExpertsAtOnce];
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < kExpertsAtOnce; ++i) {
                    if (first + i * kLanes < experts) choices[i] = of_experts[first + i * kLanes];
                }
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < kExpertsAtOnce; ++i) {
                    if (first + i * kLanes < experts) store(1 + first + i * kLanes, choices[i]);
                }
            }
        }
        if (ctx_.num_blocks() > 1) return;
        ctx_.block_sync();
        clear_counts();
        ctx_.block_sync();
    }

    // Rows into stages.

    CROSSDOCK_DEVICE const std::byte* source_row(uint32_t token) const {
        return args_.tokens + uint64_t{token} * args_.source_row_bytes;
    }
    CROSSDOCK_DEVICE void load_batch(const Batch& batch) const {
        if (args_.wire != LlDispatchWire::kBytes || !has_role(ctx_, WarpRole::kLoader)) return;
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < batch.num; ++i) {
            if (const RowStage::Lead lead{ctx_})
                stage_at(i).load(ctx_, source_row(batch.first + i) + batch.row_first, batch.chunk);
            if (batch.is_last_chunk && args_.scale_bytes > 0) {
                std::byte* scales = stage_at(i).data() + shared_.tail;
                if (is_elastic(args_)) {
                    for_lanes(ctx_, args_.elastic.num_scales, [&](uint32_t s) {
                        reinterpret_cast<uint32_t*>(scales)[s] = *args_.elastic.scales.at(batch.first + i, s);
                    });
                } else {
                    copy_words(ctx_, scales, args_.scales + uint64_t{batch.first + i} * args_.scale_bytes,
                               args_.scale_bytes);
                }
                RowStage::filled();
            }
        }
        RowStage::loaded_for_block(ctx_);
    }
    // is_loaded: the batch's first blocks are loaded (load_first_blocks).
    CROSSDOCK_DEVICE void quantise_batch(const Batch& batch, bool is_loaded) {
        if (args_.wire != LlDispatchWire::kFp8) return;
        const uint32_t blocks = batch.chunk / kFp8Block;
        const uint32_t warps = op_.warps();
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < batch.num; ++i) {
            std::byte* target = stage_at(i).data();
            float* scales = reinterpret_cast<float*>(target + shared_.tail) + batch.row_first / kFp8Block;
            CROSSDOCK_ROLLED
            for (uint32_t first = op_.warp(); first < blocks; first += Fp8Blocks::kMost * warps) {
                if (!is_loaded)
                    blocks_.load(ctx_, source_row(batch.first + i) + 2 * batch.row_first, first, warps, blocks);
                is_loaded = false;
                blocks_.quantise(ctx_, args_.round_scales, target, scales, first, warps, blocks);
            }
        }
        RowStage::filled();
    }
    CROSSDOCK_DEVICE void load_first_blocks(const Batch& batch) {
        const uint32_t blocks = batch.chunk / kFp8Block;
        if (args_.wire == LlDispatchWire::kFp8 && op_.warp() < blocks)
            blocks_.load(ctx_, source_row(batch.first) + 2 * batch.row_first, op_.warp(), op_.warps(), blocks);
    }

    // Plans: a warp plans the token in its stage. First, before a block barrier, it loads the token's routing.

    CROSSDOCK_DEVICE GivenChoice load_choice(const Batch& batch, uint32_t k) const {
        const uint32_t token = batch.first + op_.warp();
        if (op_.warp() >= batch.num || k >= c_.topk) return {};
        const bool has_weight = is_elastic(args_) ? args_.elastic.with_weights : !c_.expert_major;
        return {given_id(c_, token, k), has_weight ? args_.topk_weights[uint64_t{token} * c_.topk + k] : 0.0f};
    }
    // first: this lane's first choice, loaded by load_choice.
    CROSSDOCK_DEVICE void write_plans(const Batch& batch, GivenChoice first) const {
        if (op_.warp() >= batch.num) return;
        const TokenPlan own = plan_of(op_.warp());
        for_lanes(ctx_, c_.topk, [&](uint32_t k) {
            const GivenChoice choice = k == op_.lane() ? first : load_choice(batch, k);
            own.expert_ids[k] = expert_of(c_, choice.id);
            if (is_elastic(args_) && args_.elastic.topk_idx_copy != nullptr)
                copy_id(op_, batch.first + op_.warp(), k, choice.id);
            own.ranks[k] = rank_of_expert(c_, own.expert_ids[k]);
            if (!c_.expert_major || is_elastic(args_)) own.weights[k] = bits_of(choice.weight);
        });
        ctx_.warp_sync();
    }
    // Then it finds the slots: counts cover the tokens before the batch; those in earlier stages are counted here.
    CROSSDOCK_DEVICE void make_plans(const Batch& batch) const {
        const uint32_t own_stage = op_.warp();
        if (own_stage >= batch.num) return;
        const TokenPlan own = plan_of(own_stage);
        const RoutingCounts counted = counts();
        uint32_t num_targets = 0;
        bool has_repeats = false;
        if (is_leader(ctx_)) *own.own_target = kDropped;
        ctx_.warp_sync();
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; has_choices_from(c_, base); base += kLanes) {
            const uint32_t k = base + op_.lane();
            const bool is_sent = k < c_.topk && own.ranks[k] != kDropped;
            const uint32_t id = is_sent ? own.expert_ids[k] : kDropped;
            const uint32_t rank = is_sent ? own.ranks[k] : kDropped;
            const uint32_t same_expert = ctx_.lanes_before_with(id);
            const uint32_t same_rank = ctx_.lanes_before_with(rank);
            bool is_first = false;
            uint32_t position = 0;
            uint32_t row_idx = 0;
            bool repeats = same_expert > 0;
            if (is_sent) {
                position = (c_.expert_major ? counted.experts[id] : 0) + (is_elastic(args_) ? 0 : same_expert);
                row_idx = counted.ranks[rank];
                is_first = same_rank == 0;
                CROSSDOCK_ROLLED
                for (uint32_t j = 0; j < base; ++j) {
                    const bool is_same = own.expert_ids[j] == id;
                    repeats = repeats || is_same;
                    position += is_same && !is_elastic(args_) ? 1 : 0;
                    is_first = is_first && own.ranks[j] != rank;
                }
                CROSSDOCK_ROLLED
                for (uint32_t earlier = 0; earlier < own_stage; ++earlier) {
                    const TokenPlan other = plan_of(earlier);
                    bool goes_there = false;
                    uint32_t choices = 0;
                    CROSSDOCK_ROLLED
                    for (uint32_t j = 0; j < c_.topk; ++j) {
                        choices += other.expert_ids[j] == id ? 1 : 0;
                        goes_there = goes_there || other.ranks[j] == rank;
                    }
                    position += is_elastic(args_) && choices > 1 ? 1 : choices;
                    row_idx += goes_there ? 1 : 0;
                }
            }
            const uint32_t target = num_targets + ctx_.warp_count_before(is_first);
            if (k < c_.topk && c_.expert_major)
                own.numbers[k] = position | (is_elastic(args_) && repeats ? 1u << kRepeatsShift : 0);
            has_repeats = has_repeats || (is_sent && repeats);
            if (is_first) {
                std::byte* row = op_.row(rank, slot_of(c_, c_.rank, row_idx));
                own.row_idx[target] = row_idx;
                own.choices[target] = k;
                const bool stays = own_rows_stay() && rank == c_.rank;
                if (stays) *own.own_target = target;
                own.rows[target] = !stays && op_.wait_credit(rank) ? row : nullptr;
            }
            num_targets += ctx_.warp_count(is_first);
        }
        if (is_leader(ctx_)) *own.num_targets = num_targets;
        ctx_.warp_sync();
        if (is_elastic(args_) && c_.expert_major && ctx_.warp_any(has_repeats)) add_up_weights(op_, own);
    }
    // One warp. Keeps a token's choices, and marks those on other ranks for a later combine; the receive half fills in
    // this rank's own rows. Not needed in rank-major, where ids cannot change between dispatch and combine
    // (crossdockHandleRebind).
    CROSSDOCK_DEVICE void keep_choices(const Batch& batch, uint32_t stage) const {
        if (!c_.expert_major || is_elastic(args_)) return;
        const TokenPlan of_token = plan_of(stage);
        for_lanes(ctx_, c_.topk, [&](uint32_t k) {
            *dispatched_id(c_, batch.first + stage, k) = static_cast<int32_t>(of_token.expert_ids[k]);
            if (of_token.ranks[k] != c_.rank) *own_row(c_, batch.first + stage, k) = kOtherRank;
        });
    }

    CROSSDOCK_DEVICE SendTask task_of(const Batch& batch, const TokenPlan& of_token, uint32_t stage,
                                      uint32_t target) const {
        const uint32_t row_idx = of_token.row_idx[target];
        return {batch.first + stage,
                stage,
                target,
                of_token.ranks[of_token.choices[target]],
                row_idx,
                slot_of(c_, c_.rank, row_idx),
                of_token.rows[target]};
    }

    // Rows out of stages.

    CROSSDOCK_DEVICE void send_tokens() {
        const TokenRun run = tokens();
        const LlWarpLayout& layout = c_.warp_layout;
        CROSSDOCK_ROLLED
        for (uint32_t first = run.begin; first < run.end; first += layout.num_stages) {
            CROSSDOCK_ROLLED
            for (uint32_t row_first = 0; row_first < args_.row_bytes; row_first += layout.chunk_bytes, ++round_) {
                const Batch batch = batch_of(first, run.end, row_first);
                if (!args_.kOneBatch && round_ > 0) {
                    load_batch(batch);
                    quantise_batch(batch, false);
                    if (row_first == 0) write_plans(batch, load_choice(batch, op_.lane()));
                    ctx_.block_sync();
                }
                if (row_first == 0) make_plans(batch);
                ctx_.mark(Step::kDispatchPlanned);
                if (op_.own_rows_are_ll128() || own_rows_stay()) ctx_.block_sync();  // all warps read the plans
                if (op_.own_rows_are_ll128()) {
                    send_ll128(batch);
                } else {
                    send_plain(batch);
                }
                if (batch.first + batch.num == run.end && batch.is_last_chunk) return;
                ctx_.block_sync();
            }
            if (args_.kOneBatch) return;
            const uint32_t next = first + layout.num_stages;
            count_tokens(first, next, experts_of(load_ids(first + op_.thread(), next, 0)));
            ctx_.block_sync();
        }
    }

    // One warp. Sends a row's token and choices.
    CROSSDOCK_DEVICE void send_header(const SendTask& task, uint32_t direct) const {
        TaggedWord* words =
            op_.is_gin_peer(task.peer)
                ? reinterpret_cast<TaggedWord*>(in_outbox(c_, outbox_header(c_, task.peer, task.row_idx)))
                : op_.header(task.peer, task.slot);
        const uint64_t tag = pack_word(op_.epoch, 0);
        const uint32_t first_choice = choices_before(task.stage, task.peer);
        for_lanes(ctx_, 1 + c_.topk,
                  [&](uint32_t i) { ctx_.store_tagged(words + i, header_word(task, direct, first_choice, i), tag); });
    }

    // LL128 rows: all warps share each row's groups of lines, and the headers.
    CROSSDOCK_DEVICE void send_ll128(const Batch& batch) const {
        const uint64_t tag = ll128_tag(op_.epoch, 0);
        const uint32_t warps = op_.warps();
        const uint32_t part = op_.block() & ((1u << c_.log2_blocks_per_token) - 1);
        uint32_t next = op_.warp();  // this warp's next task among those of the stages from here on
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; part == 0 && i < batch.num; ++i) {
            const TokenPlan of_token = plan_of(i);
            const uint32_t targets = *of_token.num_targets;
            CROSSDOCK_ROLLED
            for (; next < targets; next += warps) {
                const SendTask task = task_of(batch, of_token, i, next);
                if (task.row == nullptr) continue;
                if (is_leader(ctx_)) op_.note_written(task.peer, task.slot);
                send_header(task, 0);
            }
            next -= targets;
        }
        const Ll128Row row(ctx_, bytes_with_scales(args_));
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < batch.num; ++i) {
            const TokenPlan of_token = plan_of(i);
            if (args_.wire == LlDispatchWire::kBytes) stage_at(i).wait_loaded(ctx_, round_);
            ctx_.mark(Step::kDispatchLoaded);
            const uint32_t targets = *of_token.num_targets;
            CROSSDOCK_ROLLED
            for (uint32_t group = part * warps + op_.warp(); group < row.groups();
                 group += warps << c_.log2_blocks_per_token) {
                Ll128Group lines;
                lines.read(row, group, stage_at(i).data());
                ctx_.warp_sync();
                CROSSDOCK_ROLLED
                for (uint32_t target = 0; target < targets; ++target) {
                    if (std::byte* slot = of_token.rows[target]; slot != nullptr)
                        lines.store(ctx_, row, group, slot + row.offset_in_lines(group), tag);
                }
            }
            ctx_.mark(Step::kDispatchStored);
        }
        if (part == 0 && op_.warp() < batch.num) keep_choices(batch, op_.warp());
    }

    // Plain rows: the warp that planned a token sends it and its flags, one lane per target rank. Headers are sent
    // first, while the row is loaded into its stage, so that the flags, which wait for all stores of the warp, do not
    // wait for the headers.
    CROSSDOCK_DEVICE void send_plain(const Batch& batch) const {
        const uint32_t own_stage = op_.warp();
        if (own_stage >= batch.num) return;
        const TokenPlan of_token = plan_of(own_stage);
        const uint32_t targets = *of_token.num_targets;
        const auto for_lsa_peers = [&](uint32_t begin, uint32_t step, auto act) {
            CROSSDOCK_ROLLED
            for (uint32_t target = begin; target < targets; target += step) {
                const SendTask task = task_of(batch, of_token, own_stage, target);
                if (task.row != nullptr && !op_.is_gin_peer(task.peer)) act(task);
            }
        };
        if (batch.row_first == 0) {
            for_lsa_peers(0, 1, [&](const SendTask& task) {
                if (is_leader(ctx_)) op_.note_written(task.peer, task.slot);
                if (is_leader(ctx_)) count_rows(ctx_, c_.reach, task.peer, 1, bytes_on_the_way());
                send_header(task, args_.direct);
            });
        }
        if (args_.wire == LlDispatchWire::kBytes) stage_at(own_stage).wait_loaded(ctx_, round_);
        ctx_.mark(Step::kDispatchLoaded);
        put_row(batch, of_token);
        for (RowStage::Turns turns(ctx_, op_.lane() < targets); turns.next();) {
            for_lsa_peers(op_.lane(), kLanes, [&](const SendTask& task) { store_chunk(batch, task); });
        }
        if (own_rows_are_placed()) {
            if (const RowStage::Lead lead{ctx_}) store_own_row(own_stage);
        }
        ctx_.warp_sync();
        if (batch.is_last_chunk) {
            keep_choices(batch, own_stage);  // while the stores are in flight
            RowStage::wait_stores(ctx_);
            ctx_.mark(Step::kDispatchLanded);
            for_lsa_peers(op_.lane(), kLanes, [&](const SendTask& task) {
                ctx_.store_landed_system(op_.flag(task.peer, task.slot), pack_word(op_.epoch, 0));
            });
            ctx_.warp_sync();
            ctx_.mark(Step::kDispatchFlagged);
        }
        if (!own_rows_stay()) stage_at(own_stage).wait_reusable(ctx_);
        ctx_.warp_sync();
    }

    // Returns which of the peer's outputs may be written directly (DirectPart bits). Known once the peer has entered
    // this operation, so it no longer reads their previous contents. Peers that offer the same parts have them at the
    // same offsets (WindowTerm).
    CROSSDOCK_DEVICE uint32_t wait_direct(uint32_t peer) const {
        if (args_.direct == 0 || peer == c_.rank) return args_.direct;
        TaggedWord entry{};
        const bool allows = op_.wait_entry(peer, entry) && op_.is_of(entry);
        return allows && Entry::parts(entry) == args_.direct ? args_.direct : 0;
    }
    CROSSDOCK_DEVICE bool has_scales(const Batch& batch) const { return batch.is_last_chunk && args_.scale_bytes > 0; }
    CROSSDOCK_DEVICE uint32_t scale_area() const { return static_cast<uint32_t>(align_up(args_.scale_bytes, 16)); }

    // One thread, in turn.
    CROSSDOCK_DEVICE void store_chunk(const Batch& batch, const SendTask& task) const {
        const RowStage from = stage_at(task.stage);
        const uint32_t direct = wait_direct(task.peer);
        if ((direct & kDirectTokens) != 0) {
            from.store(ctx_, args_.token_windows.at(task.peer, uint64_t{task.slot} * args_.row_bytes + batch.row_first),
                       0, batch.chunk);
        } else if (has_scales(batch) && direct == 0 && batch.chunk == shared_.tail) {
            from.store(ctx_, task.row + batch.row_first, 0, batch.chunk + scale_area());  // one piece, as in the stage
        } else {
            from.store(ctx_, task.row + batch.row_first, 0, batch.chunk);
        }
        if (has_scales(batch) && (direct & kDirectScales) != 0) {
            from.store(ctx_, args_.scale_windows.at(task.peer, uint64_t{task.slot} * args_.scale_bytes), shared_.tail,
                       args_.scale_bytes);
        } else if (has_scales(batch) && (direct != 0 || batch.chunk != shared_.tail)) {
            from.store(ctx_, task.row + args_.row_bytes, shared_.tail, scale_area());
        }
        RowStage::end_group(ctx_);
        ctx_.mark(Step::kDispatchStored);
    }
    // The leader.
    CROSSDOCK_DEVICE void store_own_row(uint32_t stage) const {
        SendTask task;
        if (!find_own_row(stage, task)) return;
        stage_at(stage).store(ctx_, args_.out_tokens + uint64_t{task.slot} * args_.row_bytes, 0, args_.row_bytes);
        RowStage::end_group(ctx_);
    }
    // Row, scales, header.
    CROSSDOCK_DEVICE uint64_t bytes_on_the_way() const {
        return uint64_t{bytes_with_scales(args_)} + c_.offsets.header_stride;
    }

    // A token's row for GIN peers is stored in the outbox once, and put from there into its slot at each GIN peer.
    CROSSDOCK_DEVICE void put_row(const Batch& batch, const TokenPlan& of_token) const {
        if constexpr (!kHasGinPeers) return;
        const uint32_t own_stage = op_.warp();
        const uint64_t outbox = outbox_row(c_, batch.first + own_stage);
        bool is_stored = false;
        CROSSDOCK_ROLLED
        for (uint32_t target = 0; target < *of_token.num_targets; ++target) {
            const SendTask task = task_of(batch, of_token, own_stage, target);
            if (task.row == nullptr || !op_.is_gin_peer(task.peer)) continue;
            if (batch.row_first == 0) send_header(task, 0);
            const RowStage::Lead lead(ctx_);
            if (!lead) continue;
            if (batch.row_first == 0) op_.note_written(task.peer, task.slot);
            if (!is_stored) store_in_outbox(batch, in_outbox(c_, outbox));
            is_stored = true;
            if (!batch.is_last_chunk) continue;
            put(ctx_, c_.reach, task.peer, op_.row_offset(task.slot), outbox, bytes_with_scales(args_));
            count_rows(ctx_, c_.reach, task.peer, 1, 0);
        }
        ctx_.warp_sync();
    }
    // The leader.
    CROSSDOCK_DEVICE void store_in_outbox(const Batch& batch, std::byte* row) const {
        const RowStage from = stage_at(op_.warp());
        from.store(ctx_, row + batch.row_first, 0, batch.chunk);
        if (has_scales(batch)) from.store(ctx_, row + args_.row_bytes, shared_.tail, scale_area());
        RowStage::end_group(ctx_);
        if (!batch.is_last_chunk) return;
        RowStage::wait_stores(ctx_);
        ctx_.fence_landed();
    }
    // After the rows: headers, counts and the signal. Without rows only the first count is put.
    CROSSDOCK_DEVICE void finish_puts() const {
        tell_gin_peers(op_, [&](uint32_t peer) {
            const uint64_t counts = outbox_counts(c_, peer);
            const uint64_t first = *reinterpret_cast<const uint64_t*>(in_outbox(c_, counts));
            const uint64_t rows = word_payload(first) % kLl128Rows;
            // This rank's own number, but read from memory that peers can write.
            if (!op_.expect(PeerNumber::kRows, c_.rank, c_.arena.max_tokens, rows)) return;
            if (rows > 0) {
                put(ctx_, c_.reach, peer, op_.header_offset(slot_of(c_, c_.rank, 0)), outbox_header(c_, peer, 0),
                    rows * c_.offsets.header_stride);
            }
            const Raise data = raise_to_epoch(op_, Signal::kData, peer);
            if (rows > 0 && c_.expert_major) {
                put_and_raise(ctx_, c_.reach, peer, op_.counts_offset(c_.rank), counts, c_.offsets.count_stride, data);
            } else {
                put_value_and_raise(ctx_, c_.reach, peer, op_.counts_offset(c_.rank), first, data);
            }
        });
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
    const LlDispatchShared& shared_;
    TokenIds first_ids_;
    Fp8Blocks blocks_;
    uint32_t round_ = 0;  // loads of each stage
};

}  // namespace
}  // namespace crossdock
