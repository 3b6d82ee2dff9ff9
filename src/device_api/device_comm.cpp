// SPDX-License-Identifier: Apache-2.0
#include "device_api/device_comm.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <type_traits>

#include "core/boundary.h"
#include "core/process.h"
#include "device/cpu/remote_memory.h"
#include "fabric/communicator.h"

namespace crossdock::device_api {
namespace {

static_assert(std::has_unique_object_representations_v<crossdockDevCommNeeds>);

constexpr int kMaxCount = 1 << 16;
constexpr int kMaxContexts = 64;
constexpr uint64_t kDrainNs = 5'000'000'000;
constexpr size_t kWordsApart = 16;   // 128 bytes: processors fetch lines of 64 in pairs
constexpr int kFull = 1, kRail = 2;  // ncclGinConnectionType_t

struct Registry {
    std::atomic<uint64_t> changes{1};  // a thread's cached lookup is valid until the next change
    ForkSafeMutex mutex{[this] { ++changes; }};
    std::map<uint64_t, std::shared_ptr<DeviceComm>> all;
    uint64_t last_id = 0;
};
Registry& registry() {
    static auto* instance = new Registry;  // threads may use it while the process ends
    return *instance;
}
const MadeAtLoad registry_made_at_load(registry);

std::shared_ptr<DeviceComm> look_up(uint64_t id) {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().all.find(id);
    require(found != registry().all.end(), ncclInvalidUsage,
            "the ncclDevComm was not made by ncclDevCommCreate, or is destroyed");
    found->second->maker.expect_this("the ncclDevComm");
    return found->second;
}

void require_count(int count, int max, const char* name) {
    require(count >= 0 && count <= max, ncclInvalidArgument, "reqs->{} is {}, allowed: 0..{}", name, count, max);
}

void check(const crossdockDevCommNeeds& needs) {
    require_count(needs.barriers, kMaxCount, "barrierCount");
    require_count(needs.lsa_barriers, kMaxCount, "lsaBarrierCount");
    require_count(needs.rail_gin_barriers, kMaxCount, "railGinBarrierCount");
    require_count(needs.world_gin_barriers, kMaxCount, "worldGinBarrierCount");
    require_count(needs.contexts, kMaxContexts, "ginContextCount");
    require_count(needs.signals, kMaxCount, "ginSignalCount");
    require_count(needs.counters, kMaxCount, "ginCounterCount");
    require_count(needs.queue_depth, kMaxCount, "ginQueueDepth");
    require(needs.connection >= 0 && needs.connection <= kRail, ncclInvalidArgument,
            "reqs->ginConnectionType is {}, allowed: 0..{}", needs.connection, kRail);
    require(needs.connection != 0 || (needs.signals == 0 && needs.counters == 0), ncclInvalidArgument,
            "reqs->ginConnectionType is NCCL_GIN_CONNECTION_NONE with {} signals and {} counters, expected FULL or "
            "RAIL",
            needs.signals, needs.counters);
    require(needs.connection == kFull || needs.world_gin_barriers == 0, ncclInvalidArgument,
            "reqs->worldGinBarrierCount is {}, expected 0 unless ginConnectionType is NCCL_GIN_CONNECTION_FULL",
            needs.world_gin_barriers);
    require(needs.connection != 0 || needs.rail_gin_barriers == 0, ncclInvalidArgument,
            "reqs->railGinBarrierCount is {}, expected 0 with NCCL_GIN_CONNECTION_NONE", needs.rail_gin_barriers);
    require_count(needs.list_lsa_barriers, kMaxCount, "resourceRequirementsList's LSA barriers");
    // A buffer's handle is its offset / 128, in 32 bits.
    constexpr uint64_t kMostResourceBytes = uint64_t{UINT32_MAX} * 128;
    require(needs.resource_bytes <= kMostResourceBytes, ncclInvalidArgument,
            "the buffers of reqs->resourceRequirementsList have {} bytes or more, allowed: at most {}",
            needs.resource_bytes, kMostResourceBytes);
    require(needs.bad_alignment == 0, ncclInvalidArgument,
            "bufferAlign of a requirement is {}, allowed: powers of two of at most 4096", needs.bad_alignment);
    require(needs.ll_a2a_blocks == 0 && needs.ll_a2a_slots == 0, ncclInvalidArgument,
            "reqs->lsaLLA2ABlockCount is {} and lsaLLA2ASlotCount {}, expected 0: use ncclLLA2ACreateRequirement",
            needs.ll_a2a_blocks, needs.ll_a2a_slots);
}

}  // namespace

int lsa_size(cpu::CpuCommunicator& communicator) {
    const int ranks = communicator.lsa_team_size();
    const char* value = std::getenv("NCCL_LSA_TEAM_SIZE");
    if (value == nullptr || *value == '\0') return ranks;
    char* end = nullptr;
    const long size = std::strtol(value, &end, 10);
    require(*end == '\0' && size >= 1 && size <= ranks && ranks % size == 0, ncclInvalidUsage,
            "NCCL_LSA_TEAM_SIZE is {}, allowed: divisors of the {} ranks of a host", value, ranks);
    return static_cast<int>(size);
}

DeviceComm::DeviceComm(std::shared_ptr<cpu::CpuCommunicator> its_communicator, const crossdockDevCommNeeds& its_needs,
                       uint64_t id)
    : needs(its_needs), communicator(std::move(its_communicator)) {
    // All ranks compare before one of them fails, so that they fail together.
    const auto num_ranks = static_cast<size_t>(communicator->num_ranks());
    std::vector<crossdockDevCommNeeds> all(num_ranks);
    communicator->all_gather(&needs, all.data(), sizeof(needs), "ncclDevCommCreate", cpu::join_timeout_ns());
    for (size_t rank = 1; rank < num_ranks; ++rank) {
        require(std::memcmp(&all[rank], &all[0], sizeof(needs)) == 0, ncclInvalidArgument,
                "the requirements of rank {} and rank 0 differ", rank);
    }
    check(needs);
    view = {};
    view.id = id;
    view.rank = communicator->rank();
    view.num_ranks = communicator->num_ranks();
    view.lsa_size = lsa_size(*communicator);
    view.lsa_rank = view.rank % view.lsa_size;
    require(needs.max_team <= view.lsa_size, ncclInvalidArgument,
            "a team with multimem spans {} ranks, allowed: at most the {} of an LSA team", needs.max_team,
            view.lsa_size);
    const bool has_gin = needs.connection != 0;
    view.num_contexts = has_gin ? std::max(needs.contexts, 1) : 0;
    view.num_signals = needs.signals;
    view.num_counters = needs.counters;
    view.lsa_barriers = needs.lsa_barriers;
    view.rail_gin_barriers = needs.rail_gin_barriers;
    view.world_gin_barriers = needs.world_gin_barriers;
    view.hybrid_barriers = needs.barriers;
    view.hybrid_lsa_handle = static_cast<uint32_t>(needs.lsa_barriers);
    view.list_lsa_handle = view.hybrid_lsa_handle + static_cast<uint32_t>(needs.barriers);
    view.multimem = needs.lsa_multimem;
    const int rail_size = view.num_ranks / view.lsa_size;
    num_barrier_signals_ = 0;
    // Per rank, one word for barriers that cover puts and one for those that do not.
    const auto take = [&](int barriers_times_ranks) {
        const int signals = 2 * barriers_times_ranks;
        const auto first = kBarrierSignal | static_cast<uint32_t>(num_barrier_signals_);
        num_barrier_signals_ += signals;
        return first;
    };
    view.rail_signal0 = take(needs.rail_gin_barriers * rail_size);
    view.world_signal0 = take(needs.world_gin_barriers * view.num_ranks);
    view.hybrid_rail_signal0 = take(needs.barriers * rail_size);
    view.hybrid_world_signal0 = take(needs.barriers * view.num_ranks);

    const auto padded = [](int words) {
        return (static_cast<size_t>(words) + kWordsApart - 1) / kWordsApart * kWordsApart;
    };
    signals_per_context_ = padded(needs.signals + num_barrier_signals_);
    counters_per_context_ = padded(needs.counters);
    const auto inboxes = static_cast<size_t>(needs.lsa_barriers + needs.barriers + needs.list_lsa_barriers) *
                         static_cast<size_t>(view.lsa_size);
    shadows_.resize(first_counter());
    epochs_.resize(inboxes);
    memory_ = communicator->allocate_symmetric(8 * (first_inbox() + inboxes + 1), cpu::join_timeout_ns());
    if (cpu::Scheduler* scheduler = communicator->runtime().cpu_executor()->scheduler()) {
        simulated = SimulatedGin::of(*scheduler);
        return;
    }
    if (remote() != nullptr) remote()->add_contexts(view.num_contexts);
    outbox = std::make_unique<Outbox>(chosen_type(), view.num_ranks, view.num_contexts, needs.queue_depth,
                                      communicator->ranks_on_machine(), remote() != nullptr);
}

size_t DeviceComm::signal_index(int context, uint32_t signal, const Caller& caller) const {
    const auto user_signals = static_cast<uint32_t>(needs.signals);
    const bool is_barrier = (signal & kBarrierSignal) != 0;
    const uint32_t index = signal & ~kBarrierSignal;
    require(index < (is_barrier ? static_cast<uint32_t>(num_barrier_signals_) : user_signals), ncclInvalidArgument,
            "{}: signal {} is out of range: the device communicator has {} (ginSignalCount)", caller, index,
            user_signals);
    return static_cast<size_t>(context) * signals_per_context_ + (is_barrier ? user_signals : 0) + index;
}

uint64_t* DeviceComm::signal(int rank, int context, uint32_t signal, const Caller& caller) const {
    return reinterpret_cast<uint64_t*>(memory_->peers.at(rank, 0)) + signal_index(context, signal, caller);
}

uint64_t* DeviceComm::shadow(int context, uint32_t signal, const Caller& caller) {
    return &shadows_[signal_index(context, signal, caller)];
}

uint64_t* DeviceComm::counter(int context, uint32_t counter, const Caller& caller) const {
    require(counter < static_cast<uint32_t>(needs.counters), ncclInvalidArgument,
            "{}: counter {} is out of range: the device communicator has {} (ginCounterCount)", caller, counter,
            needs.counters);
    return reinterpret_cast<uint64_t*>(memory_->local) + first_counter() +
           static_cast<size_t>(context) * counters_per_context_ + counter;
}

uint64_t* DeviceComm::lsa_inbox(int owner, uint32_t barrier, int from) const {
    return reinterpret_cast<uint64_t*>(memory_->peers.at(owner, 0)) + first_inbox() +
           barrier * static_cast<size_t>(view.lsa_size) + static_cast<size_t>(from);
}

DeviceComm::LsaEpochs& DeviceComm::lsa_epochs(uint32_t barrier, int peer) {
    return epochs_[barrier * static_cast<size_t>(view.lsa_size) + static_cast<size_t>(peer)];
}

DeviceComm& find_device_comm(uint64_t id) {
    struct Found {
        uint64_t id = 0, changes = 0;
        DeviceComm* device_comm = nullptr;
    };
    thread_local Found t_found;
    const uint64_t changes = registry().changes.load(std::memory_order_acquire);
    if (t_found.id == id && t_found.changes == changes) return *t_found.device_comm;
    t_found = {id, changes, look_up(id).get()};
    return *t_found.device_comm;
}

void drain(const cpu::CpuCommunicator& communicator) {
    std::vector<std::shared_ptr<DeviceComm>> its;
    {
        const std::lock_guard lock(registry().mutex);
        for (const auto& [id, device_comm] : registry().all) {
            if (device_comm->communicator.get() == &communicator && device_comm->outbox != nullptr)
                its.push_back(device_comm);
        }
    }
    for (const auto& device_comm : its) {
        try {
            device_comm->outbox->drain(kDrainNs);
        } catch (const Error&) {  // the next call throws it
        }
    }
}

}  // namespace crossdock::device_api

using namespace crossdock;

namespace {

std::shared_ptr<cpu::CpuCommunicator> cpu_communicator(ncclComm_t comm) {
    auto communicator = std::dynamic_pointer_cast<cpu::CpuCommunicator>(communicator_of(comm));
    require(communicator != nullptr, ncclInvalidUsage, "comm is an NCCL communicator; kernels for it come from nvcc");
    return communicator;
}

}  // namespace

ncclResult_t crossdockDevCommCreate(ncclComm_t comm, const crossdockDevCommNeeds* needs, crossdockDevCommView* view) {
    return boundary([&] {
        require(needs != nullptr, ncclInvalidArgument,
                "reqs or outDevComm is NULL, or *reqs does not begin as NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER");
        auto& registry = device_api::registry();
        uint64_t id;
        {
            const std::lock_guard lock(registry.mutex);
            id = ++registry.last_id;
        }
        auto made = std::make_shared<device_api::DeviceComm>(cpu_communicator(comm), *needs, id);
        *view = made->view;
        const std::lock_guard lock(registry.mutex);
        registry.all[id] = std::move(made);
    });
}

ncclResult_t crossdockDevCommDestroy(ncclComm_t, uint64_t id) {
    return boundary([&] {
        auto& registry = device_api::registry();
        const auto last_reference = device_api::look_up(id);
        {
            const std::lock_guard lock(registry.mutex);
            require(registry.all.erase(id) == 1, ncclInvalidUsage,
                    "the ncclDevComm is being destroyed by another thread");
            ++registry.changes;
        }
        // Deliver pending operations now: their target memory is about to be freed, and the race detector checks them
        // once more.
        if (last_reference->simulated != nullptr) {
            last_reference->simulated->advance(UINT64_MAX);
            const std::string& violation = last_reference->simulated->races().violation();
            require(violation.empty(), ncclInternalError, "{}", violation);
        }
    });
}

ncclResult_t crossdockDevCommTeams(ncclComm_t comm, crossdockDevCommView* view) {
    return boundary([&] {
        const auto communicator = cpu_communicator(comm);
        const int size = device_api::lsa_size(*communicator);
        view->rank = communicator->rank();
        view->num_ranks = communicator->num_ranks();
        view->lsa_size = size;
        view->lsa_rank = communicator->rank() % size;
        view->gin_type = static_cast<int>(device_api::chosen_type());
    });
}
