// SPDX-License-Identifier: Apache-2.0
#include "core/ht/handle.h"

#include <algorithm>
#include <cstddef>

#include "core/enum_table.h"
#include "core/error.h"
#include "core/ht/plan.h"
#include "core/layouts.h"
#include "core/structs.h"
#include "kernels/ht/launch.h"

namespace crossdock {
namespace {

// The top-k that the handle's memory is made for; num_topk -1: each Update brings its own.
uint32_t checked_topk(const Group& group, ncclEpLayout_t layout, int num_topk) {
    const GroupConfig& config = group.config();
    row_of_mode(kLayouts, enum_bits(layout), NCCL_EP_ALGO_HIGH_THROUGHPUT, "layout");
    const uint32_t largest = std::min<uint32_t>(kMaxTopk, config.num_experts);
    require(num_topk <= 0 || static_cast<uint32_t>(num_topk) <= largest, ncclInvalidArgument,
            "num_topk is {}, allowed: 1..{} (num_experts is {}), or -1", num_topk, largest, config.num_experts);
    const uint32_t bound = config.num_topk > 0 ? std::min(config.num_topk, largest) : largest;
    require(num_topk <= 0 || config.num_topk == 0 || static_cast<uint32_t>(num_topk) <= config.num_topk,
            ncclInvalidUsage, "num_topk is {}, allowed: at most the group's config->num_topk ({})", num_topk,
            config.num_topk);
    return num_topk > 0 ? static_cast<uint32_t>(num_topk) : bound;
}

HtHandleGeometry geometry_of(const GroupConfig& config, uint32_t topk) {
    return {config.num_ranks, config.lsa_team_size, config.experts_per_rank(), config.max_tokens, topk};
}

// Slots are numbered in 31 bits, including those of zones that are nearly all padding.
void expect_alignment(const GroupConfig& config, uint32_t topk, size_t alignment, const char* name) {
    const uint64_t experts = config.experts_per_rank();
    const uint64_t rows = uint64_t{config.num_ranks} * config.max_tokens;
    const uint64_t slots = rows * std::min<uint64_t>(topk, experts);
    const uint64_t most = slots < INT32_MAX ? (INT32_MAX - slots) / experts : 0;
    require(alignment <= std::max<uint64_t>(most, 1), ncclInvalidArgument,
            "{} is {}, allowed with {} experts per rank: at most {}", name, alignment, experts, most);
}

}  // namespace

size_t HtHandle::memory_bytes(const Group& group, ncclEpLayout_t layout, const ncclEpHandleConfig_t&, int num_topk) {
    return HtTables::bytes(geometry_of(group.config(), checked_topk(group, layout, num_topk)));
}

std::shared_ptr<Handle> HtHandle::create(const std::shared_ptr<Group>& group, ncclEpLayout_t layout,
                                         const ncclEpHandleConfig_t& config, int num_topk,
                                         const ncclEpTensor_t* handle_mem) {
    const uint32_t topk = checked_topk(*group, layout, num_topk);
    require(num_topk > 0 || num_topk == -1, ncclInvalidArgument, "num_topk is {}, allowed: 1 and more, or -1",
            num_topk);
    require(num_topk > 0 || handle_mem == nullptr || group->config().num_topk > 0, ncclInvalidArgument,
            "num_topk is -1, allowed with handle_mem only where the group's config->num_topk is set");
    const size_t alignment = config.dispatch_output_per_expert_alignment;
    if (layout == NCCL_EP_LAYOUT_EXPERT_MAJOR)
        expect_alignment(group->config(), topk, alignment, "config->dispatch_output_per_expert_alignment");
    std::shared_ptr<HtHandle> handle(new HtHandle(group, layout, topk));
    if (handle->is_expert_major() && alignment > 0) handle->alignment_ = static_cast<uint32_t>(alignment);
    if (handle->is_expert_major() && handle->is_eager()) {
        require(group->config().num_topk > 0, ncclInvalidUsage,
                "an expert-major handle of a group without max_recv_tokens_per_rank (eager) needs config->num_topk of "
                "the group");
    }
    handle->is_topk_open_ = num_topk < 0;
    handle->routed_topk_ = topk;
    handle->bind_memory(handle_mem, HtTables::bytes(handle->geometry()));
    handle->may_relocate_ = handle_mem != nullptr;
    handle->host_total_ = {group->handle_memory().take_word(),
                           [group](uint64_t* word) { group->handle_memory().give_back(word); }};
    handle->join_group();
    if (handle->may_relocate_) handle->join_sharers();
    return handle;
}

HtHandle::~HtHandle() { leave_sharers(); }

void HtHandle::release_memory() {
    Handle::release_memory();
    host_total_.reset();
    total_word_.reset();
}

HtHandleGeometry HtHandle::geometry() const { return geometry_of(group_->config(), topk_); }

uint32_t HtHandle::budget() const {
    const GroupConfig& config = group_->config();
    if (!is_eager()) return config.max_recv_tokens;
    const uint64_t rows = uint64_t{config.num_ranks} * config.max_tokens * std::max(1u, config.num_topk);
    const uint64_t padding = is_expert_major() ? uint64_t{config.experts_per_rank()} * (alignment_ - 1) : 0;
    return static_cast<uint32_t>(std::min<uint64_t>(rows + padding, UINT32_MAX));
}

HtCommon HtHandle::common(OperationKind operation, uint32_t channels) const {
    const HtArena& arena = group_->ht_arena();
    HtCommon common{};
    const bool has_rings = operation != OperationKind::kUpdate;
    common.arena = has_rings ? arena.geometry.with_channels(channels) : arena.geometry;
    common.offsets = HtArenaLayout::of(common.arena).offsets;
    common.peers = arena.team->peers;
    common.reach = arena.team->reach;
    common.outbox = arena.outbox;
    common.rank = group_->rank();
    common.state = reinterpret_cast<HtState*>(arena.state.data());
    common.tables = view_of<HtTables, uint64_t>(memory_, geometry());
    common.scope = group_->wait_scope(operation, number_);
    static_assert(static_cast<uint64_t>(OperationKind::kElasticCombine) <= Terms::max_of(Term::kOperation));
    common.terms = Terms{}
                       .with(Term::kOperation, static_cast<uint64_t>(operation))
                       .with(Term::kTopk, routed_topk_)
                       .with(Term::kLayout, enum_bits(layout_));
    common.expert_major = is_expert_major();
    common.topk = routed_topk_;
    common.num_tokens = num_tokens_.value_or(0);
    common.budget = budget();
    common.channels = channels;
    return common;
}

void HtHandle::add_agreed(HtCommon& common) const {
    common.terms = common.terms.with_agreed({tag_, common.channels}, common.scope.operation == OperationKind::kUpdate);
}

HtCounters HtHandle::read_counters(const ncclEpLayoutInfo_t& info, CallMemory& memory) const {
    HtCounters counters{};
    std::optional<ncclDataType_t> shared_dtype;
    const auto read = [&](const ncclEpTensor_t* caller, const char* name, size_t extent, bool allows_64) -> void* {
        if (caller == nullptr) return nullptr;
        const Tensor tensor = read_counter(group_->communicator(), caller, name, extent, allows_64);
        require(!is_expert_major() || !shared_dtype || *shared_dtype == tensor.dtype, ncclInvalidArgument,
                "{} is of type {}, expected that of the other counters: {}", name, dtype_name(tensor.dtype),
                dtype_name(shared_dtype.value_or(ncclInt32)));
        shared_dtype = tensor.dtype;
        memory.writes(tensor);
        return tensor.data;
    };
    const size_t experts = group_->config().experts_per_rank();
    counters.experts = read(info.expert_counters, "layout_info->expert_counters", experts, is_expert_major());
    counters.are_64_bit = shared_dtype == ncclInt64;
    if (is_expert_major()) {
        counters.offsets = read(info.expert_offsets, "layout_info->expert_offsets", experts, true);
        counters.are_64_bit = shared_dtype == ncclInt64;
    }
    counters.total = read(info.recv_total_counter, "layout_info->recv_total_counter", 1, true);
    counters.total_is_64_bit = shared_dtype == ncclInt64 && counters.total != nullptr;
    return counters;
}

void HtHandle::update(const ncclEpTensor_t* caller, const ncclEpLayoutInfo_t* caller_info, cudaStream_t stream) {
    group_->expect_working();
    const GroupConfig& config = group_->config();
    const Tensor topk_idx = read_tensor(group_->communicator(), caller, "topk_idx");
    expect_dtype(topk_idx, {ncclInt32, ncclInt64});
    if (is_topk_open_) {
        require(topk_idx.ndim == 2 && topk_idx.sizes[1] > 0 && topk_idx.sizes[1] <= topk_, ncclInvalidArgument,
                "topk_idx has {} dimensions and {} columns, expected [tokens, at most {}]", topk_idx.ndim,
                topk_idx.sizes[1], topk_);
    } else {
        expect_shape(topk_idx, {kAnySize, topk_}, "[tokens, the handle's top-k]");
    }
    require(topk_idx.sizes[0] <= config.max_tokens, ncclInvalidArgument,
            "topk_idx has {} rows, allowed: at most max_dispatch_tokens_per_rank ({})", topk_idx.sizes[0],
            config.max_tokens);
    const auto info = optional_struct(caller_info, NCCL_EP_LAYOUT_INFO_V1_SIZE, "layout_info");
    CallMemory memory;
    memory.reads(topk_idx);
    const HtCounters counters = read_counters(info, memory);
    memory.expect_apart();

    routed_topk_ = static_cast<uint32_t>(topk_idx.sizes[1]);
    num_tokens_ = static_cast<uint32_t>(topk_idx.sizes[0]);
    total_.reset();
    HtUpdateArgs args{};
    args.common = common(OperationKind::kUpdate, blocks().update);
    args.topk_idx = topk_idx.data;
    args.ids_are_64_bit = topk_idx.dtype == ncclInt64;
    args.alignment = alignment_;
    args.drops = config.overflow_policy == NCCL_EP_OVERFLOW_DROP;
    args.counters = counters;
    DeviceScope device(group_->runtime());
    // In a graph every replay has the same number; then the host does not rely on it.
    args.host_total = group_->runtime().is_capturing(stream) ? nullptr : host_total_.get();
    update_number_ = group_->next_update();
    args.update_number = update_number_;
    routed_cleans_ = args.host_total == nullptr ? kAnyClean : group_->num_cleans();
    args.cleans = routed_cleans_;
    args.maker = maker();
    add_agreed(args.common);
    const LaunchShape shape = plan_ht_update(*group_, args);
    before_operation(stream);
    launch<HtUpdate>(group_->runtime(), args, shape, stream);
    has_routing_ = true;
    has_columns_ = false;
    was_captured_ = args.host_total == nullptr;
    total_word_ = host_total_;
    tell_sharers();
    group_->after_operation(stream);
}

void HtHandle::learn_total(bool wait) {
    if (total_ || was_captured_ || total_word_ == nullptr) return;
    const auto look = [&] {
        const uint64_t seen = __atomic_load_n(total_word_.get(), __ATOMIC_ACQUIRE);
        if (seen >> 32 == update_number_) total_ = static_cast<uint32_t>(seen);
    };
    look();
    if (total_ || !wait) return;
    group_->await_operations();
    look();
    group_->expect_working();
}

void HtHandle::expect_routing(cudaStream_t stream, const ncclEpTensor_t* own_rows, const char* name) {
    expect_not_overwritten();
    std::optional<Tensor> rows;
    if (may_relocate_ && name != nullptr) {
        rows = read_tensor(group_->communicator(), own_rows, name);
        expect_shape(*rows, {kAnySize, kAnySize}, "[rows of topk_idx, hidden]");
    }
    const auto is_current = [&] { return routed_cleans_ == kAnyClean || routed_cleans_ == group_->num_cleans(); };
    // The caller may have copied another routing into the memory since: check that before refusing the call.
    const bool may_be_other =
        may_relocate_ && has_routing_ && (!is_current() || (rows && rows->sizes[0] != *num_tokens_));
    if (!has_routing_ || may_be_other) read_routing(stream, rows);
    require(is_current(), ncclInvalidUsage,
            "the handle's routing is from before the latest ncclEpMaskClean: call ncclEpUpdateHandle first");
}

uint32_t HtHandle::num_received(cudaStream_t stream) {
    group_->expect_working();
    expect_routing(stream, nullptr, nullptr);
    learn_total(true);
    require(
        total_.has_value(), ncclInvalidUsage,
        "the handle's update was captured into a graph, so the host does not know the number of received rows: read "
        "recv_total_counter");
    return std::min(*total_, budget());
}

void HtHandle::complete(const ncclEpCompleteConfig_t* config, cudaStream_t) {
    group_->expect_working();
    optional_struct(config, NCCL_EP_COMPLETE_CONFIG_V1_SIZE, "config");  // operations are never split in HT mode
}

void HtHandle::set_sums(crossdockSums_t) {
    fail(ncclInvalidUsage,
         "the handle belongs to an HT group, allowed for crossdockHandleSetSums: LL expert-major handles");
}

void HtHandle::set_alignment(unsigned int alignment) {
    require(is_expert_major(), ncclInvalidUsage,
            "the handle's layout is flat, allowed for crossdockHandleSetAlignment: expert-major");
    require(!may_relocate_, ncclInvalidUsage,
            "the handle's memory is the caller's, allowed for crossdockHandleSetAlignment: handles without handle_mem");
    expect_alignment(group_->config(), topk_, alignment, "alignment");
    const uint32_t rows = std::max(alignment, 1u);
    if (rows != alignment_) forget_routing();
    alignment_ = rows;
}

void HtHandle::set_sms(unsigned int num_sms) { sms_ = num_sms; }

Handle::Sms HtHandle::sms() const {
    group_->expect_working();
    return blocks();
}

Handle::Sms HtHandle::blocks() const {
    const HtArena& arena = group_->ht_arena();
    const HtBlocks& usual = arena.blocks;
    if (sms_ == 0) {
        return {arena.update_blocks, is_expert_major() ? usual.dispatch : usual.flat_dispatch,
                is_expert_major() ? usual.combine : usual.flat_combine};
    }
    return {std::min(sms_, arena.update_blocks), std::min(sms_, usual.most_dispatch),
            std::min(sms_, usual.most_combine)};
}

uint32_t HtHandle::combine_blocks(HtWire wire) const {
    return is_quantised(wire) && sms_ == 0 ? group_->ht_arena().blocks.mxfp8_combine : blocks().combine;
}

void HtHandle::rebind(const ncclEpTensor_t*) {
    fail(ncclInvalidUsage,
         "the handle belongs to an HT group, allowed for crossdockHandleRebind: LL expert-major handles");
}

void HtHandle::routing(const ncclEpTensor_t*, cudaStream_t) {
    fail(ncclInvalidUsage,
         "the handle belongs to an HT group, allowed for crossdockHandleRouting: LL expert-major handles");
}

void HtHandle::sources(const ncclEpTensor_t*, const ncclEpTensor_t*, cudaStream_t) {
    fail(ncclInvalidUsage,
         "the handle belongs to an HT group, allowed for crossdockHandleSources: LL expert-major handles");
}

void HtHandle::dropped_tokens(uint64_t* count, cudaStream_t stream) {
    group_->expect_working();
    require(count != nullptr, ncclInvalidArgument, "count is NULL");
    DeviceScope device(group_->runtime());
    expect_routing(stream, nullptr, nullptr);
    // In stream order, since another handle may use the memory afterwards.
    before_operation(stream);
    group_->runtime().copy_on_device(count, memory_ + offsetof(HtRouting, dropped), sizeof(*count), stream);
    group_->after_operation(stream);
}

}  // namespace crossdock
