// SPDX-License-Identifier: Apache-2.0
#include "fabric/cpu/process_communicator.h"

#include <sched.h>
#include <unistd.h>

#include <utility>

#include "core/error.h"
#include "fabric/cpu/mailbox.h"
#include "fabric/cpu/rendezvous.h"
#include "fabric/cpu/window_memory.h"
#include "runtime/cpu/clock.h"

namespace crossdock::cpu {
namespace {

// What a rank tells the others after mapping their memory, if no rank has ended.
constexpr uint64_t kMapped = UINT64_MAX;
constexpr uint64_t kNotMapped = UINT64_MAX - 1;

}  // namespace

// A rank's description of its piece of memory for the others.
struct ProcessCommunicator::Offer {
    int64_t process;
    int64_t fd;
    uint64_t file_bytes;
    uint64_t offset;
    uint64_t bytes;
    uint64_t is_valid;  // 0: it has none
};

class ProcessCommunicator::MappedPeers final : public SymmetricMemory {
  public:
    // Maps the offers of all local peers; `own` is this rank's memory. peer: whose offer it maps, if it throws.
    MappedPeers(const ProcessCommunicator& communicator, const std::vector<Offer>& offers, std::byte* own, int& peer) {
        const int rank = communicator.rank();
        for (peer = 0; peer < static_cast<int>(offers.size()); ++peer) {
            const Offer& offer = offers[static_cast<size_t>(peer)];
            if (peer == rank || !communicator.is_local(peer)) {
                addresses_.push_back(peer == rank ? own : unreachable_memory());
                continue;
            }
            const FileDescriptor file = open_of_process(offer.process, static_cast<int>(offer.fd));
            mappings_.emplace_back(file.get(), offer.file_bytes);
            addresses_.push_back(mappings_.back().data() + offer.offset);
        }
        local = own;
        bytes = offers[static_cast<size_t>(rank)].bytes;
        peers.table = addresses_.data();
    }
    void keep(Mapping mapping) { mappings_.push_back(std::move(mapping)); }

  private:
    std::vector<Mapping> mappings_;
    std::vector<std::byte*> addresses_;
};

ProcessCommunicator::ProcessCommunicator(int rank, int num_ranks, int first_local,
                                         const std::vector<ProcessIdentity>& local_processes,
                                         std::unique_ptr<Exchange> exchange,
                                         const std::shared_ptr<LocalExecutor>& executor)
    : CpuCommunicator(kProcessesBackend, rank, num_ranks, std::move(exchange), executor),
      first_local_(first_local),
      processes_(local_processes.begin(), local_processes.end()) {
    executor->watch_peers(num_ranks, *this);
}

std::unique_ptr<SymmetricMemory> ProcessCommunicator::allocate_symmetric(size_t bytes, uint64_t timeout_ns) {
    Offer offer{getpid(), -1, bytes, 0, bytes, 0};
    FileDescriptor file;
    Mapping mapping;
    std::string reason;
    try {
        expect_room(bytes);
        file = make_memory_file(bytes);
        mapping = Mapping(file.get(), bytes);
        offer.fd = file.get();
        offer.is_valid = 1;
    } catch (const Error& error) {
        reason = error.what();
    }
    auto memory = exchange(offer, mapping.data(), reason, ncclSystemError, "symmetric allocation", timeout_ns);
    memory->keep(std::move(mapping));
    return memory;
}

std::unique_ptr<SymmetricMemory> ProcessCommunicator::map_window(void* memory, size_t bytes, uint64_t timeout_ns) {
    Offer offer{getpid(), -1, 0, 0, bytes, 0};
    std::string reason = "the memory does not lie in one allocation of crossdockMemAlloc";
    if (const auto part = find_window_memory(memory, bytes)) {
        offer = {getpid(), part->fd, part->file_bytes, part->offset, bytes, 1};
        reason.clear();
    }
    return exchange(offer, static_cast<std::byte*>(memory), reason, ncclInvalidArgument, "window registration",
                    timeout_ns);
}

std::string ProcessCommunicator::why_gone(int rank) {
    const std::string reason = why_ended(rank);
    return reason.empty() && has_left(rank) ? "it has left the communicator" : reason;
}

// A process that ends closes its files a moment before it counts as ended.
bool ProcessCommunicator::ends_soon(int rank) {
    constexpr uint64_t kMostNs = 100'000'000;
    const uint64_t end_ns = steady_now_ns() + kMostNs;
    while (why_ended(rank).empty() && steady_now_ns() < end_ns) sched_yield();
    return !why_ended(rank).empty();
}

std::string ProcessCommunicator::why_ended(int rank) {
    if (!is_local(rank)) return {};
    const ProcessWatch& process = processes_[static_cast<size_t>(rank - first_local_)];
    return process.has_ended() ? fmt::format("its process {} has ended", process.number()) : std::string();
}

// Exchanges and maps offers; no rank returns before all have mapped. A failure on one rank is one on all. reason: why
// this rank's offer is not valid.
std::unique_ptr<ProcessCommunicator::MappedPeers> ProcessCommunicator::exchange(const Offer& own, std::byte* memory,
                                                                                std::string reason, ncclResult_t code,
                                                                                const char* what, uint64_t timeout_ns) {
    std::vector<Offer> offers(static_cast<size_t>(num_ranks()));
    all_gather(&own, offers.data(), sizeof(Offer), what, timeout_ns);
    require(reason.empty(), code, "{}: {}", what, reason);
    std::vector<uint64_t> sizes;
    for (int peer = 0; peer < num_ranks(); ++peer) {
        const Offer& offer = offers[static_cast<size_t>(peer)];
        require(offer.is_valid == 1, code, "{}: rank {} has no memory to offer", what, peer);
        sizes.push_back(offer.bytes);
    }
    require_same_size(sizes, what);

    std::unique_ptr<MappedPeers> mapped;
    // kMapped, kNotMapped, or the rank that has ended since it made its offer.
    uint64_t own_outcome = kMapped;
    int current = 0;
    try {
        mapped = std::make_unique<MappedPeers>(*this, offers, memory, current);
    } catch (const Error& error) {
        reason = error.what();
        own_outcome = ends_soon(current) ? static_cast<uint64_t>(current) : kNotMapped;
    }
    std::vector<uint64_t> outcomes(static_cast<size_t>(num_ranks()));
    all_gather(&own_outcome, outcomes.data(), sizeof(uint64_t), what, timeout_ns);
    for (const uint64_t outcome : outcomes) {
        if (outcome >= static_cast<uint64_t>(num_ranks())) continue;
        const int lost = static_cast<int>(outcome);
        fail_for(lost, what, why_gone(lost));
    }
    require(mapped != nullptr, ncclSystemError, "{}: {}", what, reason);
    for (int peer = 0; peer < num_ranks(); ++peer) {
        require(outcomes[static_cast<size_t>(peer)] == kMapped, ncclSystemError,
                "{}: rank {} could not map its peers' memory", what, peer);
    }
    return mapped;
}

std::shared_ptr<CpuCommunicator> join_processes(const ncclUniqueId& id, int num_ranks, int rank) {
    const auto control = join_control_segment(id, num_ranks, rank);
    std::vector<ProcessIdentity> processes;
    for (int peer = 0; peer < num_ranks; ++peer)
        processes.push_back(process_from(control->process_of(peer).load(std::memory_order_acquire)));
    return std::make_shared<ProcessCommunicator>(rank, num_ranks, 0, processes,
                                                 std::make_unique<MailboxExchange>(control, rank),
                                                 std::make_shared<LocalExecutor>(num_ranks));
}

}  // namespace crossdock::cpu
