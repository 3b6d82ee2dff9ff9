// SPDX-License-Identifier: Apache-2.0
// High-throughput combine: finds the rows of a sum. Rows are summed at a token's source rank and, between teams, at its
// agent.
#pragma once

#include "kernels/ht/elastic_words.h"
#include "kernels/ht/weights.h"

namespace crossdock {
namespace {

// Returns whether a rank of this team returns a row for a token of `source`, whose agent this rank is. number: the
// row's number among all rows that the rank has received.
CROSSDOCK_DEVICE bool returns_row(const HtCommon& c, uint32_t source, uint32_t peer, const SentRow& sent,
                                  uint64_t& number) {
    number = uint64_t{c.tables.bases[route_of(c, source, peer)]} + sent.number;
    return sent.exists && travels(c, static_cast<uint32_t>(number));
}

// One lane. Finds the row that a rank of this team returns for a token of `source`, whose agent this rank is: in place,
// or in its packet once that has arrived. Stays null if there is no row: none is sent, or this rank's own tensor ends
// before it. Returns false if the row does not arrive.
CROSSDOCK_DEVICE bool find_lsa_row(const Ctx& ctx, const HtCombineArgs& args, const Operation& operation,
                                   uint32_t source, uint32_t peer, const SentRow& sent, const std::byte*& row) {
    const HtCommon& c = args.common;
    uint64_t number = 0;
    if (!returns_row(c, source, peer, sent, number)) return true;
    if (peer_states(ctx, args.shared)[peer] == kDirect) {
        if (peer != c.rank) row = args.token_windows.at(peer, number * args.row_bytes);
        if (peer == c.rank && number < args.token_rows) row = args.tokens + number * args.row_bytes;
        return true;
    }
    const LsaRing ring = LsaRing::combine_from(c, source, peer, ctx.block_idx());
    if (!ring.wait_packet(ctx, operation, args.rows, sent.packet)) return false;
    row = ring.packet(args.rows, sent.packet);
    return true;
}

// One lane. Returns whether find_lsa_row would return at once.
CROSSDOCK_DEVICE bool has_lsa_row(const Ctx& ctx, const HtCombineArgs& args, const Operation& operation,
                                  uint32_t source, uint32_t peer, const SentRow& sent) {
    const HtCommon& c = args.common;
    uint64_t number = 0;
    return !returns_row(c, source, peer, sent, number) || peer_states(ctx, args.shared)[peer] == kDirect ||
           LsaRing::combine_from(c, source, peer, ctx.block_idx()).has_packet(ctx, operation, args.rows, sent.packet);
}

// Elastic. Where in a packet the weights are that return, and its rows: rows of choices come behind the weights, since
// their number differs.
template <HtWire kWire>
CROSSDOCK_DEVICE uint32_t words_begin(const HtElasticCombineArgs& args) {
    return kWire == HtWire::kChoices ? 0 : args.row_bytes;
}
template <HtWire kWire, typename Args>
CROSSDOCK_DEVICE uint32_t rows_begin(const Args& args) {
    return kIsElastic<Args> && kWire == HtWire::kChoices ? args.weight_bytes : 0;
}

// Elastic. Column `column` of the weights that came with a row or packet that find_lsa_row has found.
template <HtWire kWire>
CROSSDOCK_DEVICE uint32_t word_of_lsa_row(const Ctx& ctx, const HtElasticCombineArgs& args, uint32_t source,
                                          uint32_t token, uint32_t peer, const std::byte* row, uint32_t column) {
    if (peer_states(ctx, args.shared)[peer] == kDirect) {
        const uint64_t number = static_cast<uint64_t>(row - args.tokens) / args.row_bytes;
        return weight_to_return(args, source, token, static_cast<uint32_t>(number), column);
    }
    return reinterpret_cast<const uint32_t*>(row + words_begin<kWire>(args))[column];
}

// One warp. Appends the lanes' rows (null: none) to the plan's first `num`, in the order of lanes. Returns their
// number.
CROSSDOCK_DEVICE uint32_t note_rows(const Ctx& ctx, const HtPlan& plan, uint32_t num, const std::byte* row,
                                    uint32_t origin, uint32_t packet) {
    const uint32_t has_row = row != nullptr ? 1 : 0;
    const uint32_t at = num + ctx.warp_sum_before(has_row);
    if (row != nullptr) {
        plan.rows[at] = row;
        plan.origins[at] = origin;
        plan.slots[at] = packet;
    }
    return ctx.warp_sum(has_row);
}

// ---- rows of choices (HtWire::kChoices): a packet has those of a token's experts in ascending order ----

// Behind the packet's rows: the index of the last one.
template <typename Packet>
CROSSDOCK_DEVICE auto* last_row_of(const HtCombineArgs& args, Packet* packet) {
    using Word = std::conditional_t<std::is_const_v<Packet>, const uint32_t, uint32_t>;
    return reinterpret_cast<Word*>(packet + (args.wire_bytes - kRowCountBytes));
}

// Where a choice's row is in its packet, whose experts begin with global id `first`.
struct PlaceInPacket {
    bool exists;  // not the second of two that name one expert
    uint32_t row;

    // id: choice `k`, of the calling lane (-1: none). All lanes take part, since they look at all choices.
    CROSSDOCK_DEVICE static PlaceInPacket of(const Ctx& ctx, const int32_t* ids, uint32_t topk, uint32_t k, int32_t id,
                                             int32_t first) {
        const bool are_held = kLanes > 1 && topk <= kLanes;  // one by each lane
        const auto choice = [&](uint32_t i) {
            return are_held ? static_cast<int32_t>(ctx.warp_broadcast_from(i, static_cast<uint32_t>(id))) : ids[i];
        };
        bool is_new = id >= 0;
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < topk; ++i) is_new = !(choice(i) == id && i < k) && is_new;
        PlaceInPacket place{is_new, 0};
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < topk; ++i) {
            const int32_t other = choice(i);
            bool counts = are_held ? ctx.warp_broadcast_from(i, is_new ? 1u : 0u) != 0 : true;
            CROSSDOCK_ROLLED
            for (uint32_t j = 0; !are_held && counts && j < i; ++j) counts = ids[j] != other;
            if (counts && other >= first && other < id) ++place.row;
        }
        return place;
    }
};

}  // namespace
}  // namespace crossdock
