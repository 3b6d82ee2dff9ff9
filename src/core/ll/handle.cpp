// SPDX-License-Identifier: Apache-2.0
#include "core/ll/handle.h"

#include <algorithm>
#include <utility>

#include "core/enum_table.h"
#include "core/error.h"
#include "core/layouts.h"
#include "core/ll/plan.h"
#include "core/log.h"
#include "core/structs.h"

namespace crossdock {
namespace {

void check_handle(const Group& group, ncclEpLayout_t layout, int num_topk) {
    row_of_mode(kLayouts, enum_bits(layout), NCCL_EP_ALGO_LOW_LATENCY, "layout");
    const uint32_t largest = std::min<uint32_t>(kMaxTopk, group.config().num_experts);
    require(num_topk > 0 && static_cast<uint32_t>(num_topk) <= largest, ncclInvalidArgument,
            "num_topk is {}, allowed: 1..{} (num_experts is {})", num_topk, largest, group.config().num_experts);
}

}  // namespace

size_t LlHandle::memory_bytes(const Group& group, ncclEpLayout_t layout, int num_topk) {
    check_handle(group, layout, num_topk);
    const GroupConfig& settings = group.config();
    return LlHandleLayout::of(settings.num_ranks, settings.max_tokens, static_cast<uint32_t>(num_topk),
                              settings.has_several_teams())
        .bytes;
}

std::shared_ptr<Handle> LlHandle::create(const std::shared_ptr<Group>& group, ncclEpLayout_t layout, int num_topk,
                                         const ncclEpTensor_t* handle_mem) {
    const size_t bytes = memory_bytes(*group, layout, num_topk);
    std::shared_ptr<LlHandle> handle(new LlHandle(group, layout, static_cast<uint32_t>(num_topk)));
    if (handle_mem != nullptr) handle->bind_memory(handle_mem, bytes);
    const size_t arenas_before = group->num_arenas();
    handle->arena_ = group->arena_for(layout, handle->topk_);
    if (handle_mem == nullptr) handle->bind_memory(nullptr, bytes);
    if (handle->is_expert_major() && group->config().sums_at_sender) handle->sums_ = CROSSDOCK_SUMS_SENDER;
    // No rank's kernels may start to wait while other ranks still set up memory: on a shared device that would never
    // finish.
    if (group->num_arenas() != arenas_before) {
        Communicator& communicator = group->communicator();
        communicator.barrier("ncclEpInitHandle", communicator.setup_timeout_ns(group->config().timeout_ns));
    }
    handle->join_group();
    return handle;
}

void LlHandle::release_memory() {
    Handle::release_memory();
    arena_.reset();
    pending_ = std::monostate{};
}

LlHandleLayout LlHandle::layout() const {
    const GroupConfig& config = group_->config();
    return LlHandleLayout::of(config.num_ranks, config.max_tokens, topk_, config.has_several_teams());
}

LlCommon LlHandle::common(OperationKind operation, bool send_only) const {
    LlCommon common{};
    common.arena = arena_->geometry;
    common.offsets = LlArenaLayout::of(arena_->geometry).offsets;
    common.peers = arena_->team.peers;
    common.reach = arena_->team.reach;
    common.outbox = LlOutboxLayout::of(arena_->geometry).outbox;
    common.rank = group_->rank();
    common.halves = send_only ? kSendHalf : kSendHalf | kReceiveHalf;
    common.state = reinterpret_cast<LlArenaState*>(arena_->state.data());
    common.handle = layout().offsets;
    common.cells = layout().cells;
    common.handle_memory = memory_;
    common.scope = group_->wait_scope(operation, number_);
    common.scope.entries = common.peers.at(common.rank, common.offsets.entries.offset);
    common.set(Term::kOperation, static_cast<uint64_t>(operation));
    common.set(Term::kTopk, topk_);
    common.set(Term::kLayout, enum_bits(layout_));
    common.expert_major = is_expert_major();
    const uint64_t experts_per_rank = group_->config().experts_per_rank();
    common.rank_of_expert_mult =
        static_cast<uint32_t>(((uint64_t{1} << kRankOfExpertShift) + experts_per_rank - 1) / experts_per_rank);
    common.ids_are_64_bit = routing_.ids_are_64_bit;
    common.traps_overflow = group_->config().overflow_policy == NCCL_EP_OVERFLOW_TRAP;
    common.topk = topk_;
    common.num_tokens = routing_.num_tokens;
    common.topk_idx = routing_.topk_idx;
    common.overlap = overlap_;
    if (operation != OperationKind::kCombine) common.overlap.done_value = 0;
    return common;
}

void LlHandle::update(const ncclEpTensor_t* caller, const ncclEpLayoutInfo_t* layout_info, cudaStream_t) {
    group_->expect_working();
    require(layout_info == nullptr, ncclInvalidArgument,
            "layout_info is not NULL, expected NULL in LL mode: pass it to ncclEpDispatch");
    const Routing routing = read_routing(caller, kAnySize, "[tokens, the handle's top-k]");
    expect_none_pending();
    has_routing_ = true;
    routing_ = routing;
}

void LlHandle::rebind(const ncclEpTensor_t* topk_idx) {
    group_->expect_working();
    require(is_expert_major(), ncclInvalidUsage,
            "the handle's layout is rank-major, whose rows are of all choices on a rank: only expert-major handles "
            "leave choices out");
    require(sums_ == CROSSDOCK_SUMS_EXACT, ncclInvalidUsage,
            "the handle has sender's sums, which are of all choices on a rank: only exact sums leave choices out");
    expect_dispatched_routing();
    expect_none_pending();
    routing_ = read_routing(topk_idx, dispatched_->num_tokens, "[tokens of the dispatch, the handle's top-k]");
    dispatched_ = routing_;
    is_rebound_ = true;
}

LlHandle::Routing LlHandle::read_routing(const ncclEpTensor_t* caller, size_t num_tokens, const char* meaning) const {
    const Tensor topk_idx = read_tensor(group_->communicator(), caller, "topk_idx");
    expect_dtype(topk_idx, {ncclInt32, ncclInt64});
    expect_shape(topk_idx, {num_tokens, topk_}, meaning);
    require(topk_idx.sizes[0] <= group_->config().max_tokens, ncclInvalidArgument,
            "topk_idx has {} rows, allowed: at most max_dispatch_tokens_per_rank ({})", topk_idx.sizes[0],
            group_->config().max_tokens);
    return {topk_idx.data, topk_idx.dtype == ncclInt64, static_cast<uint32_t>(topk_idx.sizes[0])};
}

void LlHandle::set_alignment(unsigned int) {
    fail(ncclInvalidUsage, "the handle belongs to an LL group, allowed for crossdockHandleSetAlignment: HT handles");
}

Handle::Sms LlHandle::sms() const {
    fail(ncclInvalidUsage, "the handle belongs to an LL group, allowed for crossdockHandleSms: HT handles");
}

void LlHandle::set_sums(crossdockSums_t sums) {
    group_->expect_working();
    require(is_expert_major(), ncclInvalidUsage,
            "the handle's layout is rank-major, whose rows are summed by the caller: sums apply to LL expert-major "
            "handles");
    const unsigned int bits = enum_bits(sums);
    require(bits <= CROSSDOCK_SUMS_SENDER, ncclInvalidArgument, "sums is {}, allowed: 0 (exact), 1 (sender)", bits);
    require(sums == CROSSDOCK_SUMS_EXACT || !group_->config().invariant, ncclInvalidUsage,
            "sums is 1 (sender), which rounds the sums of ranks: an invariant group has exact sums");
    require(sums == CROSSDOCK_SUMS_EXACT || !is_rebound_, ncclInvalidUsage,
            "crossdockHandleRebind may have left choices out, which only exact sums can: call ncclEpDispatch first");
    sums_ = sums;
}

void LlHandle::expect_routing() const {
    require(has_routing_, ncclInvalidUsage, "the handle has no routing: call ncclEpUpdateHandle first");
}

Tensor LlHandle::topk_idx() const {
    Tensor tensor;
    tensor.name = "the handle's topk_idx";
    tensor.dtype = routing_.ids_are_64_bit ? ncclInt64 : ncclInt32;
    tensor.ndim = 2;
    tensor.sizes = {routing_.num_tokens, topk_};
    tensor.data = routing_.topk_idx;
    return tensor;
}

void LlHandle::expect_dispatched_routing() const {
    require(dispatched_.has_value(), ncclInvalidUsage,
            "nothing was dispatched with this handle: call ncclEpDispatch first");
    require(dispatched_ == routing_, ncclInvalidUsage,
            "ncclEpUpdateHandle has bound other routing ({} tokens) since the last dispatch ({} tokens), whose rows a "
            "combine returns: call ncclEpDispatch first",
            routing_.num_tokens, dispatched_->num_tokens);
}

void LlHandle::expect_none_pending() const {
    require(std::holds_alternative<std::monostate>(pending_), ncclInvalidUsage,
            "a send_only operation of this handle is pending: call ncclEpComplete first");
}

void LlHandle::expect_may_start(bool send_only) const {
    expect_none_pending();
    require(!send_only || arena_->pending_splits < arena_->geometry.num_buffers - 1, ncclInvalidUsage,
            "{} send_only operations of this group are pending, allowed: at most {}: call ncclEpComplete with one of "
            "their handles, or destroy it",
            arena_->pending_splits, arena_->geometry.num_buffers - 1);
}

void LlHandle::complete(const ncclEpCompleteConfig_t* config, cudaStream_t stream) {
    group_->expect_working();
    optional_struct(config, NCCL_EP_COMPLETE_CONFIG_V1_SIZE, "config");
    finish_pending(kReceiveHalf, stream);
}

void LlHandle::cancel_pending() {
    try {
        finish_pending(kReceiveHalf | kCancel, nullptr);
    } catch (const std::exception& error) {
        debug(error.what());  // the group has failed: no buffer is left to release
    }
}

void LlHandle::finish_pending(uint32_t halves, cudaStream_t stream) {
    const auto finish = [&]<typename Kernel>(Pending<Kernel>& pending) {
        --arena_->pending_splits;
        pending.args.common.halves = halves;
        if constexpr (std::is_same_v<Kernel, LlCombine>) {
            // The rows are sent, so there are no experts to leave SMs to, unless the caller says so.
            if (std::exchange(pending.args.common.overlap.done_value, 0u) != 0)
                pending.shape = plan_ll_combine(*group_, pending.args, num_sms_);
        }
        issue<Kernel>(pending.args, pending.shape, stream);
    };
    try {
        if (auto* dispatch = std::get_if<Pending<LlDispatch>>(&pending_)) finish(*dispatch);
        if (auto* combine = std::get_if<Pending<LlCombine>>(&pending_)) finish(*combine);
    } catch (...) {
        pending_ = std::monostate{};
        throw;
    }
    pending_ = std::monostate{};
}

void LlHandle::dropped_tokens(uint64_t*, cudaStream_t) {
    fail(ncclInvalidUsage, "the handle belongs to an LL group, allowed for crossdockHandleDroppedTokens: HT handles");
}

void LlHandle::routing(const ncclEpTensor_t* caller, cudaStream_t stream) {
    group_->expect_working();
    require(is_expert_major(), ncclInvalidUsage,
            "the handle's layout is rank-major, allowed for crossdockHandleRouting: expert-major");
    require(dispatched_.has_value(), ncclInvalidUsage,
            "nothing was dispatched with this handle: call ncclEpDispatch first");
    const Tensor topk_idx = read_tensor(group_->communicator(), caller, "topk_idx");
    expect_dtype(topk_idx, {ncclInt32});
    expect_shape(topk_idx, {dispatched_->num_tokens, topk_}, "[tokens of the dispatch, the handle's top-k]");
    DeviceScope device(group_->runtime());
    before_operation(stream);
    group_->runtime().copy_on_device(topk_idx.data, layout().dispatched_ids.in(memory_),
                                     sizeof(int32_t) * dispatched_->num_tokens * topk_, stream);
    group_->after_operation(stream);
}

void LlHandle::sources(const ncclEpTensor_t* caller_tokens, const ncclEpTensor_t* caller_ranges, cudaStream_t stream) {
    group_->expect_working();
    require(is_expert_major(), ncclInvalidUsage,
            "the handle's layout is rank-major, allowed for crossdockHandleSources: expert-major");
    require(dispatched_.has_value() && !std::holds_alternative<Pending<LlDispatch>>(pending_), ncclInvalidUsage,
            "the handle has no finished dispatch: call ncclEpDispatch, and ncclEpComplete after send_only");
    const GroupConfig& config = group_->config();
    const Tensor tokens = read_tensor(group_->communicator(), caller_tokens, "tokens");
    const Tensor ranges = read_tensor(group_->communicator(), caller_ranges, "ranges");
    expect_dtype(tokens, {ncclInt32});
    expect_dtype(ranges, {ncclInt64});
    expect_shape(tokens, {config.experts_per_rank(), size_t{config.num_ranks} * config.max_tokens},
                 "[experts per rank, ranks * max_dispatch_tokens_per_rank]");
    expect_shape(ranges, {config.experts_per_rank(), config.num_ranks}, "[experts per rank, ranks]");
    LlSourcesArgs args{};
    args.common = common(OperationKind::kDispatch, false);
    args.tokens = reinterpret_cast<int32_t*>(tokens.data);
    args.ranges = reinterpret_cast<int64_t*>(ranges.data);
    DeviceScope device(group_->runtime());
    before_operation(stream);
    launch<LlSources>(group_->runtime(), args, LlSources::shape(group_->runtime()), stream);
    group_->after_operation(stream);
}

}  // namespace crossdock
