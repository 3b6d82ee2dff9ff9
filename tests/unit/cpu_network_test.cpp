// SPDX-License-Identifier: Apache-2.0
// The simulation's network guarantees what kernels rely on, and no more.
#include <gtest/gtest.h>

#include <vector>

#include "runtime/cpu/simulated_network.h"

namespace crossdock::cpu {
namespace {

constexpr uint64_t kLater = 1'000'000'000;

// Steps from arrival to arrival until no message is pending.
template <typename Look>
void deliver(SimulatedNetwork& network, Look look) {
    while (network.next_arrival_ns() != UINT64_MAX) {
        EXPECT_TRUE(network.advance_to(network.next_arrival_ns()));
        look();
    }
}

// With any seed, a signal arrives after all earlier puts of its rank to that peer.
TEST(SimulatedNetwork, SignalsStayBehindPuts) {
    for (uint64_t seed = 0; seed < 200; ++seed) {
        SimulatedNetwork network(2, {}, seed);
        const std::vector<uint64_t> source(16, 7);
        std::vector<uint64_t> target(16);
        uint64_t value = 0;
        uint64_t signal = 0;
        for (size_t i = 0; i < 16; ++i) network.put(0, 1, &target[i], &source[i], 8, 0);
        network.put_value(0, 1, &value, 9, 0);
        network.signal(0, 1, &signal, 1, 0);
        deliver(network, [&] { EXPECT_TRUE(signal == 0 || (target == source && value == 9)) << "seed " << seed; });
        EXPECT_EQ(signal, 1u);
    }
}

// Puts overtake each other, signals of different ranks and of the same one do, and puts behind a signal may precede it.
TEST(SimulatedNetwork, WhatMayOvertakeDoes) {
    bool puts = false, signals = false, put_before_signal = false;
    for (uint64_t seed = 0; seed < 100; ++seed) {
        SimulatedNetwork network(2, {}, seed);
        uint64_t words[5] = {};
        network.put_value(0, 1, &words[0], 1, 0);
        network.put_value(0, 1, &words[1], 1, 0);
        network.signal(0, 1, &words[2], 1, 0);
        network.signal(0, 1, &words[3], 1, 0);
        network.put_value(0, 1, &words[4], 1, 0);
        deliver(network, [&] {
            puts = puts || (words[1] > words[0]);
            signals = signals || (words[3] > words[2]);
            put_before_signal = put_before_signal || (words[4] > words[2]);
        });
    }
    EXPECT_TRUE(puts && signals && put_before_signal);
}

// After a flush sources may change; before it, a put reads its source when it leaves.
TEST(SimulatedNetwork, AFlushReadsSources) {
    for (const bool flushes : {false, true}) {
        SimulatedNetwork network(2, {}, 1);
        uint64_t source = 1;
        uint64_t target = 0;
        network.put(0, 1, &target, &source, 8, 0);
        if (flushes) network.read_sources(0);
        EXPECT_EQ(target, 0u) << "a flush says nothing about the other side";
        source = 2;
        network.advance_to(kLater);
        EXPECT_EQ(target, flushes ? 1u : 2u);
    }
}

// A link has one rate for all that a rank sends.
TEST(SimulatedNetwork, ALinkIsShared) {
    NetworkConfig config;
    config.max_delay_ns = 1;
    config.ns_per_kib = 1000;
    SimulatedNetwork network(3, config, 1);
    const std::vector<std::byte> source(1 << 20);
    std::vector<std::byte> target(1 << 20);
    uint64_t signals[2] = {};
    network.put(0, 1, target.data(), source.data(), source.size(), 0);
    network.signal(0, 2, &signals[0], 1, 0);
    network.signal(1, 2, &signals[1], 1, 0);
    network.advance_to(500'000);
    EXPECT_EQ(signals[1], 1u) << "another rank's link is free";
    EXPECT_EQ(signals[0], 0u) << "a mebibyte takes a millisecond";
    network.advance_to(1'100'000);
    EXPECT_EQ(signals[0], 1u);
}

// A rank that is cut off receives and sends nothing; a rank that dies leaves no signal without its puts; freed memory
// is not accessed.
TEST(SimulatedNetwork, LossesAreClean) {
    for (uint64_t seed = 0; seed < 100; ++seed) {
        SimulatedNetwork network(3, {}, seed);
        uint64_t words[6] = {};
        network.put_value(0, 1, &words[0], 1, 0);
        network.put_value(1, 0, &words[1], 1, 0);
        network.put_value(0, 2, &words[2], 1, 0);
        network.cut(1);
        network.signal(1, 2, &words[3], 1, 0);
        network.put_value(2, 0, &words[4], 1, 0);
        network.signal(2, 0, &words[5], 1, 0);
        network.kill(2);
        network.forget(&words[2], 8);
        network.advance_to(kLater);
        EXPECT_EQ(words[0] + words[1] + words[2] + words[3], 0u);
        EXPECT_LE(words[5], words[4]);
    }
}

}  // namespace
}  // namespace crossdock::cpu
