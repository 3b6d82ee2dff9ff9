// SPDX-License-Identifier: Apache-2.0
// A group's masks: which ranks are active, and how masked ranks are re-admitted.
#include <vector>

#include "core/error.h"
#include "core/group.h"
#include "kernels/ht/launch.h"
#include "kernels/ll/launch.h"

namespace crossdock {

void Group::expect_masks() const {
    require(config_.masking || config_.algorithm == NCCL_EP_ALGO_LOW_LATENCY, ncclInvalidUsage,
            "the group is of algorithm 1 (high throughput), whose config->enable_mask is ignored: make it with "
            "crossdockCreateGroup and options->ht_masks 1");
    require(config_.masking, ncclInvalidUsage, "the group was created with config->enable_mask 0, expected 1");
}

void Group::mask_query(int* mask_status, cudaStream_t stream) {
    expect_working();
    expect_masks();
    require(mask_status != nullptr, ncclInvalidArgument, "mask_status is NULL");
    DeviceScope device(runtime());
    runtime().copy_on_device(mask_status, wait_scope(OperationKind::kNone, 0).mask, sizeof(int) * config_.num_ranks,
                             stream);
}

void Group::mask_update(const int* mask, cudaStream_t stream) {
    expect_working();
    expect_masks();
    require(mask != nullptr, ncclInvalidArgument, "mask is NULL");
    std::vector<uint32_t> active(config_.num_ranks);
    for (uint32_t peer = 0; peer < config_.num_ranks; ++peer) active[peer] = mask[peer] != 0 ? 1 : 0;
    // In HT mode a rank's rows to itself are sent like all others.
    if (ht_arena_ != nullptr) active[rank()] = 1;
    DeviceScope device(runtime());
    runtime().copy_to_device(wait_scope(OperationKind::kNone, 0).mask, active.data(), sizeof(uint32_t) * active.size(),
                             stream);
}

void Group::mask_clean(cudaStream_t stream) {
    expect_working();
    expect_masks();
    DeviceScope device(runtime());
    require(!runtime().is_capturing(stream), ncclInvalidUsage, "ncclEpMaskClean cannot be captured into a graph");
    for (const auto& arena : arenas_) {
        require(arena->pending_splits == 0, ncclInvalidUsage,
                "{} send_only operations are pending: complete them before ncclEpMaskClean", arena->pending_splits);
    }
    ++num_cleans_;
    for (const auto& arena : arenas_) {
        const LlMaskCleanArgs args{
            mask_exchange(arena->team.peers, LlArenaLayout::of(arena->geometry).barrier.offset, arena->team.reach),
            reinterpret_cast<LlArenaState*>(arena->state.data())};
        before_operation(stream);
        launch<LlMaskClean>(runtime(), args, LlMaskClean::shape(runtime()), stream);
        after_operation(stream);
    }
    if (ht_arena_ != nullptr) {
        const uint64_t barrier = HtArenaLayout::of(ht_arena_->geometry).barrier.offset;
        const HtMaskCleanArgs args{mask_exchange(ht_arena_->memory->peers, barrier, {}),
                                   reinterpret_cast<HtState*>(ht_arena_->state.data())};
        before_operation(stream);
        launch<HtMaskClean>(runtime(), args, HtMaskClean::shape(runtime()), stream);
        after_operation(stream);
    }
    if (arenas_.empty() && ht_arena_ == nullptr) {
        const std::vector<uint32_t> all_active(config_.num_ranks,
                                               1);  // no operation has run: there is nothing to agree on
        runtime().copy_to_device(wait_scope(OperationKind::kNone, 0).mask, all_active.data(),
                                 sizeof(uint32_t) * all_active.size(), stream);
    }
    runtime().synchronize(stream);
}

MaskExchange Group::mask_exchange(const PeerMap& peers, uint64_t barrier_offset, const Reach& reach) const {
    return {peers,
            barrier_offset,
            config_.num_ranks,
            static_cast<uint32_t>(rank()),
            wait_scope(OperationKind::kMaskClean, 0),
            num_cleans_ & kMaxPayload,
            reach};
}

int Group::async_error() const {
    expect_masks();
    return static_cast<int>(__atomic_load_n(&status_->async_error, __ATOMIC_ACQUIRE));
}

void Group::clear_error() {
    expect_masks();
    __atomic_store_n(&status_->async_error, 0u, __ATOMIC_RELEASE);
    // The next expired wait and the next fault are recorded again.
    __atomic_store_n(&status_->expired.claimed, 0u, __ATOMIC_RELEASE);
    __atomic_store_n(&status_->fault.complete, 0u, __ATOMIC_RELEASE);
    __atomic_store_n(&status_->fault.claimed, 0u, __ATOMIC_RELEASE);
}

}  // namespace crossdock
