// SPDX-License-Identifier: Apache-2.0
#include "network/noise.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "core/error.h"

namespace crossdock::network {
namespace {

constexpr std::string_view kNnPsk0 = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";
constexpr std::string_view kKkPsk0 = "Noise_KKpsk0_25519_ChaChaPoly_SHA256";

constexpr size_t kMaxMessageBytes = 65535;
constexpr size_t kMaxPlainBytes = kMaxMessageBytes - kTagBytes;

// HKDF of the specification; count: 2 or 3 outputs.
std::array<Key, 3> derive(const Key& chaining_key, ByteSpan input, int count) {
    const Key temporary = hmac_sha256(chaining_key, {input});
    std::array<Key, 3> outputs = {};
    for (int i = 0; i < count; ++i) {
        const auto number = static_cast<std::byte>(i + 1);
        const ByteSpan before = i == 0 ? ByteSpan() : ByteSpan(outputs[static_cast<size_t>(i) - 1]);
        outputs[static_cast<size_t>(i)] = hmac_sha256(temporary, {before, ByteSpan(&number, 1)});
    }
    return outputs;
}

std::vector<std::byte> joined(ByteSpan a, ByteSpan b) {
    std::vector<std::byte> bytes(a.begin(), a.end());
    bytes.insert(bytes.end(), b.begin(), b.end());
    return bytes;
}

}  // namespace

NoiseSession::NoiseSession(const NoiseStart& start)
    : is_initiator_(start.is_initiator), psk_(start.psk), keys_(start.keys), ephemeral_(start.ephemeral) {
    // Names longer than a hash begin as their hash.
    hash_ = chaining_key_ = sha256(std::as_bytes(std::span(keys_ ? kKkPsk0 : kNnPsk0)));
    mix_hash(start.prologue);
    if (!keys_) return;
    mix_hash(is_initiator_ ? keys_->own.shared : keys_->peer);
    mix_hash(is_initiator_ ? keys_->peer : keys_->own.shared);
}

NoiseSession::~NoiseSession() {
    for (Key* key : {&psk_, &ephemeral_.secret, &chaining_key_, &sends_.key, &receives_.key})
        explicit_bzero(key->data(), key->size());
    if (keys_) explicit_bzero(keys_->own.secret.data(), keys_->own.secret.size());
    if (cipher_) explicit_bzero(cipher_->key.data(), cipher_->key.size());
}

std::span<const NoiseSession::Token> NoiseSession::tokens() const {
    static constexpr Token kNnFirst[] = {Token::kPsk, Token::kE};
    static constexpr Token kNnSecond[] = {Token::kE, Token::kEe};
    static constexpr Token kKkFirst[] = {Token::kPsk, Token::kE, Token::kEs, Token::kSs};
    static constexpr Token kKkSecond[] = {Token::kE, Token::kEe, Token::kSe};
    if (num_messages_ == 0) return keys_ ? std::span<const Token>(kKkFirst) : kNnFirst;
    return keys_ ? std::span<const Token>(kKkSecond) : kNnSecond;
}

void NoiseSession::mix_hash(ByteSpan bytes) { hash_ = sha256(joined(hash_, bytes)); }

void NoiseSession::mix_key(ByteSpan bytes) {
    const auto outputs = derive(chaining_key_, bytes, 2);
    chaining_key_ = outputs[0];
    cipher_ = Cipher{outputs[1]};
}

void NoiseSession::mix_key_and_hash(ByteSpan bytes) {
    const auto outputs = derive(chaining_key_, bytes, 3);
    chaining_key_ = outputs[0];
    mix_hash(outputs[1]);
    cipher_ = Cipher{outputs[2]};
}

// All tokens but e. Returns false if the peer's key is none.
bool NoiseSession::mix(Token token) {
    std::optional<Key> agreed;
    switch (token) {
        case Token::kPsk:
            mix_key_and_hash(psk_);
            return true;
        case Token::kE:
            break;
        case Token::kEe:
            agreed = agree(ephemeral_.secret, peer_ephemeral_);
            break;
        case Token::kEs:
            agreed = is_initiator_ ? agree(ephemeral_.secret, keys_->peer) : agree(keys_->own.secret, peer_ephemeral_);
            break;
        case Token::kSe:
            agreed = is_initiator_ ? agree(keys_->own.secret, peer_ephemeral_) : agree(ephemeral_.secret, keys_->peer);
            break;
        case Token::kSs:
            agreed = agree(keys_->own.secret, keys_->peer);
            break;
    }
    if (!agreed) return false;
    mix_key(*agreed);
    explicit_bzero(agreed->data(), agreed->size());
    return true;
}

std::vector<std::byte> NoiseSession::write(ByteSpan payload) {
    require(num_messages_ == (is_initiator_ ? 0 : 1), ncclInternalError, "no message of the handshake is due");
    std::vector<std::byte> message;
    for (const Token token : tokens()) {
        if (token == Token::kE) {
            message.assign(ephemeral_.shared.begin(), ephemeral_.shared.end());
            mix_hash(ephemeral_.shared);
            mix_key(ephemeral_.shared);
        } else {
            require(mix(token), ncclRemoteError, "the key in a rank's address is none");
        }
    }
    const size_t begin = message.size();
    message.resize(begin + payload.size() + kTagBytes);
    encrypt(cipher_->key, cipher_->number++, hash_, payload, message.data() + begin);
    mix_hash(ByteSpan(message).subspan(begin));
    end_message();
    return message;
}

std::optional<std::vector<std::byte>> NoiseSession::read(ByteSpan message) {
    require(num_messages_ == (is_initiator_ ? 1 : 0), ncclInternalError, "no message of the handshake is expected");
    if (message.size() < kMessageBytes || message.size() > kMaxMessageBytes) return std::nullopt;
    const ByteSpan sealed = message.subspan(sizeof(Key));
    for (const Token token : tokens()) {
        if (token == Token::kE) {
            std::copy_n(message.begin(), sizeof(Key), peer_ephemeral_.begin());
            mix_hash(peer_ephemeral_);
            mix_key(peer_ephemeral_);
        } else if (!mix(token)) {
            return std::nullopt;
        }
    }
    std::vector<std::byte> payload(sealed.size() - kTagBytes);
    if (!decrypt(cipher_->key, cipher_->number++, hash_, sealed, payload.data())) return std::nullopt;
    mix_hash(sealed);
    end_message();
    return payload;
}

// Split() after the last one.
void NoiseSession::end_message() {
    if (++num_messages_ < 2) return;
    const auto outputs = derive(chaining_key_, {}, 2);
    (is_initiator_ ? sends_ : receives_).key = outputs[0];
    (is_initiator_ ? receives_ : sends_).key = outputs[1];
}

size_t NoiseSession::sealed_bytes(size_t plain_bytes) {
    return plain_bytes + (plain_bytes + kMaxPlainBytes - 1) / kMaxPlainBytes * kTagBytes;
}

std::vector<std::byte> NoiseSession::seal(ByteSpan plain) {
    require(num_messages_ == 2, ncclInternalError, "the handshake is not over");
    std::vector<std::byte> sealed(sealed_bytes(plain.size()));
    for (std::byte* target = sealed.data(); !plain.empty();) {
        const ByteSpan part = plain.first(std::min(plain.size(), kMaxPlainBytes));
        encrypt(sends_.key, sends_.number++, {}, part, target);
        target += part.size() + kTagBytes;
        plain = plain.subspan(part.size());
    }
    return sealed;
}

std::optional<std::vector<std::byte>> NoiseSession::open(ByteSpan sealed) {
    require(num_messages_ == 2, ncclInternalError, "the handshake is not over");
    std::vector<std::byte> plain;
    while (!sealed.empty()) {
        const ByteSpan part = sealed.first(std::min(sealed.size(), kMaxMessageBytes));
        if (part.size() <= kTagBytes) return std::nullopt;
        const size_t begin = plain.size();
        plain.resize(begin + part.size() - kTagBytes);
        if (!decrypt(receives_.key, receives_.number++, {}, part, plain.data() + begin)) return std::nullopt;
        sealed = sealed.subspan(part.size());
    }
    return plain;
}

}  // namespace crossdock::network
