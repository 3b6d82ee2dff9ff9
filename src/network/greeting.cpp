// SPDX-License-Identifier: Apache-2.0
#include "network/greeting.h"

#include <algorithm>
#include <cstring>

namespace crossdock::network {
namespace {

constexpr uint64_t kHelloMagic = 0x336f'6c6c'6568'6478;   // "xdhello3"
constexpr uint64_t kAnswerMagic = 0x3372'7773'6e61'6478;  // "xdanswr3"

// What the dialling rank sends in clear before its message of the handshake.
struct Hello {
    uint64_t magic;
    uint32_t source;
    uint32_t target;
    uint32_t num_ranks;
    uint32_t reserved;
};
// What both ends of a handshake must agree on.
struct Prologue {
    Hello hello;
    Key addresses;  // their hash
};
// Sealed: a letter's head, and then its blob.
struct LetterHead {
    uint64_t key;  // of frames to this rank
    uint32_t blob_bytes;
    uint32_t reserved;
};
static_assert(sizeof(Hello) == 24 && sizeof(Prologue) == 56 && sizeof(LetterHead) == 16);

constexpr size_t kHelloBytes = sizeof(Hello) + NoiseSession::kMessageBytes;
constexpr size_t kAnswerBytes = sizeof(kAnswerMagic) + NoiseSession::kMessageBytes;

// Other protocols are refused at the first wrong byte.
bool begins_with(ByteSpan bytes, uint64_t magic) {
    return std::memcmp(bytes.data(), &magic, std::min(bytes.size(), sizeof(magic))) == 0;
}

}  // namespace

Key secret_of(const std::string& text) { return sha256(std::as_bytes(std::span(text))); }

Greeting::Greeting(const Identity& own, std::span<const RankAddress> addresses, uint32_t rank,
                   std::optional<uint32_t> dialled, ByteSpan blob)
    : own_(&own), addresses_(addresses), rank_(rank), dialled_(dialled.has_value()), blob_(blob) {
    if (!dialled_) {
        expected_ = kHelloBytes;
        return;
    }
    expected_ = kAnswerBytes;
    peer_ = *dialled;
    start(true, rank_, peer_);
    say(session_->write());
}

void Greeting::start(bool is_initiator, uint32_t source, uint32_t target) {
    const Prologue prologue{{kHelloMagic, source, target, static_cast<uint32_t>(addresses_.size()), 0},
                            sha256(std::as_bytes(addresses_))};
    if (is_initiator) say(object_bytes(prologue.hello));
    session_.emplace(NoiseStart{is_initiator, object_bytes(prologue), own_->secret,
                                NoiseStart::Static{own_->keys, addresses_[is_initiator ? target : source].key}});
}

const char* Greeting::take(ByteSpan received) {
    in_.insert(in_.end(), received.begin(), received.end());
    if (waits_for_ == Stage::kOpening && !begins_with(in_, dialled_ ? kAnswerMagic : kHelloMagic))
        return "the process that listens there is not a rank";
    if (in_.size() < expected_) return nullptr;
    const char* refusal = nullptr;
    switch (waits_for_) {
        case Stage::kOpening:
            refusal = dialled_ ? read_answer() : read_hello();
            break;
        case Stage::kLetterHead:
            refusal = read_letter_head();
            break;
        case Stage::kLetter:
            refusal = read_letter();
            break;
    }
    in_.clear();
    return refusal;
}

const char* Greeting::read_hello() {
    constexpr const char* kRefusal = "the process that dialled is not a rank of this communicator";
    Hello hello;
    std::memcpy(&hello, in_.data(), sizeof(hello));
    // Only ranks below dial.
    if (hello.target != rank_ || hello.source >= rank_ || hello.num_ranks != addresses_.size() || hello.reserved != 0)
        return kRefusal;
    peer_ = hello.source;
    start(false, peer_, rank_);
    if (!session_->read(ByteSpan(in_).subspan(sizeof(hello)))) return kRefusal;
    say(object_bytes(kAnswerMagic));
    say(session_->write());
    waits_for_ = Stage::kLetterHead;
    expected_ = NoiseSession::sealed_bytes(sizeof(LetterHead));
    return nullptr;
}

const char* Greeting::read_answer() {
    if (!session_->read(ByteSpan(in_).subspan(sizeof(kAnswerMagic))))
        return "the process that answers is not a rank of this communicator";
    is_proven_ = true;
    say_letter();
    waits_for_ = Stage::kLetterHead;
    expected_ = NoiseSession::sealed_bytes(sizeof(LetterHead));
    return nullptr;
}

void Greeting::say_letter() {
    key_in_ = random_number();
    const LetterHead head{key_in_, static_cast<uint32_t>(blob_.size()), 0};
    say(session_->seal(object_bytes(head)));
    say(session_->seal(blob_));
}

const char* Greeting::read_letter_head() {
    constexpr const char* kRefusal = "what it sends was changed on its way";
    const auto opened = session_->open(in_);
    if (!opened) return kRefusal;
    LetterHead head;
    std::memcpy(&head, opened->data(), sizeof(head));
    if (head.blob_bytes > kMaxBlobBytes || head.reserved != 0) return kRefusal;
    is_proven_ = true;
    key_out_ = head.key;
    waits_for_ = Stage::kLetter;
    expected_ = NoiseSession::sealed_bytes(head.blob_bytes);
    if (expected_ == 0) end();
    return nullptr;
}

const char* Greeting::read_letter() {
    auto opened = session_->open(in_);
    if (!opened) return "what it sends was changed on its way";
    peer_blob_ = std::move(*opened);
    end();
    return nullptr;
}

void Greeting::end() {
    if (!dialled_) say_letter();
    expected_ = 0;
}

}  // namespace crossdock::network
