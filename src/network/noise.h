// SPDX-License-Identifier: Apache-2.0
// The Noise Protocol Framework (revision 34, noiseprotocol.org), of which ranks use two protocols:
//
//   Noise_NNpsk0_25519_ChaChaPoly_SHA256   for ranks that know a common key only:
//       -> psk, e
//       <- e, ee
//   Noise_KKpsk0_25519_ChaChaPoly_SHA256   for ranks that also know each other's shared keys:
//       -> psk, e, es, ss
//       <- e, ee, se
//
// Names in comments are the specification's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "network/crypto.h"

namespace crossdock::network {

// What a handshake begins with. Both ends have the same psk and prologue; each has its own role.
struct NoiseStart {
    struct Static {
        KeyPair own;
        Key peer;
    };

    bool is_initiator;
    ByteSpan prologue;
    Key psk;
    std::optional<Static> keys = {};      // KKpsk0; none: NNpsk0
    KeyPair ephemeral = make_key_pair();  // fresh, except in tests
};

class NoiseSession {
  public:
    // A handshake's message without payload.
    static constexpr size_t kMessageBytes = sizeof(Key) + kTagBytes;

    explicit NoiseSession(const NoiseStart& start);
    NoiseSession(NoiseSession&&) = default;
    NoiseSession& operator=(NoiseSession&&) = default;
    ~NoiseSession();

    // The handshake: the initiator writes the first message, the responder the second one. read() returns nullopt if
    // the other end has another psk, prologue or key, or the message was changed; then the session is of no use.
    std::vector<std::byte> write(ByteSpan payload = {});
    std::optional<std::vector<std::byte>> read(ByteSpan message);

    // After it. What one end seals, the other one opens in the same order, once; null: it is anything else.
    std::vector<std::byte> seal(ByteSpan plain);
    std::optional<std::vector<std::byte>> open(ByteSpan sealed);
    static size_t sealed_bytes(size_t plain_bytes);

  private:
    enum class Token : uint8_t { kPsk, kE, kEe, kEs, kSe, kSs };
    struct Cipher {
        Key key;
        uint64_t number = 0;
    };

    std::span<const Token> tokens() const;
    bool mix(Token token);
    void mix_hash(ByteSpan bytes);
    void mix_key(ByteSpan bytes);
    void mix_key_and_hash(ByteSpan bytes);
    void end_message();

    bool is_initiator_;
    Key psk_;
    std::optional<NoiseStart::Static> keys_;
    KeyPair ephemeral_;
    Key peer_ephemeral_ = {};
    Key hash_;                      // h
    Key chaining_key_;              // ck
    std::optional<Cipher> cipher_;  // of the handshake
    int num_messages_ = 0;          // of the handshake that are done
    Cipher sends_, receives_;
};

}  // namespace crossdock::network
