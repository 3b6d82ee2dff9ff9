// SPDX-License-Identifier: Apache-2.0
// Two ranks greet each other; a relay, a recording, a reflection, another secret and changed bytes are refused at the
// first byte that can show it, and what crosses the wire helps nobody.
#include "network/greeting.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace crossdock::network {
namespace {

std::vector<std::byte> bytes_of(const std::string& text) {
    const auto bytes = std::as_bytes(std::span(text));
    return {bytes.begin(), bytes.end()};
}

bool contains(ByteSpan bytes, ByteSpan part) {
    return std::search(bytes.begin(), bytes.end(), part.begin(), part.end()) != bytes.end();
}

// Rank 0 dials rank 1.
struct Pair {
    explicit Pair(const std::string& secret = "secret", const std::string& other_secret = "secret") {
        listeners.emplace_back("=lo", secret);
        listeners.emplace_back("=lo", other_secret);
        listeners.emplace_back("=lo", secret);
        for (const Listener& listener : listeners) addresses.push_back(listener.address());
    }
    Greeting dials() const { return Greeting(listeners[0].identity(), addresses, 0, 1, blobs[0]); }
    Greeting accepts() const { return Greeting(listeners[1].identity(), addresses, 1, std::nullopt, blobs[1]); }

    std::vector<Listener> listeners;
    std::vector<RankAddress> addresses;
    std::vector<std::byte> blobs[2] = {bytes_of("this is rank 0"), bytes_of("this is rank 1")};
};

using Change = std::function<void(int message, std::vector<std::byte>& bytes)>;

// Carries messages between both until nobody says more or one is refused. What is sent passes through `change`.
// Returns all bytes that crossed.
std::vector<std::byte> talk(Greeting& dials, Greeting& accepts, const Change& change = {}) {
    std::vector<std::byte> wire;
    Greeting* from = &dials;
    Greeting* to = &accepts;
    for (int message = 0;; ++message) {
        std::vector<std::byte> bytes = from->take_output();
        if (bytes.empty()) return wire;
        if (change) change(message, bytes);
        wire.insert(wire.end(), bytes.begin(), bytes.end());
        for (ByteSpan left = bytes; !left.empty() && to->wanted() > 0;) {
            const ByteSpan part = left.first(std::min(left.size(), to->wanted()));
            if (to->take(part) != nullptr) return wire;
            left = left.subspan(part.size());
        }
        std::swap(from, to);
    }
}

TEST(Greeting, CarriesBlobsAndKeys) {
    const Pair pair;
    auto dials = pair.dials(), accepts = pair.accepts();
    const auto wire = talk(dials, accepts);
    ASSERT_TRUE(dials.is_done() && accepts.is_done());
    EXPECT_EQ(accepts.peer(), 0u);
    EXPECT_EQ(dials.take_blob(), pair.blobs[1]);
    EXPECT_EQ(accepts.take_blob(), pair.blobs[0]);
    EXPECT_EQ(dials.key_in(), accepts.key_out());
    EXPECT_EQ(dials.key_out(), accepts.key_in());
    EXPECT_NE(dials.key_in(), dials.key_out());
    // Who reads the wire learns none of it.
    const uint64_t keys[] = {dials.key_in(), dials.key_out()};
    for (const uint64_t& key : keys) EXPECT_FALSE(contains(wire, object_bytes(key)));
    for (const auto& blob : pair.blobs) EXPECT_FALSE(contains(wire, blob));
    for (const Listener& listener : pair.listeners) {
        EXPECT_FALSE(contains(wire, listener.identity().keys.secret));
        EXPECT_FALSE(contains(wire, listener.identity().secret));
    }
}

TEST(Greeting, BlobsMayBeEmptyOrLarge) {
    for (const size_t size : {size_t{0}, size_t{1}, kMaxBlobBytes}) {
        Pair pair;
        for (auto& blob : pair.blobs) blob.assign(size, std::byte{5});
        auto dials = pair.dials(), accepts = pair.accepts();
        talk(dials, accepts);
        ASSERT_TRUE(dials.is_done() && accepts.is_done());
        EXPECT_EQ(dials.take_blob(), pair.blobs[1]);
    }
}

// Each byte matters, in both directions: who changes or cuts one can only prevent the link.
TEST(Greeting, ChangedOrCutMessagesAreRefused) {
    const Pair pair;
    std::vector<size_t> sizes;
    {
        auto dials = pair.dials(), accepts = pair.accepts();
        talk(dials, accepts, [&](int, std::vector<std::byte>& bytes) { sizes.push_back(bytes.size()); });
    }
    ASSERT_EQ(sizes.size(), 4u);
    for (int message = 0; message < 4; ++message) {
        for (size_t at = 0; at < sizes[static_cast<size_t>(message)]; ++at) {
            for (const bool cuts : {false, true}) {
                auto dials = pair.dials(), accepts = pair.accepts();
                talk(dials, accepts, [&](int number, std::vector<std::byte>& bytes) {
                    if (number != message) return;
                    if (cuts) bytes.resize(at);
                    if (!cuts) bytes[at] ^= std::byte{4};
                });
                const Greeting& receiver = message % 2 == 0 ? accepts : dials;
                ASSERT_FALSE(receiver.is_done()) << "message " << message << ", byte " << at << ", cut: " << cuts;
                ASSERT_FALSE(message < 2 && receiver.is_proven()) << "message " << message << ", byte " << at;
            }
        }
    }
}

// A rank without the common secret, and one that has not made the address that all know, are strangers.
TEST(Greeting, NeedsSecretAndKey) {
    const auto expect_strangers = [](const Pair& own, const Pair& other) {
        auto dials = own.dials(), accepts = other.accepts();
        talk(dials, accepts);
        EXPECT_FALSE(dials.is_proven() || accepts.is_proven());
    };
    const Pair divided("secret", "another");
    expect_strangers(divided, divided);
    const Pair pair;
    expect_strangers(pair, Pair());  // another communicator
    expect_strangers(Pair(), pair);
    // Knows all addresses and the secret, but no rank's key.
    Pair stranger;
    stranger.addresses = pair.addresses;
    {
        auto dials = stranger.dials(), accepts = pair.accepts();
        talk(dials, accepts);
        EXPECT_FALSE(accepts.is_proven());
    }
    {
        auto dials = pair.dials(), accepts = stranger.accepts();
        talk(dials, accepts);
        EXPECT_FALSE(dials.is_proven());
    }
    // Ranks that were given different addresses do not meet.
    Pair moved;
    auto dials = moved.dials();
    moved.addresses[2].endpoint.port ^= 1;
    const std::vector<RankAddress> others = moved.addresses;
    moved.addresses[2].endpoint.port ^= 1;
    Greeting accepts(moved.listeners[1].identity(), others, 1, std::nullopt, {});
    talk(dials, accepts);
    EXPECT_FALSE(dials.is_proven() || accepts.is_proven());
}

// A greeting is for one rank: another one, to which a relay takes it, refuses it.
TEST(Greeting, IsForOneRank) {
    const Pair pair;
    auto dials = pair.dials();
    Greeting third(pair.listeners[2].identity(), pair.addresses, 2, std::nullopt, {});
    talk(dials, third);
    EXPECT_FALSE(dials.is_proven() || third.is_proven());
    // Nor may a rank say that it is one above.
    Greeting second(pair.listeners[1].identity(), pair.addresses, 1, 0, {});
    Greeting first(pair.listeners[0].identity(), pair.addresses, 0, std::nullopt, {});
    talk(second, first);
    EXPECT_FALSE(first.is_proven());
}

// A rank's own bytes, sent back, prove nothing.
TEST(Greeting, ReflectionsAreRefused) {
    const Pair pair;
    auto dials = pair.dials();
    auto hello = dials.take_output();
    EXPECT_NE(dials.take(ByteSpan(hello).first(dials.wanted())), nullptr);
    EXPECT_FALSE(dials.is_proven());
    // Also with the magic number of an answer in front.
    auto again = pair.dials(), accepts = pair.accepts();
    hello = again.take_output();
    ASSERT_EQ(accepts.take(hello), nullptr);
    auto answer = accepts.take_output();
    std::copy(hello.end() - NoiseSession::kMessageBytes, hello.end(), answer.begin() + 8);
    EXPECT_NE(again.take(answer), nullptr);
    // The letter of the dialling rank as the answer to itself.
    auto dialled = pair.dials(), accepted = pair.accepts();
    hello = dialled.take_output();
    ASSERT_EQ(accepted.take(hello), nullptr);
    ASSERT_EQ(dialled.take(accepted.take_output()), nullptr);
    const auto letter = dialled.take_output();
    EXPECT_NE(dialled.take(ByteSpan(letter).first(dialled.wanted())), nullptr);
    EXPECT_FALSE(dialled.is_done());
}

// Every message of an earlier conversation, in its place, stops the next one.
TEST(Greeting, RecordingsAreRefused) {
    const Pair pair;
    std::vector<std::vector<std::byte>> recorded;
    {
        auto dials = pair.dials(), accepts = pair.accepts();
        talk(dials, accepts, [&](int, const std::vector<std::byte>& bytes) { recorded.push_back(bytes); });
    }
    for (int message = 0; message < 4; ++message) {
        auto dials = pair.dials(), accepts = pair.accepts();
        talk(dials, accepts, [&](int number, std::vector<std::byte>& bytes) {
            if (number == message) bytes = recorded[static_cast<size_t>(number)];
        });
        // The answer to a recorded opening is of no use to who sent it, and to the rank that has made another one.
        EXPECT_FALSE(accepts.is_done() && dials.is_done()) << message;
        EXPECT_FALSE((message % 2 == 0 ? accepts : dials).is_done()) << message;
    }
    // The whole of it.
    auto accepts = pair.accepts();
    ASSERT_EQ(accepts.take(recorded[0]), nullptr);
    EXPECT_FALSE(accepts.is_proven());
    EXPECT_NE(accepts.take(ByteSpan(recorded[2]).first(accepts.wanted())), nullptr);
    EXPECT_FALSE(accepts.is_proven());
}

}  // namespace
}  // namespace crossdock::network
