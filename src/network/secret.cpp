// SPDX-License-Identifier: Apache-2.0
#include "network/secret.h"

#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace crossdock::network {
namespace {

struct SipState {
    uint64_t v0, v1, v2, v3;

    void round() {
        v0 += v1;
        v1 = std::rotl(v1, 13) ^ v0;
        v0 = std::rotl(v0, 32);
        v2 += v3;
        v3 = std::rotl(v3, 16) ^ v2;
        v0 += v3;
        v3 = std::rotl(v3, 21) ^ v0;
        v2 += v1;
        v1 = std::rotl(v1, 17) ^ v2;
        v2 = std::rotl(v2, 32);
    }

    void absorb(uint64_t word) {
        v3 ^= word;
        round();
        round();
        v0 ^= word;
    }
};

}  // namespace

Secret random_secret() {
    Secret secret;
    size_t filled = 0;
    while (filled < sizeof(secret)) {
        const ssize_t got = getrandom(reinterpret_cast<std::byte*>(secret.data()) + filled, sizeof(secret) - filled, 0);
        if (got < 0 && errno == EINTR) continue;
        require(got > 0, ncclSystemError, "no random numbers from the kernel: {}", std::strerror(errno));
        filled += static_cast<size_t>(got);
    }
    return secret;
}

uint64_t keyed_hash(const Secret& secret, std::span<const std::byte> bytes) {
    SipState state{secret[0] ^ 0x736f6d6570736575, secret[1] ^ 0x646f72616e646f6d, secret[0] ^ 0x6c7967656e657261,
                   secret[1] ^ 0x7465646279746573};
    const size_t total = bytes.size();
    while (bytes.size() >= sizeof(uint64_t)) {
        uint64_t word;
        std::memcpy(&word, bytes.data(), sizeof(word));
        state.absorb(word);
        bytes = bytes.subspan(sizeof(word));
    }
    uint64_t last = static_cast<uint64_t>(total) << 56;
    std::memcpy(&last, bytes.data(), bytes.size());
    state.absorb(last);
    state.v2 ^= 0xff;
    for (int i = 0; i < 4; ++i) state.round();
    return state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
}

}  // namespace crossdock::network
