// SPDX-License-Identifier: Apache-2.0
#include "fabric/cpu/joining.h"

#include <string>

#include "core/error.h"
#include "core/interrupt.h"
#include "runtime/cpu/clock.h"
#include "runtime/cpu/idle_backoff.h"

namespace crossdock::cpu {
namespace {

// No process holds the lock for longer than this, unless it is stopped.
constexpr uint64_t kJoinLockNs = 100'000'000;
constexpr uint64_t kHolderLookNs = 1'000'000;

struct Joiner {
    ControlSegment& control;
    int num_ranks;
    int rank;
    JoiningProcesses& processes;
    Executor& executor;

    uint64_t deadline_in(uint64_t ns) const { return saturating_add(executor.now_ns(), ns); }
};

// Protects changes of process_of(). If the holder dies, the next process takes the lock: each change below is one
// store. Throws ncclRemoteError that names the holder if it is alive and keeps the lock beyond deadline_ns.
class JoinLock {
  public:
    JoinLock(const Joiner& joiner, uint64_t deadline_ns) : lock_(joiner.control.join_lock) {
        const uint64_t own = joiner.processes.own();
        uint64_t expected = 0;
        uint64_t next_look_ns = 0;
        IdleBackoff backoff(0);
        Interruption interruption;
        for (;;) {
            uint64_t holder = expected;
            if (lock_.compare_exchange_strong(holder, own)) return;
            expected = 0;
            const uint64_t now_ns = joiner.executor.now_ns();
            if (holder != 0 && now_ns >= next_look_ns) {
                next_look_ns = now_ns + kHolderLookNs;
                if (holder != own && joiner.processes.has_ended(holder)) {
                    expected = holder;
                    continue;
                }
            }
            require(holder == 0 || now_ns < deadline_ns, ncclRemoteError,
                    "rank {} timed out waiting for process {}, which holds the lock for joining: check whether it is "
                    "stopped",
                    joiner.rank, joiner.processes.name(holder));
            require(!interruption.has_come(), ncclRemoteError,
                    "rank {} was interrupted waiting for process {}, which holds the lock for joining", joiner.rank,
                    joiner.processes.name(holder));
            backoff.idle(deadline_ns);
        }
    }
    ~JoinLock() { lock_.store(0); }
    JoinLock(const JoinLock&) = delete;
    JoinLock& operator=(const JoinLock&) = delete;

  private:
    std::atomic<uint64_t>& lock_;
};

void claim_rank(const Joiner& joiner, uint64_t deadline_ns) {
    const JoinLock lock(joiner, deadline_ns);
    ControlSegment& control = joiner.control;
    const auto wanted = static_cast<uint64_t>(joiner.num_ranks);
    uint64_t agreed = 0;
    require(control.num_ranks.compare_exchange_strong(agreed, wanted) || agreed == wanted, ncclInvalidArgument,
            "num_ranks is {} here, but {} on the rank that joined first", joiner.num_ranks, agreed);
    // A process that died while ranks were joining can be replaced. Once all have joined, processes do not change.
    const uint64_t owner = control.process_of(joiner.rank).load();
    const bool is_free = owner == 0 || joiner.processes.has_ended(owner);
    require(is_free && control.is_complete.load() == 0, ncclInvalidArgument, "rank {} is taken by process {}",
            joiner.rank, joiner.processes.name(owner));
    control.left(joiner.rank).store(0);
    control.process_of(joiner.rank).store(joiner.processes.own());
}

bool are_all_claimed(const Joiner& joiner) {
    for (int peer = 0; peer < joiner.num_ranks; ++peer) {
        if (joiner.control.process_of(peer).load(std::memory_order_acquire) == 0) return false;
    }
    return true;
}

// The ranks that no process has claimed; ranks that gave up waiting for them are no cause.
std::string missing_ranks(const Joiner& joiner) {
    std::string missing, gave_up;
    for (int peer = 0; peer < joiner.num_ranks; ++peer) {
        if (joiner.control.process_of(peer).load(std::memory_order_acquire) != 0) continue;
        std::string& list = joiner.control.left(peer).load() == 0 ? missing : gave_up;
        list += fmt::format("{}{}", list.empty() ? "" : ", ", peer);
    }
    return missing.empty() ? gave_up + ", which had come before and gave up," : missing;
}

// Releases ranks whose processes have ended. Returns true if all ranks have joined. Requires the lock.
bool release_ended_ranks(const Joiner& joiner) {
    ControlSegment& control = joiner.control;
    if (control.is_complete.load() == 1) return true;
    bool all_there = true;
    for (int peer = 0; peer < joiner.num_ranks; ++peer) {
        std::atomic<uint64_t>& process = control.process_of(peer);
        if (process.load() != 0 && joiner.processes.has_ended(process.load())) process.store(0);
        all_there = all_there && process.load() != 0;
    }
    if (all_there) control.is_complete.store(1);
    return all_there;
}

}  // namespace

void join(ControlSegment& control, int num_ranks, int rank, JoiningProcesses& processes, Executor& executor,
          uint64_t timeout_ns) {
    const Joiner joiner{control, num_ranks, rank, processes, executor};
    const uint64_t deadline_ns = joiner.deadline_in(timeout_ns);
    claim_rank(joiner, deadline_ns);

    Interruption interruption;
    const auto is_over = [&] {
        if (control.is_complete.load(std::memory_order_acquire) == 1 || interruption.has_come()) return true;
        if (!are_all_claimed(joiner)) return false;
        const JoinLock lock(joiner, deadline_ns);
        return release_ended_ranks(joiner);
    };
    if (executor.wait(is_over, deadline_ns) && control.is_complete.load() == 1) return;
    require(!processes.has_ended(processes.own()), ncclRemoteError,
            "rank {} was killed by fault injection while ranks joined", rank);
    const JoinLock lock(joiner, joiner.deadline_in(kJoinLockNs));
    if (release_ended_ranks(joiner)) return;
    const std::string missing = missing_ranks(joiner);
    control.left(rank).store(1);
    control.process_of(rank).store(0);  // no rank may rely on this one
    require(!interruption.has_come(), ncclRemoteError, "rank {} was interrupted waiting for ranks {} to join", rank,
            missing);
    fail(ncclRemoteError, "rank {} timed out after {} ms waiting for ranks {} to join", rank, timeout_ns / 1'000'000,
         missing);
}

}  // namespace crossdock::cpu
