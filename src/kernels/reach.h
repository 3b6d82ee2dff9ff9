// SPDX-License-Identifier: Apache-2.0
// How a group's kernels reach other ranks: LSA peers by loads and stores, GIN peers through the network, by puts and
// signals.
#pragma once

#include "device/layout.h"
#include "device/network_handle.h"
#include "device/wait_records.h"

namespace crossdock {

// The meaning of a signal's value. Every rank has one word per kind and peer; a word has one writer, and grows.
enum class Signal : uint32_t {
    kEntered,            // the latest operation that the peer has entered
    kData,               // the latest operation whose puts by the peer have all arrived
    kWeights,            // LL: the latest combine whose weights of the peer have arrived
    kTotals = kWeights,  // HT: the latest update whose total of the peer has arrived
    kBarrier             // rounds of mask cleans for which the peer has put its number
};
inline constexpr uint32_t kNumSignals = 4;

// The rank's own traffic, to LSA peers (inside) and GIN peers (crossed).
enum class Traffic : uint32_t { kInsideRows, kInsideBytes, kCrossedRows, kCrossedBytes, kPuts, kSignals };
inline constexpr uint32_t kNumTraffic = 6;

// In every rank's piece of one symmetric allocation.
struct GinWords {
    Region<uint64_t> signals;  // [signals][ranks]: raised by the peers
    Region<uint64_t> raised;   // [signals][ranks]: the values that this rank has raised at the peers; its own
    Region<uint64_t> barrier;  // [2 cleans][2 phases][ranks]: put by the peers
    Region<uint64_t> traffic;  // [traffic]; its own

    constexpr void lay_out(Cursor& piece, uint64_t num_ranks) {
        piece.take(signals, kNumSignals * num_ranks);
        piece.take(raised, kNumSignals * num_ranks);
        piece.take(barrier, 4 * num_ranks);
        piece.take(traffic, kNumTraffic);
    }
};

struct Reach {
    NetworkHandle network;
    uint32_t num_ranks = 0;
    uint32_t rank = 0;
    uint32_t first_of_team = 0;  // ranks [first, end) share this rank's team
    uint32_t end_of_team = 0;
    GinWords words;

    bool has_several_teams() const { return end_of_team - first_of_team < num_ranks; }
};

namespace {

CROSSDOCK_DEVICE bool is_remote(const Reach& reach, uint32_t peer) {
    if constexpr (!kHasGinPeers) return false;
    return peer < reach.first_of_team || peer >= reach.end_of_team;
}

// The offset of a peer's word of this signal in the array at `words`.
CROSSDOCK_DEVICE uint64_t signal_offset(const Reach& reach, const Region<uint64_t>& words, Signal signal,
                                        uint32_t peer) {
    return words.offset + 8 * (static_cast<uint64_t>(signal) * reach.num_ranks + peer);
}

// This rank's word that the peer raises.
CROSSDOCK_DEVICE const uint64_t* signal_word(const Reach& reach, Signal signal, uint32_t peer) {
    return reinterpret_cast<const uint64_t*>(reach.network.local +
                                             signal_offset(reach, reach.words.signals, signal, peer));
}

}  // namespace
}  // namespace crossdock
