// SPDX-License-Identifier: Apache-2.0
#include "fabric/cpu/rendezvous.h"

#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "core/error.h"
#include "fabric/cpu/cpu_communicator.h"
#include "fabric/cpu/memory_file.h"
#include "runtime/cpu/idle_backoff.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock::cpu {
namespace {

constexpr char kMagic[16] = "crossdock-cpu-1";

struct IdContents {
    char magic[16];
    int64_t process;
    int64_t fd;
    uint64_t nonce;
};
static_assert(sizeof(IdContents) <= sizeof(ncclUniqueId));

// The control segments that this process has made and not joined yet.
struct OpenSegments {
    std::mutex mutex;
    std::map<uint64_t, FileDescriptor> by_nonce;
};

OpenSegments& open_segments() {
    static auto* instance = new OpenSegments;
    return *instance;
}

Mapping map_segment(const IdContents& contents, int num_ranks) {
    const FileDescriptor file = open_of_process(contents.process, static_cast<int>(contents.fd));
    // Descriptor numbers are reused: the nonce tells whether this one still is the id's.
    uint64_t nonce = 0;
    require(pread(file.get(), &nonce, sizeof(nonce), ControlSegment::kNonceOffset) == sizeof(nonce) &&
                nonce == contents.nonce,
            ncclInvalidArgument,
            "the id is used up: all ranks of its communicator have joined, or its process has ended");
    return Mapping(file.get(), ControlSegment::bytes(num_ranks));
}

void take_place(ControlSegment& control, int num_ranks, int rank) {
    uint64_t agreed = 0;
    if (!control.num_ranks.compare_exchange_strong(agreed, static_cast<uint64_t>(num_ranks))) {
        require(agreed == static_cast<uint64_t>(num_ranks), ncclInvalidArgument,
                "num_ranks is {} here, but {} on the rank that joined first", num_ranks, agreed);
    }
    uint64_t process = 0;
    require(control.process_of(rank).compare_exchange_strong(process, static_cast<uint64_t>(getpid())),
            ncclInvalidArgument, "rank {} is taken by process {}", rank, process);
}

}  // namespace

ncclUniqueId make_unique_id() {
    IdContents contents{};
    std::memcpy(contents.magic, kMagic, sizeof(kMagic));
    contents.process = getpid();
    require(getrandom(&contents.nonce, sizeof(contents.nonce), 0) == sizeof(contents.nonce), ncclSystemError,
            "no random number for the id: {}", std::strerror(errno));
    // Sparse: pages exist once a rank touches its part.
    FileDescriptor file = make_memory_file(ControlSegment::bytes(ControlSegment::kMaxRanks));
    contents.fd = file.get();
    require(pwrite(file.get(), &contents.nonce, sizeof(contents.nonce), ControlSegment::kNonceOffset) ==
                sizeof(contents.nonce),
            ncclSystemError, "cannot write to shared memory: {}", std::strerror(errno));
    ncclUniqueId id{};
    std::memcpy(&id, &contents, sizeof(contents));
    const std::lock_guard lock(open_segments().mutex);
    open_segments().by_nonce.emplace(contents.nonce, std::move(file));
    return id;
}

std::shared_ptr<ControlSegment> join_control_segment(const ncclUniqueId& id, int num_ranks, int rank) {
    IdContents contents;
    std::memcpy(&contents, &id, sizeof(contents));
    require(std::memcmp(contents.magic, kMagic, sizeof(kMagic)) == 0, ncclInvalidArgument,
            "the id was not made by crossdockGetUniqueId");
    auto mapping = std::make_shared<Mapping>(map_segment(contents, num_ranks));
    std::shared_ptr<ControlSegment> control(mapping, reinterpret_cast<ControlSegment*>(mapping->data()));
    take_place(*control, num_ranks, rank);

    std::string missing;
    const auto all_joined = [&] {
        missing.clear();
        for (int peer = 0; peer < num_ranks; ++peer) {
            if (control->process_of(peer).load(std::memory_order_acquire) != 0) continue;
            missing += fmt::format("{}{}", missing.empty() ? "" : ", ", peer);
        }
        return missing.empty();
    };
    const uint64_t timeout_ns = join_timeout_ns();
    if (!LocalExecutor(num_ranks).wait(all_joined, saturating_add(steady_now_ns(), timeout_ns))) {
        control->process_of(rank).store(0, std::memory_order_release);  // nobody is to count on this rank
        fail(ncclRemoteError, "rank {} waited {} ms for ranks {} to join", rank, timeout_ns / 1'000'000, missing);
    }
    // Also in a process that inherited the descriptor when it was forked.
    const std::lock_guard lock(open_segments().mutex);
    open_segments().by_nonce.erase(contents.nonce);
    return control;
}

}  // namespace crossdock::cpu
