// SPDX-License-Identifier: Apache-2.0
// The messages between rank 0 and the others during the rendezvous, and the two halves of the protocol. A rank other
// than 0 begins with an Opening, rank 0 answers with another one, and all that follows is sealed. docs/protocol.md says
// what each side knows after each message.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "network/noise.h"
#include "network/rendezvous.h"

namespace crossdock::network {

inline constexpr uint64_t kRendezvousMagic = 0x33746565'6d736478;  // "xdsmeet3"
// Rank 0 could not read the opening. Not authenticated: anyone may say so.
inline constexpr uint64_t kOtherSecretMagic = 0x33726568'746f6478;  // "xdother3"

struct Opening {
    uint64_t magic;
    std::array<std::byte, NoiseSession::kMessageBytes> message;  // of the Noise handshake
};

// A rank to rank 0.
struct Hello {
    uint32_t rank;
    uint32_t num_ranks;
    uint64_t time_left_ms;  // until the rank gives up
    char job[128];          // 0-terminated; empty: unknown
    RankInfo info;
};

enum class Verdict : uint32_t {
    kWelcome = 1,  // the RankInfos of all ranks follow
    kContradicts,  // ranks do not agree
    kTimeIsUp,     // the rank's own time: others are missing
    kGaveUp,       // rank 0's: others are missing
    kOtherJob,     // this rank 0 is another job's
};

// Rank 0's reply.
struct Reply {
    Verdict verdict;
    uint32_t num_ranks;
    char text[512];  // 0-terminated: why the rank is refused
};
static_assert(sizeof(Opening) == 56 && std::is_trivially_copyable_v<Opening> && std::is_trivially_copyable_v<Hello> &&
              std::is_trivially_copyable_v<Reply>);

// is_initiator: a rank other than 0.
NoiseSession make_session(const Rendezvous& rendezvous, bool is_initiator);
Opening make_opening(NoiseSession& session);

// A listener on the network that connects `socket`.
Listener make_listener(const Rendezvous& rendezvous, const Socket& socket);

// Transfer all bytes. Return false if the deadline passed or the connection ended.
bool send_all(const Socket& socket, std::span<const std::byte> bytes, uint64_t deadline_ns);
bool receive_all(const Socket& socket, std::span<std::byte> bytes, uint64_t deadline_ns);

JoinedRanks join_as_first(const Rendezvous& rendezvous, const RankInfo& own);
JoinedRanks join_as_other(const Rendezvous& rendezvous, const RankInfo& own);

}  // namespace crossdock::network
