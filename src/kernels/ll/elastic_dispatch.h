// SPDX-License-Identifier: Apache-2.0
// What an elastic dispatch (crossdock.h, crossdockElasticDispatch) does beside or instead of what others do. Expert-
// major, its experts' rows follow each other without gaps, up to the alignment; rank-major, all rows do. Its headers:
// kernels/ll/elastic_header.h.
#pragma once

#include "device/row_copy.h"
#include "kernels/ll/operation.h"

namespace crossdock {

// What a row's header holds for each choice.
struct ElasticChoice {
    static constexpr uint32_t kExpertBits = 15;
    static constexpr uint32_t kNumberBits = 16;
    static constexpr uint32_t kNoExpert = (1u << kExpertBits) - 1;
    static constexpr uint32_t kMostExperts = kNoExpert;               // of all ranks
    static constexpr uint32_t kMostTokens = (1u << kNumberBits) - 1;  // of a rank

    uint32_t expert;  // global id, or kNoExpert
    uint32_t number;  // among this source's rows for that expert
    bool repeats;     // an earlier choice of the token has the row
    uint32_t weight;  // bits

    CROSSDOCK_HOST_DEVICE static constexpr ElasticChoice of(uint64_t payload) {
        const uint32_t low = static_cast<uint32_t>(payload);
        return {low & kNoExpert, low >> kExpertBits & kMostTokens, low >> 31 != 0,
                static_cast<uint32_t>(payload >> 32)};
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t payload() const {
        return uint64_t{weight} << 32 | (repeats ? 1u << 31 : 0) | number << kExpertBits | expert;
    }
};
static_assert(ElasticChoice::kExpertBits + ElasticChoice::kNumberBits == 31, "the highest bit is `repeats`");

namespace {

// Send half.

inline constexpr uint32_t kRepeatsShift = 31;  // in a plan's numbers: an earlier choice of the token has the expert

// An expert that a token names twice counts once. ids: the token's choices from `base` on, of which this is the i-th.
template <uint32_t kNum>
CROSSDOCK_DEVICE bool is_counted(const auto& op, uint32_t token, uint32_t base, uint32_t i,
                                 const uint32_t (&ids)[kNum]) {
    bool repeats = false;
    CROSSDOCK_UNROLL
    for (uint32_t j = 0; j < kNum; ++j) repeats |= j < i && ids[j] == ids[i];
    CROSSDOCK_ROLLED
    for (uint32_t j = 0; j < base; ++j) repeats |= expert_id(op.c, token, j) == ids[i];
    return !repeats;
}
// One lane. Keeps choice k of a token, as the caller passed it.
CROSSDOCK_DEVICE void copy_id(const auto& op, uint32_t token, uint32_t k, int64_t id) {
    if ((op.block() & ((1u << op.c.log2_blocks_per_token) - 1)) != 0) return;  // another block has the token, too
    const uint64_t at = uint64_t{token} * op.c.topk + k;
    if (op.c.ids_are_64_bit) {
        static_cast<int64_t*>(op.args.elastic.topk_idx_copy)[at] = id;
    } else {
        static_cast<int32_t*>(op.args.elastic.topk_idx_copy)[at] = static_cast<int32_t>(id);
    }
}
// One warp. The first of several choices of an expert gets the sum of their weights.
CROSSDOCK_DEVICE void add_up_weights(const auto& op, const TokenPlan& own) {
    for_lanes(op.ctx, op.c.topk, [&](uint32_t k) {
        if (own.expert_ids[k] == kDropped || own.numbers[k] >> kRepeatsShift != 0) return;
        float sum = float_of(own.weights[k]);
        CROSSDOCK_ROLLED
        for (uint32_t j = k + 1; j < op.c.topk; ++j)
            sum += own.expert_ids[j] == own.expert_ids[k] ? float_of(own.weights[j]) : 0.0f;
        own.weights[k] = bits_of(sum);
    });
    op.ctx.warp_sync();
}

// Receive half.

// i: among the elements of out_topk_idx.
CROSSDOCK_DEVICE void store_id(const ElasticDispatchArgs& call, uint64_t i, int32_t id) {
    if (call.ids_are_64_bit) {
        static_cast<int64_t*>(call.out_topk_idx)[i] = id;
    } else {
        static_cast<int32_t*>(call.out_topk_idx)[i] = id;
    }
}

// More rows come than an output has.
CROSSDOCK_DEVICE void refuse_rows(const auto& op, uint64_t rows, uint32_t most) {
    record_overflow(op.ctx, op.c.scope, op.c.rank, static_cast<uint32_t>(rows < UINT32_MAX ? rows : UINT32_MAX), most);
}

// One warp. Finds where each expert's rows begin and, if `tells`, tells the caller how many there are.
CROSSDOCK_DEVICE void lay_out_zones(const auto& op, const Announced& announced, uint32_t experts, bool tells) {
    const ElasticDispatchArgs& call = op.args.elastic;
    uint64_t rows_before = 0;
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < experts; base += kLanes) {
        const uint32_t expert = base + op.lane();
        const bool is_expert = expert < experts;
        const uint32_t rows = is_expert ? announced.expert_rows[expert] : 0;
        const uint32_t padded = is_expert ? announced.padded_rows[expert] : 0;
        // By halves, whose sums fit into 32 bits.
        constexpr uint32_t kHalf = 16;
        const uint32_t halves[2] = {padded % (1u << kHalf), padded >> kHalf};
        const uint64_t begin =
            rows_before + op.ctx.warp_sum_before(halves[0]) + (uint64_t{op.ctx.warp_sum_before(halves[1])} << kHalf);
        rows_before += op.ctx.warp_sum(halves[0]) + (uint64_t{op.ctx.warp_sum(halves[1])} << kHalf);
        if (!is_expert) continue;
        announced.zones[expert] = static_cast<uint32_t>(begin < call.rows ? begin : call.rows);
        if (!tells) continue;
        const uint64_t end = begin + (op.c.expert_major ? rows : padded);
        if (call.expert_counts != nullptr) call.expert_counts[expert] = static_cast<int32_t>(rows);
        if (call.expert_ends != nullptr)
            call.expert_ends[expert] = static_cast<int32_t>(end < INT32_MAX ? end : INT32_MAX);
        if (call.statistics != nullptr) call.statistics[expert] += static_cast<int32_t>(rows);
        if (op.c.expert_major && rows > 0 && end > call.rows) refuse_rows(op, end, call.rows);
    }
    op.ctx.warp_sync();
}
// Tells the caller where a source's rows end. Returns the number of the source's first row.
CROSSDOCK_DEVICE uint32_t tell_rank_end(const auto& op, const Announced& announced, uint32_t source) {
    uint32_t first_row = 0;
    CROSSDOCK_ROLLED
    for (uint32_t other = 0; other < source; ++other) first_row += announced.rows[other];
    const uint32_t end = first_row + announced.rows[source];
    const ElasticDispatchArgs& call = op.args.elastic;
    if (call.rank_ends != nullptr) call.rank_ends[source] = static_cast<int32_t>(end);
    const uint32_t most_sources = call.sources != nullptr ? call.source_rows : end;
    const uint32_t most = op.c.expert_major || most_sources < call.rows ? most_sources : call.rows;
    if (announced.rows[source] > 0 && end > most) refuse_rows(op, end, most);
    return first_row;
}
// Clears ids beyond the last row, and the rows between the experts'.
CROSSDOCK_DEVICE void fill_unused_rows(const auto& op, const Announced& announced, const WorkShare& share) {
    const ElasticDispatchArgs& call = op.args.elastic;
    if (call.out_topk_idx != nullptr) {
        const uint64_t step = uint64_t{share.num_blocks} * share.threads();
        const uint64_t end = uint64_t{call.rows} * op.c.topk;
        uint64_t i = uint64_t{announced.rows_before[op.c.arena.num_ranks]} * op.c.topk;
        CROSSDOCK_ROLLED
        for (i += share.block * share.threads() + share.thread(op.ctx); i < end; i += step) store_id(call, i, -1);
    }
    CROSSDOCK_ROLLED
    for (uint32_t expert = 0; call.zero_padding && expert < op.c.offsets.experts_per_rank; ++expert) {
        const uint64_t begin = uint64_t{announced.zones[expert]} + announced.expert_rows[expert];
        const uint64_t end = uint64_t{announced.zones[expert]} + announced.padded_rows[expert];
        CROSSDOCK_ROLLED
        for (uint64_t row = begin + share.first(op.ctx); row < end && row < call.rows; row += share.step()) {
            zero_row(op.ctx, op.args.out_tokens + row * op.args.row_bytes, op.args.row_bytes);
            for_lanes(op.ctx, call.num_scales, [&](uint32_t i) { *call.out_scales.at(row, i) = 0; });
            if (call.out_weights != nullptr && is_leader(op.ctx)) call.out_weights[row] = 0.0f;
        }
    }
}

}  // namespace
}  // namespace crossdock
