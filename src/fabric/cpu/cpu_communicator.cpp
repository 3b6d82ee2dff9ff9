// SPDX-License-Identifier: Apache-2.0
#include "fabric/cpu/cpu_communicator.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>

#include "core/environment_value.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/log.h"
#include "core/printable.h"
#include "device/cpu/device_comm.h"
#include "fabric/cpu/mailbox.h"
#include "fabric/cpu/registry.h"
#include "runtime/cpu/failure_reports.h"
#include "runtime/cpu/idle_backoff.h"
#include "runtime/cpu/machine_memory.h"

namespace crossdock::cpu {
namespace {

constexpr uint64_t kDefaultJoinTimeoutNs = 60'000'000'000;
constexpr uint64_t kDefaultNetworkTimeoutNs = 100'000'000'000;

// A post's number is (call, chunk), so that a call that failed half-way does not shift later numbers. A call of more
// chunks counts as several. No program makes 2^48 calls.
constexpr int kChunkBits = 16;

std::atomic<uint64_t> g_num_window_changes{0};

std::string list_of(const std::vector<int>& ranks) {
    std::string list = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < ranks.size(); ++i) list += fmt::format("{}{}", i == 0 ? "" : ", ", ranks[i]);
    return list;
}

}  // namespace

uint64_t join_timeout_ns() {
    return environment_timeout_ns("CROSSDOCK_JOIN_TIMEOUT_MS", warn).value_or(kDefaultJoinTimeoutNs);
}
uint64_t network_timeout_ns() {
    return environment_timeout_ns("CROSSDOCK_NETWORK_TIMEOUT_MS", warn).value_or(kDefaultNetworkTimeoutNs);
}

void require_num_ranks(int num_ranks) {
    require(num_ranks >= 1 && num_ranks <= ControlSegment::kMaxRanks, ncclInvalidArgument,
            "num_ranks is {}, allowed: 1..{}", num_ranks, ControlSegment::kMaxRanks);
}

CpuCommunicator::CpuCommunicator(const BackendTraits& backend, int rank, int num_ranks,
                                 std::unique_ptr<Exchange> exchange, std::shared_ptr<Executor> executor)
    : backend_(backend),
      rank_(rank),
      num_ranks_(num_ranks),
      exchange_(std::move(exchange)),
      executor_(std::move(executor)),
      runtime_(*executor_),
      device_comm_(make_device_comm(rank, num_ranks)) {}

void CpuCommunicator::all_gather(const void* own, void* all, size_t bytes, const char* what, uint64_t timeout_ns) {
    PostLabel label;
    label.total_bytes = bytes;
    std::snprintf(label.what, sizeof(label.what), "%s", what);
    require(!is_killed(), ncclRemoteError, "rank {} was killed by fault injection before {}", rank_, what);
    const uint64_t start_ns = executor_->now_ns();
    const uint64_t deadline_ns = saturating_add(start_ns, timeout_ns);
    uint64_t number = ++num_calls_ << kChunkBits;
    num_calls_ += bytes / kPostBytes >> kChunkBits;
    size_t at = 0;
    do {
        const size_t chunk_bytes = std::min(bytes - at, kPostBytes);
        const auto* own_chunk = bytes == 0 ? nullptr : static_cast<const std::byte*>(own) + at;
        auto* all_chunks = bytes == 0 ? nullptr : static_cast<std::byte*>(all) + at;
        const auto has_read = [this](int peer) { return exchange_->has_read(peer); };
        bool have_all_read = true;
        for (int peer = 0; peer < num_ranks_; ++peer) have_all_read &= has_read(peer);
        // This rank has given up on others in an earlier call.
        if (!have_all_read) wait_for_all(has_read, what, start_ns, deadline_ns);
        exchange_->post(number, label, own_chunk, chunk_bytes);
        const auto has_come = [&](int peer) {
            PostLabel found;
            std::byte* target = all_chunks + static_cast<size_t>(peer) * bytes;
            const auto seen = exchange_->read(peer, number, found, target, chunk_bytes);
            if (seen == PostSeen::kGone) fail_for(peer, what, "it did not wait any longer");
            // A rank that has failed may make other calls, such as to destroy its group.
            if (seen == PostSeen::kRead && found != label && exchange_->reported_loss(peer) >= 0)
                fail_for(peer, what, fmt::format("it is in {}", printable(found.what, sizeof(found.what))));
            require(seen == PostSeen::kNotYet || found == label, ncclInvalidUsage,
                    "rank {} is in {} with {} bytes while rank {} is in {} with {} bytes: every rank makes the same "
                    "calls in the same order",
                    rank_, label.what, bytes, peer, printable(found.what, sizeof(found.what)), found.total_bytes);
            return seen == PostSeen::kRead;
        };
        wait_for_all(has_come, what, start_ns, deadline_ns);
        at += chunk_bytes;
        ++number;
    } while (at < bytes);
    // Who was reported as lost was only late.
    if (reported_.exchange(-1) >= 0) exchange_->report_loss(-1);
}

int CpuCommunicator::rank_to_name(int rank) {
    const int named =
        follow_reports(rank, rank_, num_ranks_, [this](int each) { return exchange_->reported_loss(each); });
    if (named != rank || !has_left(rank)) return named;
    for (int other = 0; other < num_ranks_; ++other) {
        if (other != rank_ && has_ended(other) && !has_left(other)) return other;
    }
    return rank;
}

void CpuCommunicator::report_loss(int rank) {
    int none = -1;
    if (reported_.compare_exchange_strong(none, rank)) exchange_->report_loss(rank);
}

void CpuCommunicator::fail_for(int peer, const char* what, const std::string& reason) {
    const int named = rank_to_name(peer);
    report_loss(named);
    if (named == peer) fail(ncclRemoteError, "rank {} in {} lost rank {}: {}", rank_, what, peer, reason);
    const std::string its_reason = why_gone(named);
    fail(ncclRemoteError, "rank {} in {} lost rank {}{}{}; therefore rank {} failed, too", rank_, what, named,
         its_reason.empty() ? "" : ": ", its_reason, peer);
}

void CpuCommunicator::wait_for_all(const std::function<bool(int peer)>& has_come, const char* what, uint64_t start_ns,
                                   uint64_t deadline_ns) {
    std::vector<int> missing(static_cast<size_t>(num_ranks_));
    for (int peer = 0; peer < num_ranks_; ++peer) missing[static_cast<size_t>(peer)] = peer;

    uint64_t last_liveness_ns = start_ns;
    Interruption interruption;
    const auto ready = [&] {
        std::erase_if(missing, has_come);
        if (missing.empty()) return true;
        if (interruption.has_come()) {
            stop_waiting();
            fail(ncclRemoteError, "rank {} was interrupted in {}, waiting for {}", rank_, what, list_of(missing));
        }
        if (const uint64_t now_ns = executor_->now_ns();
            now_ns - last_liveness_ns >= executor_->liveness_interval_ns()) {
            last_liveness_ns = now_ns;
            std::erase_if(missing, [&](int peer) {
                const std::string reason = why_gone(peer);
                if (reason.empty()) return false;
                // It may have sent the expected post before it ended.
                if (!has_come(peer)) fail_for(peer, what, reason);
                return true;
            });
            return missing.empty();
        }
        return false;
    };
    if (executor_->wait(ready, deadline_ns)) return;
    require(!is_killed(), ncclRemoteError, "rank {} was killed by fault injection in {}", rank_, what);
    if (missing.size() == 1) report_loss(missing.front());
    fail(ncclRemoteError, "rank {} timed out after {} ms in {}, waiting for {}", rank_,
         (executor_->now_ns() - start_ns) / 1'000'000, what, list_of(missing));
}

void CpuCommunicator::require_same_size(const std::vector<uint64_t>& bytes, const char* what) const {
    for (int peer = 0; peer < num_ranks_; ++peer) {
        require(bytes[static_cast<size_t>(peer)] == bytes[0], ncclInvalidArgument,
                "{}: rank {} gave {} bytes, rank 0 {}; all ranks give the same size", what, peer,
                bytes[static_cast<size_t>(peer)], bytes[0]);
    }
}

void CpuCommunicator::expect_room(size_t bytes) const {
    const auto ranks = static_cast<uint64_t>(lsa_team_size());
    require(bytes <= machine_memory() / ranks, ncclSystemError,
            "{} bytes of symmetric memory are needed for each of the {} ranks on this machine, which has {} bytes for "
            "all of this process: lower max_dispatch_tokens_per_rank or max_token_bytes, or run fewer ranks here",
            bytes, ranks, machine_memory());
}

ncclWindow_t CpuCommunicator::register_window(void* memory, size_t bytes, uint64_t timeout_ns) {
    auto mapped = map_window(memory, bytes, timeout_ns);
    const auto handle = reinterpret_cast<ncclWindow_t>(new_token());
    const std::lock_guard lock(windows_mutex_);
    windows_.emplace(handle, Window{std::move(mapped), ++num_registrations_});
    ++g_num_window_changes;
    return handle;
}

void CpuCommunicator::deregister_window(ncclWindow_t handle, uint64_t timeout_ns) {
    window(handle);
    barrier("window deregistration", timeout_ns);
    const std::lock_guard lock(windows_mutex_);
    ++g_num_window_changes;
    windows_.erase(handle);
}

uint64_t CpuCommunicator::num_window_changes() { return g_num_window_changes.load(std::memory_order_acquire); }

CpuCommunicator::~CpuCommunicator() { ++g_num_window_changes; }

WindowView CpuCommunicator::window(ncclWindow_t handle) {
    const std::lock_guard lock(windows_mutex_);
    const auto found = windows_.find(handle);
    require(found != windows_.end(), ncclInvalidArgument, "{} is not a window registered with this communicator",
            static_cast<void*>(handle));
    const SymmetricMemory& memory = *found->second.memory;
    return {memory.local, memory.bytes, memory.peers, found->second.number, memory.remote};
}

ncclWindow_t CpuCommunicator::window_at(const std::byte* address, size_t* offset) {
    const std::lock_guard lock(windows_mutex_);
    for (const auto& [handle, window] : windows_) {
        const std::byte* first = window.memory->local;
        if (address < first || address >= first + window.memory->bytes) continue;
        *offset = static_cast<size_t>(address - first);
        return handle;
    }
    return nullptr;
}

}  // namespace crossdock::cpu
