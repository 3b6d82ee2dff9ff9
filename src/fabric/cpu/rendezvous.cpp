// SPDX-License-Identifier: Apache-2.0
#include "fabric/cpu/rendezvous.h"

#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/process.h"
#include "fabric/cpu/cpu_communicator.h"
#include "fabric/cpu/peer_process.h"
#include "runtime/cpu/idle_backoff.h"
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

// No process holds the lock for longer than this, unless it is stopped.
constexpr uint64_t kJoinLockNs = 100'000'000;
constexpr uint64_t kHolderLookNs = 1'000'000;

// Protects changes of process_of(). If the holder dies, the next process takes the lock: each change below is one
// store. Throws ncclRemoteError that names the holder if it is alive and keeps the lock beyond deadline_ns.
class JoinLock {
  public:
    JoinLock(ControlSegment& control, int rank, uint64_t deadline_ns) : lock_(control.join_lock) {
        const uint64_t own = to_word(own_process());
        uint64_t expected = 0;
        uint64_t watched = 0;
        std::optional<ProcessWatch> watch;  // of the process `watched`
        uint64_t next_look_ns = 0;
        IdleBackoff backoff(0);
        Interruption interruption;
        for (;;) {
            uint64_t holder = expected;
            if (lock_.compare_exchange_strong(holder, own)) return;
            expected = 0;
            const uint64_t now_ns = steady_now_ns();
            if (holder != 0 && now_ns >= next_look_ns) {
                if (holder != watched) watch.emplace(process_from(holder));
                watched = holder;
                next_look_ns = now_ns + kHolderLookNs;
                if (holder != own && watch->has_ended()) {
                    expected = holder;
                    continue;
                }
            }
            require(holder == 0 || now_ns < deadline_ns, ncclRemoteError,
                    "rank {} timed out waiting for process {}, which holds the lock for joining: check whether it is "
                    "stopped",
                    rank, process_from(holder).number);
            require(!interruption.has_come(), ncclRemoteError,
                    "rank {} was interrupted waiting for process {}, which holds the lock for joining", rank,
                    process_from(holder).number);
            backoff.idle(deadline_ns);
        }
    }
    ~JoinLock() { lock_.store(0); }
    JoinLock(const JoinLock&) = delete;
    JoinLock& operator=(const JoinLock&) = delete;

  private:
    std::atomic<uint64_t>& lock_;
};

void claim_rank(ControlSegment& control, int num_ranks, int rank, uint64_t deadline_ns) {
    const JoinLock lock(control, rank, deadline_ns);
    const auto wanted = static_cast<uint64_t>(num_ranks);
    uint64_t agreed = 0;
    require(control.num_ranks.compare_exchange_strong(agreed, wanted) || agreed == wanted, ncclInvalidArgument,
            "num_ranks is {} here, but {} on the rank that joined first", num_ranks, agreed);
    // A process that died while ranks were joining can be replaced. Once all have joined, processes do not change.
    const uint64_t owner = control.process_of(rank).load();
    const bool is_free = owner == 0 || ProcessWatch(process_from(owner)).has_ended();
    require(is_free && control.is_complete.load() == 0, ncclInvalidArgument, "rank {} is taken by process {}", rank,
            process_from(owner).number);
    control.left(rank).store(0);
    control.process_of(rank).store(to_word(own_process()));
}

bool are_all_claimed(ControlSegment& control, int num_ranks) {
    for (int peer = 0; peer < num_ranks; ++peer) {
        if (control.process_of(peer).load(std::memory_order_acquire) == 0) return false;
    }
    return true;
}

// The ranks that no process has claimed; ranks that gave up waiting for them are no cause.
std::string missing_ranks(ControlSegment& control, int num_ranks) {
    std::string missing, gave_up;
    for (int peer = 0; peer < num_ranks; ++peer) {
        if (control.process_of(peer).load(std::memory_order_acquire) != 0) continue;
        std::string& list = control.left(peer).load() == 0 ? missing : gave_up;
        list += fmt::format("{}{}", list.empty() ? "" : ", ", peer);
    }
    return missing.empty() ? gave_up + ", which had come before and gave up," : missing;
}

// Releases ranks whose processes have ended. Returns true if all ranks have joined. Requires the lock.
bool release_ended_ranks(ControlSegment& control, int num_ranks) {
    if (control.is_complete.load() == 1) return true;
    bool all_there = true;
    for (int peer = 0; peer < num_ranks; ++peer) {
        std::atomic<uint64_t>& process = control.process_of(peer);
        if (process.load() != 0 && ProcessWatch(process_from(process.load())).has_ended()) process.store(0);
        all_there = all_there && process.load() != 0;
    }
    if (all_there) control.is_complete.store(1);
    return all_there;
}

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
    const uint64_t timeout_ns = join_timeout_ns();
    const uint64_t deadline_ns = saturating_add(steady_now_ns(), timeout_ns);
    claim_rank(*control, num_ranks, rank, deadline_ns);

    Interruption interruption;
    const auto is_over = [&] {
        if (control->is_complete.load(std::memory_order_acquire) == 1 || interruption.has_come()) return true;
        if (!are_all_claimed(*control, num_ranks)) return false;
        const JoinLock lock(*control, rank, deadline_ns);
        return release_ended_ranks(*control, num_ranks);
    };
    if (!LocalExecutor(num_ranks).wait(is_over, deadline_ns) || control->is_complete.load() == 0) {
        const JoinLock lock(*control, rank, saturating_add(steady_now_ns(), kJoinLockNs));
        if (!release_ended_ranks(*control, num_ranks)) {
            const std::string missing = missing_ranks(*control, num_ranks);
            control->left(rank).store(1);
            control->process_of(rank).store(0);  // no rank may rely on this one
            require(!interruption.has_come(), ncclRemoteError, "rank {} was interrupted waiting for ranks {} to join",
                    rank, missing);
            fail(ncclRemoteError, "rank {} timed out after {} ms waiting for ranks {} to join", rank,
                 timeout_ns / 1'000'000, missing);
        }
    }
    // Also in a process that inherited the descriptor by a fork.
    const std::lock_guard lock(open_segments().mutex);
    open_segments().by_nonce.erase(contents.nonce);
    return control;
}

}  // namespace crossdock::cpu
