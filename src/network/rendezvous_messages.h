// SPDX-License-Identifier: Apache-2.0
// The messages between rank 0 and the others during the rendezvous, and the two halves of the protocol.
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
    RankInfo info;
    uint64_t proof;  // hash of the fields above and the challenge's nonce
};

// Rank 0's reply. With ncclSuccess, the RankInfos of all ranks follow. A refusal of a rank that did not prove the
// secret carries no proof, so rank 0 cannot be used to sign refusals for other ranks.
struct Reply {
    uint64_t magic;
    uint32_t code;
    uint32_t num_ranks;
    char text[512];  // 0-terminated: why the rank is refused
    uint64_t proof;  // hash of the fields above, the RankInfos, and the hello's nonce
};
static_assert(std::is_trivially_copyable_v<Hello> && std::is_trivially_copyable_v<Reply>);

Secret secret_of(const std::string& text);
uint64_t proof_of(const Secret& secret, Hello hello, const Secret& nonce);
uint64_t proof_of(const Secret& secret, Reply reply, std::span<const RankInfo> ranks, const Secret& nonce);

// A listener on the network that connects `socket`.
Listener make_listener(const Rendezvous& rendezvous, const Socket& socket);

// Transfer all bytes. Return false if the deadline passed or the connection ended.
bool send_all(const Socket& socket, std::span<const std::byte> bytes, uint64_t deadline_ns);
bool receive_all(const Socket& socket, std::span<std::byte> bytes, uint64_t deadline_ns);

JoinedRanks join_as_first(const Rendezvous& rendezvous, const RankInfo& own);
JoinedRanks join_as_other(const Rendezvous& rendezvous, const RankInfo& own);

}  // namespace crossdock::network
