// SPDX-License-Identifier: Apache-2.0
#include "core/group.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <random>

#include "core/diagnosis.h"
#include "core/error.h"
#include "core/handle.h"
#include "core/log.h"
#include "core/process.h"
#include "kernels/ht/launch.h"
#include "kernels/ll/launch.h"

namespace crossdock {
namespace {

constexpr size_t kMaskOffset = 16;
static_assert(sizeof(WaitControl) <= kMaskOffset, "the mask lies behind it");
constexpr uint32_t kExplicitTopk = 32;  // the largest that an explicit buffer size is taken to be meant for

// Starts at a random number, so that memory left by another process holds no number of this one.
uint64_t next_group_number() {
    static std::atomic<uint64_t> next{uint64_t{std::random_device{}()} << 32 | 1};
    return next++;
}
const MadeAtLoad group_number_made_at_load(next_group_number);

}  // namespace

std::shared_ptr<Group> Group::create(std::shared_ptr<Communicator> communicator, const ncclEpGroupConfig_t* caller,
                                     const crossdockGroupOptions_t* options) {
    const Environment environment = Environment::read();
    const GroupConfig config = GroupConfig::resolve(*communicator, caller, options, environment);
    DeviceScope device(communicator->runtime());
    config.expect_equal_on_all_ranks(*communicator, config.fields(), "ncclEpCreateGroup");
    std::shared_ptr<Group> group(new Group(std::move(communicator), config));
    if (environment.shared_bytes) group->shared_bytes_limit_ = static_cast<size_t>(*environment.shared_bytes);
    group->preallocate();
    // As in LlHandle::create.
    group->communicator().barrier("ncclEpCreateGroup", group->communicator().setup_timeout_ns(config.timeout_ns));
    if (group->order_ != nullptr && !environment.is_quiet) {
        group->watch_ = FailureWatch::watch(*group->status_, [own = group.get()] { warn(own->failure()->what()); });
    }
    if (environment.is_verbose && group->rank() == 0) {
        warn(fmt::format(
            "settings: {} ranks, {} experts, {} tokens per rank, {} bytes per token, SMs dispatch {} combine {}, "
            "timeout {} us, masks {}, LL128 rows {}, shared memory {} bytes per block, kernels {}",
            config.num_ranks, config.num_experts, config.max_tokens, config.max_token_bytes, config.dispatch_sms,
            config.combine_sms, config.timeout_ns / 1000, config.masking ? "on" : "off",
            ll128_tokens_of(group->communicator(), config) > 0 ? "allowed" : "off", group->max_shared_bytes(),
            group->runtime().overlaps_kernels() ? "overlap" : "one after the other"));
    }
    return group;
}

Group::Group(std::shared_ptr<Communicator> communicator, const GroupConfig& config)
    : number_(next_group_number()),
      communicator_(std::move(communicator)),
      config_(config),
      handle_memory_(communicator_->runtime(), config.alloc) {
    words_ = DeviceMemory(runtime(), config_.alloc, kMaskOffset + sizeof(uint32_t) * config.num_ranks);
    const std::vector<uint32_t> all_active(config.num_ranks, 1);
    runtime().copy_to_device(words_.data() + kMaskOffset, all_active.data(), sizeof(uint32_t) * all_active.size(),
                             nullptr);
    runtime().synchronize(nullptr);
    order_ = runtime().make_stream_order();
    status_ = static_cast<HostVisibleStatus*>(runtime().allocate_host_visible(sizeof(HostVisibleStatus)));
}

Group::~Group() {
    watch_.reset();
    if (status_ != nullptr) runtime().free_host_visible(status_);
}

// Allocates now what is known now, so that handles can be made without the other ranks.
void Group::preallocate() {
    if (config_.algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT) {
        auto arena = std::make_unique<HtArena>(*communicator_, config_);
        const std::lock_guard lock(memory_mutex_);
        ht_arena_ = std::move(arena);
        return;
    }
    if (config_.rdma_buffer_size == 0) {
        if (config_.num_topk > 0 && config_.num_topk <= kMaxTopk)
            arena_for(NCCL_EP_LAYOUT_EXPERT_MAJOR, config_.num_topk);
        return;
    }
    const uint32_t largest =
        std::min({config_.num_experts, kExplicitTopk, config_.num_topk > 0 ? config_.num_topk : kExplicitTopk});
    for (const ncclEpLayout_t layout : {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR}) {
        for (uint32_t topk = largest; topk > 0; --topk) {
            if (!ll_size_is_enough(config_, ll128_tokens_of(*communicator_, config_), layout, topk)) continue;
            arena_for(layout, topk);
            return;
        }
    }
}

void Group::destroy() noexcept {
    is_destroyed_ = true;
    Runtime& device = runtime();
    try {
        DeviceScope scope(device);
        device.synchronize_device();
#if defined(CROSSDOCK_TIMELINE)
        if (order_ != nullptr && config_.algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT) {
            cuda::write_phases(rank());
        } else if (order_ != nullptr) {
            cuda::write_dispatch_times(rank());
            cuda::write_combine_times(rank());
        }
#endif
        // Peers may still write into this rank's arena until they have drained as well. Whoever has interrupted this
        // rank does not wait for them either.
        const bool is_interrupted = is_interruption(diagnosis());
        if (is_interrupted) communicator_->stop_waiting();
        if (!communicator_->is_killed() && !is_interrupted)
            communicator_->barrier("ncclEpGroupDestroy", config_.timeout_ns);
    } catch (const std::exception& error) {
        debug(error.what());
    }
    watch_.reset();  // it reads the status
    const std::lock_guard lock(memory_mutex_);
    try {
        {
            DeviceScope scope(device);
            for (Handle* handle : handles_) handle->release_memory();
            handle_memory_.clear();
            arenas_.clear();
            ht_arena_.reset();
            order_.reset();
            words_.release();
            if (status_ != nullptr) device.free_host_visible(status_);
            status_ = nullptr;
        }
        // Handles keep this object, while the caller may destroy NCCL's communicator from now on.
        communicator_.reset();
    } catch (const std::exception& error) {
        debug(error.what());
    }
}

void Group::expect_working() const {
    require(!is_destroyed_, ncclInvalidUsage, "the group has been destroyed");
    require(!communicator_->is_killed(), ncclSystemError, "rank {} was killed by fault injection", rank());
    if (const auto error = failure()) throw *error;
}

std::optional<Error> Group::failure() const {
    if (__atomic_load_n(&status_->failed, __ATOMIC_ACQUIRE) == 0) return std::nullopt;
    const Overflow& overflow = status_->overflow;
    const bool is_ll = config_.algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    const char* const mode = is_ll ? "LL" : "HT";
    const bool has_overflowed = __atomic_load_n(&overflow.complete, __ATOMIC_ACQUIRE) != 0;
    if (has_overflowed && (overflow.operation == OperationKind::kElasticDispatch ||
                           overflow.operation == OperationKind::kElasticCombine)) {
        return Error(ncclInvalidUsage,
                     fmt::format("the group has failed: {} rows came to rank {}, whose tensor in {} {} has {}",
                                 overflow.total, overflow.rank, mode, name_of(overflow.operation), overflow.budget));
    }
    if (has_overflowed && is_ll) {
        return Error(
            ncclInvalidUsage,
            fmt::format("the group has failed: {} rows of one expert came to rank {}, allowed: at most {} (ranks "
                        "* max_dispatch_tokens_per_rank): rows of topk_idx repeat the expert",
                        overflow.total, overflow.rank, overflow.budget));
    }
    if (has_overflowed) {
        return Error(ncclInvalidUsage,
                     fmt::format("the group has failed: {} rows (expert-major: padded slots) came to rank {}, whose "
                                 "max_recv_tokens_per_rank is {}: raise it, or set overflow_policy to drop",
                                 overflow.total, overflow.rank, overflow.budget));
    }
    const PeerFault& fault = status_->fault;
    if (__atomic_load_n(&fault.complete, __ATOMIC_ACQUIRE) != 0) {
        return Error(fault.kind == PeerFaultKind::kDisagrees ? ncclInvalidUsage : ncclRemoteError,
                     describe(fault, rank(), mode));
    }
    const crossdockDiagnosis_t what = diagnosis();
    const std::string gone = what.valid != 0 ? communicator_->why_gone(what.peer) : "";
    return Error(ncclRemoteError,
                 describe(what, mode) + (gone.empty() ? whereabouts(what) : fmt::format("; {}", gone)));
}

std::shared_ptr<LlArena> Group::arena_for(ncclEpLayout_t layout, uint32_t topk) {
    const uint32_t ll128_tokens = ll128_tokens_of(*communicator_, config_);
    const LlGeometry needed = ll_geometry(config_, ll128_tokens, layout, topk);
    for (const auto& arena : arenas_) {
        if (arena->fits(needed)) return arena;
    }
    require(config_.rdma_buffer_size == 0 || ll_size_is_enough(config_, ll128_tokens, layout, topk), ncclInvalidUsage,
            "config->rdma_buffer_size {} is too small for top-{}: {} bytes are needed", config_.rdma_buffer_size, topk,
            LlArenaLayout::of(needed).bytes);
    // Ranks that differ would give memory of different sizes.
    config_.expect_equal_on_all_ranks(*communicator_, {{"num_topk", topk}}, "making a handle's memory");
    auto arena = std::make_shared<LlArena>(*communicator_, config_, needed);
    const std::lock_guard lock(memory_mutex_);
    return arenas_.emplace_back(std::move(arena));
}

WaitScope Group::wait_scope(OperationKind operation, uint64_t handle_number) const {
    WaitScope scope{};
    scope.operation = operation;
    scope.masking = config_.masking ? 1 : 0;
    scope.handle = handle_number;
    scope.timeout_ns = config_.timeout_ns;
    scope.control = reinterpret_cast<WaitControl*>(words_.data());
    scope.mask = reinterpret_cast<uint32_t*>(words_.data() + kMaskOffset);
    scope.status = status_;
    scope.rank = communicator_->rank();
    return scope;
}

uint64_t Group::add_handle(Handle* handle) {
    handles_.push_back(handle);
    return ++num_handles_ever_;
}

void Group::remove_handle(Handle* handle) {
    handles_.erase(std::remove(handles_.begin(), handles_.end(), handle), handles_.end());
}

void Group::give_back(DeviceMemory memory, bool is_in_graphs) {
    if (is_destroyed_) return;
    handle_memory_.give_back(std::move(memory), is_in_graphs);
    if (handle_memory_.has_retired() && (order_ == nullptr || order_->is_idle())) handle_memory_.return_to_hooks();
}

size_t Group::max_shared_bytes() const { return std::min(runtime().max_shared_bytes(), shared_bytes_limit_); }

void Group::limit_shared_bytes(int bytes) {
    require(!is_destroyed_, ncclInvalidUsage, "the group has been destroyed");
    require(bytes > 0 && static_cast<size_t>(bytes) <= runtime().max_shared_bytes(), ncclInvalidArgument,
            "the limit of shared memory is {} bytes, allowed: 1..{}, which the device has for a block", bytes,
            runtime().max_shared_bytes());
    shared_bytes_limit_ = static_cast<size_t>(bytes);
}

bool Group::before_operation(cudaStream_t stream) { return order_ != nullptr && order_->before_operation(stream); }

void Group::after_operation(cudaStream_t stream, bool rest_follows) {
    if (order_ != nullptr) order_->after_operation(stream, rest_follows);
    // Without an order the operation has finished, so a wait that expired in it is already known.
    if (order_ == nullptr) expect_working();
}

void Group::await_operations() {
    if (order_ != nullptr) order_->synchronize();
}

crossdockDiagnosis_t Group::diagnosis() const {
    crossdockDiagnosis_t diagnosis = CROSSDOCK_DIAGNOSIS_INIT;
    if (status_ != nullptr) read_diagnosis(status_->expired, rank(), diagnosis);
    return diagnosis;
}

crossdockTraffic_t Group::traffic() {
    crossdockTraffic_t traffic = CROSSDOCK_TRAFFIC_INIT;
    traffic.lsa_team_size = static_cast<int>(config_.lsa_team_size);
    if (!config_.has_several_teams()) return traffic;
    DeviceScope device(runtime());
    await_operations();
    std::array<uint64_t, kNumTraffic> sums{};
    const auto add = [&](const SymmetricMemory& memory, const Reach& reach) {
        std::array<uint64_t, kNumTraffic> words{};
        runtime().copy_to_host(words.data(), reach.words.traffic.in(memory.local), sizeof(words), nullptr);
        for (size_t i = 0; i < sums.size(); ++i) sums[i] += words[i];
    };
    for (const auto& arena : arenas_) add(*arena->memory, arena->team.reach);
    if (ht_arena_ != nullptr) add(*ht_arena_->memory, ht_arena_->team->reach);
    const auto sum = [&](Traffic what) { return sums[static_cast<size_t>(what)]; };
    traffic.rows_inside = sum(Traffic::kInsideRows);
    traffic.bytes_inside = sum(Traffic::kInsideBytes);
    traffic.rows_crossed = sum(Traffic::kCrossedRows);
    traffic.bytes_crossed = sum(Traffic::kCrossedBytes);
    traffic.puts = sum(Traffic::kPuts);
    traffic.signals = sum(Traffic::kSignals);
    return traffic;
}

size_t Group::symmetric_bytes() const {
    size_t bytes = 0;
    for (const auto& arena : arenas_) bytes += arena->memory->bytes;
    if (ht_arena_ != nullptr) bytes += ht_arena_->memory->bytes;
    return bytes;
}

size_t Group::local_bytes() const {
    size_t bytes = words_.bytes() + sizeof(HostVisibleStatus);
    for (const auto& arena : arenas_) bytes += arena->state.bytes();
    if (ht_arena_ != nullptr) bytes += ht_arena_->state.bytes();
    return bytes;
}

crossdockMemoryUse_t Group::memory_use() const {
    crossdockMemoryUse_t use = CROSSDOCK_MEMORY_USE_INIT;
    use.symmetric_bytes = symmetric_bytes();
    use.handle_bytes = handle_memory_.held_bytes();
    use.allocator_bytes = local_bytes() - sizeof(HostVisibleStatus) + use.handle_bytes;
    use.host_bytes = sizeof(HostVisibleStatus) + handle_memory_.word_bytes();
    return use;
}

}  // namespace crossdock
