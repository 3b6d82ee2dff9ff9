// SPDX-License-Identifier: Apache-2.0
// The protocol on a new link, without the link: bytes come in and go out. docs/protocol.md has its messages and says
// what each side knows after each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "network/handshake.h"
#include "network/noise.h"

namespace crossdock::network {

class Greeting {
  public:
    // dialled: the rank that this one has dialled; none: a connection that this one has accepted. The spans stay valid
    // as long as this.
    Greeting(const Identity& own, std::span<const RankAddress> addresses, uint32_t rank,
             std::optional<uint32_t> dialled, ByteSpan blob);

    // How many bytes may be received now: later ones belong to the owner of the link. 0: all have come.
    size_t wanted() const { return expected_ - in_.size(); }
    // At most wanted() bytes. Returns null, or why the other end is not the rank it should be; then the connection is
    // to be closed.
    const char* take(ByteSpan received);
    // What is to be sent next; it may be empty. Always take it before more bytes.
    std::vector<std::byte> take_output() { return std::move(out_); }

    // All has been received and made: with the last output the peer has everything, too.
    bool is_done() const { return expected_ == 0; }
    // The other end is the rank that it says; what it sent before was no proof, since it may be a recording.
    bool is_proven() const { return is_proven_; }
    uint32_t peer() const { return peer_; }  // valid if dialled or proven

    // With is_done(): what the peer says, and the keys of frames to and from it.
    std::vector<std::byte> take_blob() { return std::move(peer_blob_); }
    uint64_t key_out() const { return key_out_; }
    uint64_t key_in() const { return key_in_; }

  private:
    enum class Stage : uint8_t { kOpening, kLetterHead, kLetter };

    void start(bool is_initiator, uint32_t source, uint32_t target);
    const char* read_hello();
    const char* read_answer();
    const char* read_letter_head();
    const char* read_letter();
    void say(ByteSpan bytes) { out_.insert(out_.end(), bytes.begin(), bytes.end()); }
    void say_letter();
    void end();

    const Identity* own_;
    std::span<const RankAddress> addresses_;
    uint32_t rank_;
    bool dialled_;
    ByteSpan blob_;
    Stage waits_for_ = Stage::kOpening;
    size_t expected_;  // bytes of the message that comes; 0: none comes
    std::vector<std::byte> in_, out_;
    std::optional<NoiseSession> session_;
    uint32_t peer_ = 0;
    bool is_proven_ = false;
    uint64_t key_out_ = 0, key_in_ = 0;
    std::vector<std::byte> peer_blob_;
};

}  // namespace crossdock::network
