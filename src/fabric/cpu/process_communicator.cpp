// SPDX-License-Identifier: Apache-2.0
#include "fabric/cpu/process_communicator.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "core/error.h"
#include "fabric/cpu/rendezvous.h"
#include "fabric/cpu/window_memory.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock::cpu {
namespace {

// What a rank tells the others about its piece of memory. memory_bytes 0: it has none to offer.
struct Offer {
    int64_t process;
    int64_t fd;
    uint64_t file_bytes;
    uint64_t offset;
    uint64_t bytes;
    uint64_t is_valid;
};

class MappedPeers final : public SymmetricMemory {
  public:
    // Maps every peer's offer; `own` is this rank's memory.
    MappedPeers(const std::vector<Offer>& offers, int rank, std::byte* own) {
        for (int peer = 0; peer < static_cast<int>(offers.size()); ++peer) {
            const Offer& offer = offers[static_cast<size_t>(peer)];
            if (peer == rank) {
                addresses_.push_back(own);
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

class ProcessCommunicator final : public CpuCommunicator {
  public:
    ProcessCommunicator(int rank, int num_ranks, const std::shared_ptr<ControlSegment>& control)
        : CpuCommunicator(World::kProcesses, rank, num_ranks, control, std::make_shared<LocalExecutor>(num_ranks)) {
        for (int peer = 0; peer < num_ranks; ++peer) {
            processes_.push_back(static_cast<int64_t>(control->process_of(peer).load(std::memory_order_acquire)));
            // Where the kernel has no such descriptors, a dead peer shows by its absence alone.
            process_fds_.emplace_back(static_cast<int>(syscall(SYS_pidfd_open, processes_.back(), 0)));
        }
    }

    std::unique_ptr<SymmetricMemory> allocate_symmetric(size_t bytes, uint64_t timeout_ns) override {
        Offer offer{getpid(), -1, bytes, 0, bytes, 0};
        FileDescriptor file;
        Mapping mapping;
        std::string reason;
        try {
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

  protected:
    std::unique_ptr<SymmetricMemory> map_window(void* memory, size_t bytes, uint64_t timeout_ns) override {
        Offer offer{getpid(), -1, 0, 0, bytes, 0};
        std::string reason = "the memory does not lie in one allocation of crossdockMemAlloc";
        if (const auto part = find_window_memory(memory, bytes)) {
            offer = {getpid(), part->fd, part->file_bytes, part->offset, bytes, 1};
            reason.clear();
        }
        return exchange(offer, static_cast<std::byte*>(memory), reason, ncclInvalidArgument, "window registration",
                        timeout_ns);
    }

    std::string why_gone(int rank) override {
        pollfd ended{process_fds_[static_cast<size_t>(rank)].get(), POLLIN, 0};
        if (ended.fd < 0 || ::poll(&ended, 1, 0) <= 0) return {};
        return fmt::format("its process {} has ended", processes_[static_cast<size_t>(rank)]);
    }

  private:
    // Offers are exchanged, mapped, and nobody returns before all have mapped. What fails on one rank fails on all of
    // them: reason is why this rank's offer is not valid.
    std::unique_ptr<MappedPeers> exchange(const Offer& own, std::byte* memory, std::string reason, ncclResult_t code,
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
        try {
            mapped = std::make_unique<MappedPeers>(offers, rank(), memory);
        } catch (const Error& error) {
            reason = error.what();
        }
        std::vector<uint64_t> successes(static_cast<size_t>(num_ranks()));
        const uint64_t own_success = mapped != nullptr;
        all_gather(&own_success, successes.data(), sizeof(uint64_t), what, timeout_ns);
        require(mapped != nullptr, ncclSystemError, "{}: {}", what, reason);
        for (int peer = 0; peer < num_ranks(); ++peer) {
            require(successes[static_cast<size_t>(peer)] == 1, ncclSystemError,
                    "{}: rank {} could not map its peers' memory", what, peer);
        }
        return mapped;
    }

    std::vector<int64_t> processes_;
    std::vector<FileDescriptor> process_fds_;
};

}  // namespace

std::shared_ptr<CpuCommunicator> join_processes(const ncclUniqueId& id, int num_ranks, int rank) {
    return std::make_shared<ProcessCommunicator>(rank, num_ranks, join_control_segment(id, num_ranks, rank));
}

}  // namespace crossdock::cpu
