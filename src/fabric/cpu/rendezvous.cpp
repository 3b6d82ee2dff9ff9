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
#include "core/process.h"
#include "fabric/cpu/cpu_communicator.h"
#include "fabric/cpu/joining.h"
#include "fabric/cpu/peer_process.h"
#include "runtime/cpu/local_executor.h"
#include "runtime/cpu/memory_file.h"

namespace crossdock::cpu {
namespace {

constexpr char kMagic[16] = "crossdock-cpu-2";

struct IdContents {
    char magic[16];
    int64_t process;
    int64_t fd;
    uint64_t nonce;
};
static_assert(sizeof(IdContents) <= sizeof(ncclUniqueId));

// Control segments that this process has created and not joined yet.
struct OpenSegments {
    ForkSafeMutex mutex;
    std::map<uint64_t, FileDescriptor> by_nonce;
};

OpenSegments& open_segments() {
    static auto* instance = new OpenSegments;
    return *instance;
}
const MadeAtLoad open_segments_made_at_load(open_segments);

IdContents contents_of(const ncclUniqueId& id) {
    IdContents contents;
    std::memcpy(&contents, &id, sizeof(contents));
    require(std::memcmp(contents.magic, kMagic, sizeof(kMagic)) == 0, ncclInvalidArgument,
            "the id was not made by crossdockGetUniqueId");
    return contents;
}

// Requires the mutex of open_segments(). A launcher that joins none of its jobs may not say when one has started.
void close_complete_segments() {
    std::erase_if(open_segments().by_nonce, [](const auto& each) {
        uint64_t is_complete = 0;
        return pread(each.second.get(), &is_complete, sizeof(is_complete), ControlSegment::kIsCompleteOffset) ==
                   sizeof(is_complete) &&
               is_complete == 1;
    });
}

Mapping map_segment(const IdContents& contents, int num_ranks) {
    const FileDescriptor file = open_of_process(contents.process, static_cast<int>(contents.fd));
    // Descriptor numbers are reused: the nonce tells whether this one is still the id's.
    uint64_t nonce = 0;
    require(pread(file.get(), &nonce, sizeof(nonce), ControlSegment::kNonceOffset) == sizeof(nonce) &&
                nonce == contents.nonce,
            ncclInvalidArgument,
            "the unique id is no longer valid: all its ranks have joined, or the process that made it has ended");
    return Mapping(file.get(), ControlSegment::bytes(num_ranks));
}

// This process and those of other ranks.
class SystemProcesses final : public JoiningProcesses {
  public:
    uint64_t own() override { return to_word(own_process()); }
    bool has_ended(uint64_t process) override { return ProcessWatch(process_from(process)).has_ended(); }
    int64_t name(uint64_t process) override { return process_from(process).number; }
};

}  // namespace

ncclUniqueId make_unique_id() {
    IdContents contents{};
    std::memcpy(contents.magic, kMagic, sizeof(kMagic));
    contents.process = getpid();
    {
        const std::lock_guard lock(open_segments().mutex);
        close_complete_segments();
    }
    require(getrandom(&contents.nonce, sizeof(contents.nonce), 0) == sizeof(contents.nonce), ncclSystemError,
            "cannot read random bytes for the unique id: {}", std::strerror(errno));
    // Sparse: pages are allocated when a rank touches its part.
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

void release_unique_id(const ncclUniqueId& id) {
    const IdContents contents = contents_of(id);
    const std::lock_guard lock(open_segments().mutex);
    open_segments().by_nonce.erase(contents.nonce);
}

std::shared_ptr<ControlSegment> join_control_segment(const ncclUniqueId& id, int num_ranks, int rank) {
    const IdContents contents = contents_of(id);
    auto mapping = std::make_shared<Mapping>(map_segment(contents, num_ranks));
    std::shared_ptr<ControlSegment> control(mapping, reinterpret_cast<ControlSegment*>(mapping->data()));
    SystemProcesses processes;
    LocalExecutor executor(num_ranks);
    join(*control, num_ranks, rank, processes, executor, join_timeout_ns());
    // Also in a process that inherited the descriptor by a fork.
    const std::lock_guard lock(open_segments().mutex);
    open_segments().by_nonce.erase(contents.nonce);
    return control;
}

}  // namespace crossdock::cpu
