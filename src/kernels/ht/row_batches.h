// SPDX-License-Identifier: Apache-2.0
// The rows that a warp receives or returns, looked up in batches, one lane per row: a look-up is a chain of loads,
// whose latency is paid once per batch.
#pragma once

#include "kernels/ht/elastic_words.h"

namespace crossdock {
namespace {

// The rows of a channel that a warp handles: tokens first, first + stride, ... of every rank's share of the channel, in
// this order; for each token the rows of all ranks, one after the other, starting with this rank.
struct RowSequence {
    uint32_t first;  // also the number of the warp's batch
    uint32_t stride;
    bool descends;     // in the order of ranks
    bool with_absent;  // including rows of absent ranks
    uint64_t limit;    // rows of the tensor: expert-major slots beyond are omitted
};

// The places of a row.
enum class Places {
    kByExpert,
    kByColumn,   // elastic, expert-major: in the order of its token's columns
    kOfChoices,  // expert-major: kNoSlot for an expert whose row has none
};

// In whose order a token's rows are summed before they return.
template <typename Args>
inline constexpr Places kPlacesOfSum = kIsElastic<Args> ? Places::kByColumn : Places::kByExpert;

template <Places places = Places::kByExpert>
class RowBatches {
  public:
    CROSSDOCK_DEVICE RowBatches(const Ctx& ctx, const HtCommon& c, const HtShared& shared, const RowSequence& sequence)
        : c_(c),
          states_(peer_states(ctx, shared)),
          batch_(HtBatch::of(ctx, shared, c.topk, sequence.first)),
          sequence_(sequence),
          channel_(ctx.block_idx()),
          end_(largest_share(c, channel_, token_share)) {}

    // The next row, or null. Valid until next is called, and longer as long as peek returns a row.
    CROSSDOCK_DEVICE const PlannedRow* next(const Ctx& ctx) {
        if (at_ == num_) {
            num_ = look_up(ctx, batch_);
            at_ = 0;
        }
        return at_ < num_ ? &batch_.rows[at_++] : nullptr;
    }
    // The row that next will return, if already known.
    CROSSDOCK_DEVICE const PlannedRow* peek() const { return at_ < num_ ? &batch_.rows[at_] : nullptr; }

    // The row's places among the rows of the tensor.
    CROSSDOCK_DEVICE const uint32_t* slots(const PlannedRow& row) const {
        return batch_.slots + static_cast<uint32_t>(&row - batch_.rows) * c_.topk;
    }

    // Instead of next: fills a batch and returns the number of rows; 0: none are left.
    CROSSDOCK_DEVICE uint32_t look_up(const Ctx& ctx, const HtBatch& batch) {
        const uint32_t most = planned_rows(c_.topk) < kLanes ? planned_rows(c_.topk) : kLanes;
        const uint32_t num_ranks = c_.arena.num_ranks;
        uint32_t num = 0;
        CROSSDOCK_ROLLED
        while (num == 0 && sequence_.first + entry_ / num_ranks * sequence_.stride < end_) {
            ctx.warp_sync();
            const uint32_t lane = ctx.lane();
            PlannedRow row{};
            bool exists = false;
            const uint32_t at = sequence_.first + (entry_ + lane) / num_ranks * sequence_.stride;
            if (lane < most && at < end_) exists = find(at, (entry_ + lane) % num_ranks, row);
            const uint32_t index = ctx.warp_count_before(exists);
            num = ctx.warp_count(exists);
            if (exists) {
                row.num_slots = list(row, batch.slots + index * c_.topk);
                batch.rows[index] = row;
            }
            entry_ += most;
        }
        ctx.warp_sync();
        return num;
    }

  private:
    CROSSDOCK_DEVICE uint32_t list(const PlannedRow& row, uint32_t* slots) const {
        const uint32_t source = row.peer;
        if constexpr (places == Places::kByColumn)
            return list_slots_by_column(c_, source, row.chunk, row.bit, row.number, sequence_.limit, slots);
        return list_slots<places == Places::kOfChoices>(c_, source, row.chunk, row.bit, row.number, sequence_.limit,
                                                        slots);
    }
    CROSSDOCK_DEVICE bool find(uint32_t at, uint32_t n, PlannedRow& planned) const {
        const uint32_t num_ranks = c_.arena.num_ranks;
        planned.peer = (c_.rank + (sequence_.descends ? num_ranks - n : n)) % num_ranks;
        const uint32_t peer = planned.peer;
        const uint32_t state = states_[planned.peer];
        if (state == kDirect || (state == kAbsent && !sequence_.with_absent)) return false;
        const Share share = token_share(c_, peer, channel_);
        if (at >= share.size()) return false;
        const uint32_t token = share.first + at;
        planned.chunk = token / kChunkTokens;
        planned.bit = token % kChunkTokens;
        const ReceivedRow row = received_row(c_, peer, token, share);
        planned.number = row.number;
        planned.packet = row.packet;
        return row.exists && travels(c_, row.number);
    }

    const HtCommon& c_;
    const uint32_t* states_;
    HtBatch batch_;
    RowSequence sequence_;
    uint32_t channel_;
    uint32_t end_;
    uint32_t entry_ = 0;  // of the sequence: a token and a rank
    uint32_t at_ = 0;
    uint32_t num_ = 0;
};

}  // namespace
}  // namespace crossdock
