// SPDX-License-Identifier: Apache-2.0
// The cryptographic functions of the handshake, from OpenSSL 3's libcrypto, which is opened at run time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>

namespace crossdock::network {

using Key = std::array<std::byte, 32>;
using ByteSpan = std::span<const std::byte>;

template <class Object>
ByteSpan object_bytes(const Object& object) {
    return std::as_bytes(std::span(&object, 1));
}

// From the kernel's random numbers. Throw ncclSystemError where there are none.
void fill_random(std::span<std::byte> bytes);
uint64_t random_number();

// Opens libcrypto at the first call of any function below: the file that CROSSDOCK_CRYPTO_LIBRARY names, else
// libcrypto.so.3. They throw ncclInvalidUsage with the loader's message if there is none, and ncclSystemError if it
// refuses an algorithm (a FIPS configuration).

Key sha256(ByteSpan bytes);
Key hmac_sha256(const Key& key, std::initializer_list<ByteSpan> parts);

// X25519 (RFC 7748).
struct KeyPair {
    Key secret;
    Key shared;  // what others may know
};
KeyPair make_key_pair();
KeyPair key_pair_of(const Key& secret);
// Nullopt if `shared` is one of the few points with which every secret gives the same result.
std::optional<Key> agree(const Key& secret, const Key& shared);

// ChaCha20-Poly1305 (RFC 8439). `context` is authenticated, too. A key must encrypt at most once with each number.
inline constexpr size_t kTagBytes = 16;
void encrypt(const Key& key, uint64_t number, ByteSpan context, ByteSpan plain, std::byte* sealed);
// False: nothing that encrypt() made with these arguments; `plain` is undefined then.
bool decrypt(const Key& key, uint64_t number, ByteSpan context, ByteSpan sealed, std::byte* plain);

}  // namespace crossdock::network
