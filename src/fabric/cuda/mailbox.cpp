// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/mailbox.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "core/interrupt.h"
#include "fabric/cuda/mailbox_put.h"
#include "runtime/cuda/cuda_check.h"

namespace crossdock {
namespace {

constexpr size_t kSlotBytes = 1024;
constexpr auto kPollInterval = std::chrono::microseconds(50);

// Layout of a rank's memory. A half has num_ranks slots and flags.
struct Layout {
    size_t num_ranks;
    size_t slot(size_t half, size_t rank) const { return (half * num_ranks + rank) * kSlotBytes; }
    size_t flag(size_t half, size_t rank) const { return slot(2, 0) + (half * num_ranks + rank) * sizeof(uint64_t); }
    size_t bytes() const { return flag(2, 0); }
};

}  // namespace

size_t Mailbox::bytes(int num_ranks) { return Layout{static_cast<size_t>(num_ranks)}.bytes(); }

Mailbox::Mailbox(const NcclRank& self, CudaRuntime& runtime, std::unique_ptr<SymmetricMemory> memory,
                 std::optional<NetworkHandle> gin)
    : self_(self), runtime_(runtime), memory_(std::move(memory)), gin_(gin) {
    staging_ = static_cast<std::byte*>(runtime_.allocate_host_visible(bytes(self_.num_ranks) / 2));
}

Mailbox::~Mailbox() { runtime_.free_host_visible(staging_); }

void Mailbox::all_gather(const void* own, void* all, size_t bytes, const char* what, Deadline deadline) {
    require(!out_of_step_, ncclRemoteError, "{}: an earlier exchange between the ranks failed", what);
    out_of_step_ = true;
    DeviceGuard guard(self_.device);
    const auto* own_bytes = static_cast<const std::byte*>(own);
    auto* all_bytes = static_cast<std::byte*>(all);
    size_t offset = 0;
    do {  // no bytes: one round, a barrier
        const size_t part_bytes = std::min(bytes - offset, kSlotBytes);
        run_round(own_bytes + offset, part_bytes, what, deadline);
        for (size_t rank = 0; rank < static_cast<size_t>(self_.num_ranks) && part_bytes > 0; ++rank) {
            std::memcpy(all_bytes + rank * bytes + offset, staging_ + rank * kSlotBytes, part_bytes);
        }
        offset += part_bytes;
    } while (offset < bytes);
    out_of_step_ = false;
}

// Call after the copies of this rank's bytes to itself. A signal adds, so it adds the difference to the half's last
// round.
void Mailbox::put_to_other_teams(size_t half, size_t bytes, uint64_t round, cudaStream_t stream) {
    const Layout layout{static_cast<size_t>(self_.num_ranks)};
    MailboxPut put{};
    put.network = *gin_;
    put.num_ranks = self_.num_ranks;
    put.first_of_team = self_.first_of_team();
    put.end_of_team = put.first_of_team + self_.lsa_team_size;
    put.slot = layout.slot(half, static_cast<size_t>(self_.rank));
    put.bytes = bytes;
    put.flag = layout.flag(half, static_cast<size_t>(self_.rank));
    put.increase = round < 2 ? round : 2;
    cuda::launch_mailbox_put(put, stream);
}

void Mailbox::run_round(const std::byte* own, size_t bytes, const char* what, Deadline deadline) {
    const auto num_ranks = static_cast<size_t>(self_.num_ranks);
    const auto rank = static_cast<size_t>(self_.rank);
    const Layout layout{num_ranks};
    const uint64_t round = ++round_;
    const size_t half = round % 2;
    const cudaStream_t stream = runtime_.internal_stream();
    const auto copy = [&](void* target, const void* source, size_t num_bytes) {
        if (num_bytes > 0)
            check_cuda(cudaMemcpyAsync(target, source, num_bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    };
    const auto finish = [&] { check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); };
    const auto send = [&](size_t offset, size_t num_bytes) {
        for (int peer = 0; peer < self_.num_ranks; ++peer) {
            if (self_.is_in_lsa_team(peer)) copy(memory_->peers.at(peer, offset), staging_, num_bytes);
        }
        finish();  // flags leave only when the bytes have arrived
    };

    if (bytes > 0) std::memcpy(staging_, own, bytes);
    send(layout.slot(half, rank), bytes);
    if (gin_) put_to_other_teams(half, bytes, round, stream);
    std::memcpy(staging_, &round, sizeof(round));
    send(layout.flag(half, rank), sizeof(round));

    auto* flags = reinterpret_cast<uint64_t*>(staging_ + num_ranks * kSlotBytes);
    Interruption interruption;
    for (;;) {
        copy(flags, memory_->local + layout.flag(half, 0), num_ranks * sizeof(uint64_t));
        finish();
        if (std::count(flags, flags + num_ranks, round) == self_.num_ranks) break;
        if (std::chrono::steady_clock::now() >= deadline) {
            std::string missing;
            for (size_t peer = 0; peer < num_ranks; ++peer) {
                if (flags[peer] != round) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", peer);
            }
            fail(ncclRemoteError, "{}: ranks that did not come in time: {}", what, missing);
        }
        require(!interruption.has_come(), ncclRemoteError, "rank {} was interrupted in {}", rank, what);
        std::this_thread::sleep_for(kPollInterval);
    }
    copy(staging_, memory_->local + layout.slot(half, 0), bytes > 0 ? num_ranks * kSlotBytes : 0);
    finish();
}

}  // namespace crossdock
