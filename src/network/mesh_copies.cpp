// SPDX-License-Identifier: Apache-2.0
// Puts, signals and notes whose bytes the mesh copies, so that callers need not wait.
#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "network/mesh.h"

namespace crossdock::network {
namespace {

// Large copies are sent in pieces, which overlaps copying with sending.
constexpr uint64_t kCopyPieceBytes = uint64_t{256} << 10;

}  // namespace

OutFrame* Mesh::copy_frame(uint32_t peer, const FrameHeader& header, std::span<const std::byte> bytes) {
    OutFrame* frame = take_frame(peer, nullptr);
    frame->header = header;
    frame->header.length = bytes.size();
    if (bytes.size() <= OutFrame::kSmallBytes) {
        if (!bytes.empty()) std::memcpy(frame->small, bytes.data(), bytes.size());
        frame->send.bytes = {frame->small, bytes.size()};
        return frame;
    }
    if (!spare_copies_.empty()) {
        frame->copy = std::move(spare_copies_.back());
        spare_copies_.pop_back();
    }
    frame->copy.assign(bytes.begin(), bytes.end());
    frame->send.bytes = frame->copy;
    return frame;
}

void Mesh::send_held() {
    if (held_ == nullptr) return;
    OutFrame& frame = *std::exchange(held_, nullptr);
    send_frame(frame);
}

void Mesh::put_copy(uint32_t context, uint32_t peer, std::span<const std::byte> bytes, const Span& target) {
    const std::lock_guard lock(mutex_);
    send_held();
    check_locked();
    check_span(target, "target", peer, true);
    require(bytes.size() == target.bytes, ncclInternalError, "a put of {} bytes into {}", bytes.size(), target.bytes);
    if (bytes.empty() || !is_reached(peer)) return;
    FrameHeader header = {};
    header.kind = FrameKind::kPut;
    header.context = static_cast<uint16_t>(context);
    header.region = target.region->id;
    header.offset = target.offset;
    const uint64_t piece_bytes = std::min(kCopyPieceBytes, transport_.good_payload(peer));
    for (uint64_t at = 0; at < bytes.size(); at += piece_bytes) {
        send_held();
        header.number = channel(context, peer).next_frame++;
        header.offset = target.offset + at;
        held_ = copy_frame(peer, header, bytes.subspan(at, std::min<uint64_t>(piece_bytes, bytes.size() - at)));
    }
}

void Mesh::signal_copy(uint32_t context, uint32_t peer, const Signal& signal) {
    const std::lock_guard lock(mutex_);
    check_locked();
    check_span({signal.region, signal.offset, kSignalBytes}, "signal", peer, true);
    const bool rides = held_ != nullptr && held_->peer == peer && held_->header.context == context;
    if (!rides) send_held();
    if (!is_reached(peer)) return send_held();
    if (!rides) {
        FrameHeader header = {};
        header.kind = FrameKind::kPut;
        header.context = static_cast<uint16_t>(context);
        header.number = channel(context, peer).next_frame++;
        held_ = copy_frame(peer, header, {});
    }
    FrameHeader& header = held_->header;
    header.flags = static_cast<uint8_t>(kFlagSignal | (signal.is_strong ? kFlagStrong : 0));
    header.signal_region = signal.region->id;
    header.signal_offset = signal.offset;
    header.value = signal.value;
    send_held();
}

void Mesh::send_note(uint32_t peer, uint64_t number, std::span<const std::byte> bytes) {
    const std::lock_guard lock(mutex_);
    check_locked();
    require(bytes.size() <= kMaxNoteBytes, ncclInternalError, "a note of {} bytes, at most {} are possible",
            bytes.size(), kMaxNoteBytes);
    if (!is_reached(peer)) return;
    FrameHeader header = {};
    header.kind = FrameKind::kNote;
    header.value = number;
    OutFrame* frame = copy_frame(peer, header, bytes);
    frame->send.arrives_whole = true;
    send_frame(*frame);
}

bool Mesh::read_note(uint32_t peer, uint64_t number, std::vector<std::byte>& bytes) {
    const std::lock_guard lock(mutex_);
    auto& notes = peers_[peer].notes;
    const auto found = notes.find(number);
    if (found == notes.end()) return false;
    bytes = std::move(found->second);
    notes.erase(notes.begin(), std::next(found));
    return true;
}

}  // namespace crossdock::network
