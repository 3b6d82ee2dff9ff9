// SPDX-License-Identifier: Apache-2.0
#include "network/mesh.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/interrupt.h"
#include "runtime/cpu/clock.h"
#include "runtime/cpu/failure_reports.h"

namespace crossdock::network {
namespace {

constexpr uint32_t kMaxContexts = 4096;
constexpr uint64_t kLookNs = 1'000'000;
// The destructor waits at most this long for pending operations.
constexpr uint64_t kDrainNs = 5'000'000'000;
constexpr uint64_t kFailedDrainNs = 100'000'000;
constexpr uint64_t kDisconnectNs = 2'000'000'000;
// A queue counts as drained after this many empty rounds within this time.
constexpr uint64_t kQuietRounds = 64;
constexpr uint64_t kRoundsNs = 200'000'000;
// After a rank has left in order, its acknowledgements may still arrive.
constexpr uint64_t kGraceNs = 1'000'000'000;
// A failure report waits at most this long for room in peers' buffers.
constexpr uint64_t kReportNs = 200'000'000;
// Frames that a rank sent before it died may still arrive.
constexpr uint64_t kLastWordsNs = 200'000'000;

}  // namespace

Mesh::Mesh(const Listener& listener, std::span<const RankAddress> addresses, uint32_t rank, MeshConfig config)
    : config_(std::move(config)),
      peers_(addresses.size()),
      transport_(listener, addresses, rank, {kMaxContexts, config_.join_timeout_ns}, *this) {
    if (config_.device == nullptr) return;
    staging_in_ = StagingRing(config_.device->staging_in());
    staging_out_ = StagingRing(config_.device->staging_out());
}

Mesh::~Mesh() {
    std::unique_lock lock(mutex_);
    is_closing_ = true;
    wait_locked(lock, waits_briefly() ? kFailedDrainNs : kDrainNs,
                [&] { return !failure_.empty() || device_has_failed_ || is_idle(); });
    takes_nothing_ = true;
    for (const Unstaged& each : unstaged_) delete each.landing;
    unstaged_.clear();  // releases payloads that the transport holds
    // Also after a failure: without a close notice, peers would report this rank as the lost one.
    transport_.close(waits_briefly() ? kFailedDrainNs : kDisconnectNs, failed_rank_);
    // Queued copies write into memory that its owner may free afterwards.
    const uint64_t end_ns = cpu::steady_now_ns() + kDrainNs;
    while (!are_in(last_step_in_) && cpu::steady_now_ns() < end_ns) sched_yield();
    for (const Arriving& each : arriving_) delete each.landing;
}

// Returns true if nothing is pending that can still complete.
bool Mesh::is_idle() const {
    if (num_fetches_ > 0 || !arriving_.empty() || !late_signals_.empty() || !leaving_.empty() || !starved_.empty())
        return false;
    if (!config_.outlives_ranks) return num_frames_out_ == 0;
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const PeerState& peer) { return peer.waits == 0 || !peer.lost.empty(); });
}

uint32_t Mesh::add_contexts(uint32_t count) {
    const std::lock_guard lock(mutex_);
    require(count <= kMaxContexts - num_contexts_, ncclInvalidArgument,
            "{} contexts are asked for, and {} are in use: at most {} are possible", count, num_contexts_,
            kMaxContexts);
    channels_.resize(num_contexts_ + count, std::vector<Channel>(num_ranks()));
    return std::exchange(num_contexts_, num_contexts_ + count);
}

Region* Mesh::register_memory(void* base, uint64_t bytes, MemoryKind kind, bool signals_only, uint64_t timeout_ns) {
    require(kind == MemoryKind::kHost || config_.device != nullptr, ncclInvalidUsage,
            "device memory cannot be registered: this rank has no CUDA context, or the library was built without CUDA");
    std::unique_lock lock(mutex_);
    check_locked();
    auto owner = std::make_unique<Region>();
    Region* region = owner.get();
    region->id = static_cast<uint32_t>(regions_.size());
    region->base = static_cast<std::byte*>(base);
    region->bytes = bytes;
    region->kind = kind;
    region->remote.resize(num_ranks());
    if (kind == MemoryKind::kDevice && signals_only) region->words[0].assign(bytes / kSignalBytes, 0);
    regions_.push_back(std::move(owner));

    FrameHeader header = {};
    header.kind = FrameKind::kAnnounce;
    header.region = region->id;
    header.value = bytes;
    header.context = static_cast<uint16_t>(kind);
    region->remote[rank()] = {true, kind, bytes};
    for (uint32_t peer = 0; peer < num_ranks(); ++peer) {
        if (peer == rank()) continue;
        send_header(peer, header);
        const auto early = peers_[peer].early.find(region->id);
        if (early == peers_[peer].early.end()) continue;
        region->remote[peer] = early->second;
        peers_[peer].early.erase(early);
    }
    std::string missing, gone;
    uint32_t lost = kNoRank;
    const auto all_are_known = [&] {
        missing.clear();
        gone.clear();
        for (uint32_t peer = 0; peer < num_ranks(); ++peer) {
            if (region->remote[peer].is_known) continue;
            missing += fmt::format("{}{}", missing.empty() ? "" : ", ", peer);
            if (gone.empty() && is_lost(peer)) {
                lost = rank_to_name(peer);
                gone = lost == peer ? peers_[peer].lost
                                    : fmt::format("rank {} is lost; therefore rank {} failed, too", lost, peer);
            }
        }
        return missing.empty() || !gone.empty() || !failure_.empty();
    };
    const bool is_interrupted = !wait_locked(lock, timeout_ns, all_are_known);
    if (!missing.empty()) {
        release(lock, region);  // ranks that know all announcements may already write
        check_locked();
        if (!gone.empty()) {
            lock.unlock();
            report_loss(lost);
            fail(ncclRemoteError, "rank {} registers memory: {}", rank(), gone);
        }
        require(!is_interrupted, ncclRemoteError,
                "rank {} was interrupted waiting for ranks {} to register the same memory", rank(), missing);
        fail(ncclRemoteError, "rank {} timed out after {} ms waiting for ranks {} to register the same memory", rank(),
             timeout_ns / 1'000'000, missing);
    }
    return region;
}

bool Mesh::keep_words(const void* first, uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    for (const std::unique_ptr<Region>& region : regions_) {
        const uint64_t offset = reinterpret_cast<uintptr_t>(first) - reinterpret_cast<uintptr_t>(region->base);
        const bool is_there = region->kind == MemoryKind::kDevice && !region->is_leaving;
        if (!is_there || offset % kSignalBytes != 0 || !fits(offset, bytes, region->bytes)) continue;
        region->words[offset].resize(bytes / kSignalBytes);
        return true;
    }
    return false;
}

void Mesh::await_operations(const Region* region) {
    std::unique_lock lock(mutex_);
    uint64_t seen = region->num_operations;
    uint64_t first_round = num_rounds_;
    wait_locked(lock, kRoundsNs, [&] {
        if (region->num_operations != seen) first_round = num_rounds_;
        seen = region->num_operations;
        return num_rounds_ - first_round >= kQuietRounds || !failure_.empty();
    });
}

void Mesh::deregister_memory(Region* region) {
    std::unique_lock lock(mutex_);
    release(lock, region);
}

// Waits for operations on it, including signal words that are being copied to the device.
void Mesh::release(std::unique_lock<std::mutex>& lock, Region* region) {
    region->is_leaving = true;
    // After a failure few of them will end.
    wait_locked(lock, waits_briefly() ? kFailedDrainNs : kDrainNs,
                [&] { return region->uses == 0 && are_in(region->last_step_in); });
    if (region->uses == 0) {
        // A kernel's put that arrives after its group was destroyed may still name the region.
        region->base = nullptr;
        region->words = {};
        region->remote = {};
    } else {
        // Pending transfers still point to the region, so it lives until the communicator ends.
        fail_all(fmt::format("memory was deregistered while {} of its transfers were pending", region->uses));
    }
}

// Progresses until is_over() or the timeout. Other threads may use the mesh meanwhile. Returns false if the program
// interrupts it.
bool Mesh::wait_locked(std::unique_lock<std::mutex>& lock, uint64_t timeout_ns, const std::function<bool()>& is_over) {
    const uint64_t end_ns = cpu::saturating_add(cpu::steady_now_ns(), timeout_ns);
    Interruption interruption;
    while (!is_over() && cpu::steady_now_ns() < end_ns) {
        progress_locked();
        lock.unlock();
        sched_yield();
        const bool is_interrupted = interruption.has_come();
        lock.lock();
        if (!is_interrupted) continue;
        stop_waiting();
        return false;
    }
    return true;
}

bool Mesh::progress() {
    const std::lock_guard lock(mutex_);
    ++num_rounds_;
    return progress_locked();
}

bool Mesh::progress_if_idle(uint64_t idle_ns) {
    if (cpu::steady_now_ns() < progressed_ns_.load(std::memory_order_relaxed) + idle_ns) return false;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    const uint64_t before_ns = progressed_ns_.load(std::memory_order_relaxed);
    const bool happened = progress_locked();
    // The mesh still counts as idle; otherwise the progress thread would pause after each message.
    if (happened) progressed_ns_.store(before_ns, std::memory_order_relaxed);
    return happened;
}

// Returns true if all copies up to this step have reached the device, or none will any more.
bool Mesh::are_in(uint64_t step) {
    if (config_.device == nullptr || step == 0 || device_has_failed_) return true;
    bool are = true;
    guarded([&] { are = config_.device->done_in() >= step; });
    return are;
}

bool Mesh::progress_locked() {
    guarded([&] {
        send_held();
        if (!device_has_failed_) progress_outgoing();
        if (!device_has_failed_) progress_incoming();
    });
    // Without staging memory for received frames nothing more is received, which slows down the senders. But payloads
    // that are being fetched into staging memory need the network.
    const bool happened = unstaged_.empty() || num_fetches_ > 0 ? transport_.progress() : true;
    if (!failed_transfers_.empty()) {
        // A rank that left because another one is lost also fails transfers; the other one is to be named.
        transport_.look_after_peers();
        for (auto& [peer, message] : std::exchange(failed_transfers_, {})) {
            const std::string& reason = peers_[peer].gone_reason;
            fail_peer(peer, reason.empty() ? std::move(message) : fmt::format("rank {} is lost: {}", peer, reason));
        }
    }
    if (std::exchange(is_report_due_, false)) transport_.send_failure_report(failed_rank_);
    if (!dropped_.empty()) {
        for (const uint32_t lost : std::exchange(dropped_, {})) transport_.drop(lost);
    }
    // Reading the clock takes as long as polling for messages.
    if (++num_progresses_ % 16 != 0) return happened;
    const uint64_t now = cpu::steady_now_ns();
    now_ns_ = now;
    progressed_ns_.store(now, std::memory_order_relaxed);
    if (now < next_look_ns_) return happened;
    next_look_ns_ = now + kLookNs;
    transport_.look_after_peers();
    look_for_stalls(now);
    return happened;
}

// The peer has something to accept from now on.
void Mesh::begin_wait(uint32_t peer) {
    if (peers_[peer].waits++ == 0) peers_[peer].last_change_ns = cpu::steady_now_ns();
}

void Mesh::look_for_stalls(uint64_t now) {
    for (uint32_t peer = 0; peer < num_ranks(); ++peer) {
        const PeerState& state = peers_[peer];
        if (is_lost(peer)) continue;
        if (!state.gone_reason.empty() && now > state.gone_ns + kLastWordsNs) {
            fail_peer(peer, fmt::format("rank {} is lost: {}", peer, state.gone_reason));
            continue;
        }
        if (state.waits == 0 || now < state.last_change_ns) continue;
        const uint64_t quiet_ns = now - state.last_change_ns;
        if (!transport_.is_there(peer) && quiet_ns > kGraceNs) {
            fail_peer(peer, fmt::format("rank {} left while {} transfers with it were pending", peer, state.waits));
        } else if (quiet_ns >= config_.progress_timeout_ns) {
            fail_peer(peer, fmt::format("rank {} accepted no data for {} ms while {} transfers with it were pending",
                                        peer, quiet_ns / 1'000'000, state.waits));
        }
    }
}

void Mesh::on_departure(const Departure& departure) {
    PeerState& state = peers_[departure.rank];
    state.gone_ns = cpu::steady_now_ns();
    if (departure.link_end.in_order) {
        const uint32_t lost = departure.link_end.because_of;
        if (config_.outlives_ranks || lost >= num_ranks() || lost == rank()) return;
        return fail_peer(lost, fmt::format("rank {} reported that it lost rank {}, and left", departure.rank, lost));
    }
    state.gone_reason = departure.link_end.reason;
    if (config_.outlives_ranks) return;
    const uint32_t named = rank_to_name(departure.rank);
    fail_peer(named, named == departure.rank
                         ? fmt::format("rank {} is lost: {}", departure.rank, departure.link_end.reason)
                         : fmt::format("rank {} reported that it lost rank {}, and is gone", departure.rank, named));
}

std::string Mesh::why_gone(uint32_t peer) {
    const std::lock_guard lock(mutex_);
    progress_locked();
    const PeerState& state = peers_[peer];
    if (is_lost(peer)) return state.lost;
    if (!failure_.empty()) return failure_;
    if (state.gone_ns == 0 || cpu::steady_now_ns() <= state.gone_ns + kLastWordsNs) return {};
    return state.gone_reason.empty() ? "it has left the communicator" : state.gone_reason;
}

bool Mesh::left_in_order(uint32_t peer) {
    const std::lock_guard lock(mutex_);
    return peers_[peer].gone_ns != 0 && peers_[peer].gone_reason.empty();
}

void Mesh::report_loss(uint32_t lost) {
    std::unique_lock lock(mutex_);
    transport_.send_failure_report(lost);
    wait_locked(lock, kReportNs, [&] { return transport_.is_flushed(); });
}

uint32_t Mesh::reported_loss(uint32_t peer) {
    const std::lock_guard lock(mutex_);
    transport_.look_after_peers();
    return transport_.reported_loss(peer);
}

uint32_t Mesh::rank_to_name(uint32_t peer) const {
    return static_cast<uint32_t>(cpu::follow_reports(
        static_cast<int>(peer), static_cast<int>(rank()), static_cast<int>(num_ranks()),
        [this](int each) { return static_cast<int>(transport_.reported_loss(static_cast<uint32_t>(each))); }));
}

void Mesh::fail_all(std::string message) {
    if (!failure_.empty() || is_closing_) return;
    failure_ = std::move(message);
    has_failed_ = true;
}

// The rank is lost.
void Mesh::fail_peer(uint32_t rank, std::string message) {
    if (!config_.outlives_ranks || rank == transport_.rank()) {
        if (failure_.empty() && !is_closing_) {
            failed_rank_ = rank;
            is_report_due_ = true;  // sent later: the caller may be the transport
        }
        return fail_all(std::move(message));
    }
    if (is_lost(rank) || is_closing_) return;
    peers_[rank].lost = std::move(message);
    peers_[rank].notes.clear();
    dropped_.push_back(rank);  // closed later: the caller may be the transport
}

void Mesh::check_locked() const {
    if (!failure_.empty()) fail(ncclRemoteError, "rank {}: {}", transport_.rank(), failure_);
}

void Mesh::check() {
    const std::lock_guard lock(mutex_);
    check_locked();
}

uint64_t Mesh::num_refused_frames() {
    const std::lock_guard lock(mutex_);
    return transport_.num_refused();
}

Mesh::Inlet& Mesh::inlet(uint32_t context, uint32_t peer) {
    // A peer may have made its context before this rank has.
    while (context >= inlets_.size()) inlets_.emplace_back(num_ranks());
    return inlets_[context][peer];
}

}  // namespace crossdock::network
