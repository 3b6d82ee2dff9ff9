// SPDX-License-Identifier: Apache-2.0
// Puts and signals to GIN peers, with counters of the traffic.
#pragma once

#include "device/context.h"
#include "device/network.h"
#include "kernels/reach.h"
#include "kernels/wait.h"

namespace crossdock {
namespace {

CROSSDOCK_DEVICE void count_traffic(const Ctx& ctx, const Reach& reach, Traffic what, uint64_t increase) {
    if constexpr (!kHasGinPeers) return;
    uint64_t* counters = reach.words.traffic.in(reach.network.local);
    ctx.add_relaxed_device(counters + static_cast<uint32_t>(what), increase);
}

// Counts rows sent to the peer. bytes: with their scales and headers.
CROSSDOCK_DEVICE void count_rows(const Ctx& ctx, const Reach& reach, uint32_t peer, uint64_t rows, uint64_t bytes) {
    if constexpr (!kHasGinPeers) return;
    const bool crosses = is_remote(reach, peer);
    count_traffic(ctx, reach, crosses ? Traffic::kCrossedRows : Traffic::kInsideRows, rows);
    if (!crosses) count_traffic(ctx, reach, Traffic::kInsideBytes, bytes);
}

// Called before the put, so that few values are live across its call.
CROSSDOCK_DEVICE void count_put(const Ctx& ctx, const Reach& reach, uint64_t bytes) {
    count_traffic(ctx, reach, Traffic::kPuts, 1);
    count_traffic(ctx, reach, Traffic::kCrossedBytes, bytes);
}

CROSSDOCK_DEVICE void put(const Ctx& ctx, const Reach& reach, uint32_t peer, uint64_t target, uint64_t source,
                          uint64_t bytes) {
    count_put(ctx, reach, bytes);
    put_to_peer(reach.network, peer, target, source, bytes);
}

CROSSDOCK_DEVICE void put_value(const Ctx& ctx, const Reach& reach, uint32_t peer, uint64_t target, uint64_t value) {
    count_put(ctx, reach, sizeof(value));
    put_value_to_peer(reach.network, peer, target, value);
}

// Raises a word of the peer to `value`. A signal adds the difference to the previous value, which this rank keeps in a
// word of its own: so signals may overtake each other, and a word is never too large. One thread per word at a time.
struct Raise {
    uint64_t word;    // the peer's
    uint64_t raised;  // this rank's: the previous value
    uint64_t value;
};

// This rank's signal at the peer.
CROSSDOCK_DEVICE Raise raise_of(const Reach& reach, Signal signal, uint32_t peer, uint64_t value) {
    return {signal_offset(reach, reach.words.signals, signal, reach.rank),
            signal_offset(reach, reach.words.raised, signal, peer), value};
}

// The number to add; 0: the word already has the value.
CROSSDOCK_DEVICE uint64_t take_increase(const Reach& reach, const Raise& raise) {
    uint64_t* raised = reinterpret_cast<uint64_t*>(reach.network.local + raise.raised);
    const uint64_t before = *raised;
    *raised = raise.value;
    return raise.value - before;
}

// After everything that was put to the peer.
CROSSDOCK_DEVICE void raise_word(const Ctx& ctx, const Reach& reach, uint32_t peer, const Raise& raise) {
    const uint64_t increase = take_increase(reach, raise);
    if (increase == 0) return;
    count_traffic(ctx, reach, Traffic::kSignals, 1);
    count_traffic(ctx, reach, Traffic::kCrossedBytes, sizeof(raise.value));
    signal_peer(reach.network, peer, raise.word, increase);
}

CROSSDOCK_DEVICE void raise_signal(const Ctx& ctx, const Reach& reach, Signal signal, uint32_t peer, uint64_t value) {
    raise_word(ctx, reach, peer, raise_of(reach, signal, peer, value));
}

// A put followed by a signal, as one message.
CROSSDOCK_DEVICE void put_and_raise(const Ctx& ctx, const Reach& reach, uint32_t peer, uint64_t target, uint64_t source,
                                    uint64_t bytes, const Raise& raise) {
    count_put(ctx, reach, bytes + sizeof(raise.value));
    put_with_signal_to_peer(reach.network, peer, target, source, bytes, raise.word, take_increase(reach, raise));
}

CROSSDOCK_DEVICE void put_value_and_raise(const Ctx& ctx, const Reach& reach, uint32_t peer, uint64_t target,
                                          uint64_t value, const Raise& raise) {
    count_put(ctx, reach, sizeof(value) + sizeof(raise.value));
    put_value_with_signal_to_peer(reach.network, peer, target, value, raise.word, take_increase(reach, raise));
}

// Waits until the peer has raised its signal to `value`: everything that it put before has arrived.
CROSSDOCK_DEVICE bool wait_signal(const Ctx& ctx, const WaitScope& scope, const Reach& reach,
                                  const Operation& operation, WaitStep step, Signal signal, uint32_t peer,
                                  uint64_t value) {
    const uint64_t* word = signal_word(reach, signal, peer);
    return wait_until(
        ctx, scope, operation, step, peer, value, [&] { return ctx.load_acquire_system(word); },
        [&](uint64_t seen) { return seen >= value; });
}

}  // namespace
}  // namespace crossdock
