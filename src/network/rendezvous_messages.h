// SPDX-License-Identifier: Apache-2.0
// What rank 0 and the others say to each other when they meet, and the two halves of their conversation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "network/rendezvous.h"

namespace crossdock::network {

inline constexpr uint64_t kRendezvousMagic = 0x32746565'6d736478;  // "xdsmeet2"

// A rank's answer to the challenge of rank 0.
struct Hello {
    uint64_t magic;
    Secret nonce;  // for rank 0's reply
    uint32_t rank;
    uint32_t num_ranks;
    RankCard card;
    uint64_t proof;  // hash of all this and the challenge's nonce
};

// Rank 0's last word; with code ncclSuccess everybody's cards follow. To whom did not know the secret it says nothing
// that it proves, so nobody can make it sign a refusal for somebody else.
struct Reply {
    uint64_t magic;
    uint32_t code;
    uint32_t num_ranks;
    char text[512];  // 0-terminated: why the rank is refused
    uint64_t proof;  // hash of all this, the cards, and the hello's nonce
};
static_assert(std::is_trivially_copyable_v<Hello> && std::is_trivially_copyable_v<Reply>);

Secret secret_of(const std::string& text);
uint64_t proof_of(const Secret& secret, Hello hello, const Secret& nonce);
uint64_t proof_of(const Secret& secret, Reply reply, std::span<const RankCard> cards, const Secret& nonce);

// A listener for what comes over the network through which `socket` is connected.
Listener make_listener(const Rendezvous& rendezvous, const Socket& socket);

// All bytes, by the deadline. False: the time is over, or the connection has ended.
bool send_all(const Socket& socket, std::span<const std::byte> bytes, uint64_t deadline_ns);
bool receive_all(const Socket& socket, std::span<std::byte> bytes, uint64_t deadline_ns);

Attendance attend_as_first(const Rendezvous& rendezvous, const RankCard& own);
Attendance attend_as_other(const Rendezvous& rendezvous, const RankCard& own);

}  // namespace crossdock::network
