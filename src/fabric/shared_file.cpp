// SPDX-License-Identifier: Apache-2.0
#include "fabric/shared_file.h"

#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "core/error.h"
#include "runtime/cpu/machine_memory.h"

namespace crossdock {
namespace {

constexpr size_t kPageBytes = 64 << 10;  // of every system

// Random, at the end of the file. On another host, the same process and descriptor numbers may name another file.
using Name = std::array<uint64_t, 2>;

// What a rank tells the others, in two steps. Of one size in both, and with the step, since ranks may be out of step
// after an exchange that failed.
struct Message {
    uint64_t step = 0;
    int64_t process = 0;
    int64_t fd = -1;  // -1: this rank has no file
    Name name{};
    uint64_t agrees = 0;  // first that memory is wanted, then that it is mapped
};

// The file has a piece for each rank, and its name.
struct FileLayout {
    size_t piece_bytes;
    size_t name_at;
    size_t bytes;
    FileLayout(size_t wanted_bytes, int num_ranks)
        : piece_bytes(align_up(wanted_bytes, kPageBytes)),
          name_at(piece_bytes * static_cast<size_t>(num_ranks)),
          bytes(name_at + kPageBytes) {}
};

// Tells the others where it is.
cpu::FileDescriptor make_file(const FileLayout& layout, Message& message) {
    require(layout.bytes <= cpu::machine_memory(), ncclSystemError,
            "{} bytes of the host's memory are needed, and this machine or container has {}: lower "
            "max_dispatch_tokens_per_rank or max_token_bytes",
            layout.bytes, cpu::machine_memory());
    cpu::FileDescriptor file = cpu::make_memory_file(layout.bytes);
    require(getrandom(message.name.data(), sizeof(Name), 0) == sizeof(Name), ncclSystemError,
            "the system gives no random bytes: {}", std::strerror(errno));
    const cpu::Mapping mapping(file.get(), kPageBytes, layout.name_at);
    std::memcpy(mapping.data(), message.name.data(), sizeof(Name));
    message.process = getpid();
    message.fd = file.get();
    return file;
}

cpu::Mapping map_file(const FileLayout& layout, const Message& offer) {
    const cpu::FileDescriptor file = cpu::open_of_process(offer.process, static_cast<int>(offer.fd));
    cpu::Mapping mapping(file.get(), layout.bytes);
    require(std::memcmp(mapping.data() + layout.name_at, offer.name.data(), sizeof(Name)) == 0, ncclSystemError,
            "process {} of this host is not that of rank 0", offer.process);
    (void)madvise(mapping.data(), layout.bytes, MADV_DONTFORK);  // a child would keep the memory
    return mapping;
}

std::vector<Message> exchange(int num_ranks, const Message& own, const GatherHostBytes& gather) {
    std::vector<Message> all(static_cast<size_t>(num_ranks));
    gather(&own, all.data(), sizeof(Message));
    const auto other = std::find_if(all.begin(), all.end(), [&](const Message& one) { return one.step != own.step; });
    require(other == all.end(), ncclRemoteError,
            "rank {} is in another step of sharing the host's memory, after an attempt that failed: abort the "
            "communicator",
            other - all.begin());
    return all;
}

// The first rank that does not agree; nullopt: all do.
std::optional<ptrdiff_t> find_unwilling(const std::vector<Message>& messages) {
    const auto found =
        std::find_if(messages.begin(), messages.end(), [](const Message& one) { return one.agrees == 0; });
    return found == messages.end() ? std::nullopt : std::optional(found - messages.begin());
}

}  // namespace

SharedHostMemory share_file(int rank, int num_ranks, size_t bytes, bool is_wanted, const UseSharedFile& use,
                            const GatherHostBytes& gather) {
    const FileLayout layout(bytes, num_ranks);
    SharedHostMemory shared;
    Message own{.step = 1, .agrees = is_wanted};
    cpu::FileDescriptor file;  // rank 0's, until all have opened it
    try {
        if (rank == 0 && is_wanted) file = make_file(layout, own);
    } catch (const std::exception& error) {
        shared.problem = error.what();
    }
    const std::vector<Message> offers = exchange(num_ranks, own, gather);
    if (const auto unwilling = find_unwilling(offers)) {
        shared.problem =
            fmt::format("rank {} does not want it (CROSSDOCK_HOST_MEMORY, CROSSDOCK_LSA_TEAM_SIZE)", *unwilling);
        return shared;
    }
    if (offers[0].fd < 0) {
        if (shared.problem.empty()) shared.problem = "rank 0 could not make the file";
        return shared;
    }

    try {
        shared.memory = use(map_file(layout, offers[0]), layout.piece_bytes);
    } catch (const std::exception& error) {
        shared.problem = error.what();
    }
    try {
        const Message answer{.step = 2, .agrees = shared.memory != nullptr};
        const auto poor = find_unwilling(exchange(num_ranks, answer, gather));
        if (!poor) return shared;
        shared.memory = nullptr;
        if (shared.problem.empty()) shared.problem = fmt::format("rank {} could not map the file of rank 0", *poor);
        return shared;
    } catch (...) {
        (void)shared.memory.release();
        throw;
    }
}

}  // namespace crossdock
