// SPDX-License-Identifier: Apache-2.0
// The Noise protocols give the bytes that other implementations of the specification give.
#include "network/noise.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"

namespace crossdock::network {
namespace {

std::vector<std::byte> from_hex(const std::string& text) {
    std::vector<std::byte> bytes;
    for (size_t i = 0; i < text.size(); i += 2)
        bytes.push_back(static_cast<std::byte>(std::stoi(text.substr(i, 2), nullptr, 16)));
    return bytes;
}

std::string to_hex(ByteSpan bytes) {
    std::string text;
    for (const std::byte each : bytes) text += fmt::format("{:02x}", static_cast<int>(each));
    return text;
}

Key key_of(const char* hex) {
    const auto bytes = from_hex(hex);
    Key key;
    std::copy(bytes.begin(), bytes.end(), key.begin());
    return key;
}

// Keys, prologue and texts of the vectors that implementations of Noise share. The ciphertexts were made with
// noiseprotocol 0.3.1 for Python.
struct Vector {
    bool has_static_keys;
    const char* ciphertexts[6];
};
constexpr const char* kTexts[] = {"Ludwig von Mises", "Murray Rothbard",   "F. A. Hayek",
                                  "Carl Menger",      "Jean-Baptiste Say", "Eugen Bohm von Bawerk"};
constexpr Vector kVectors[] = {
    {false,
     {"ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c794479b962b8aff8485742ac32f905ba45369e2465fb59e138a"
      "93d67a0d1266b6a54",
      "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843d6062704d5a9c422a8e834423f8c1feada7e8d0d910a1a2"
      "cd030fb584221e3",
      "e632c3763d7669067383433197a3baddf146e9e70ad4b4e9e59e0f",
      "64c6bee32ea91c8474bb4c21d7a700109ad45af77b29764ba5eb1e",
      "e2fa0bed0603b62d3ccac2ecabbf3fe33f3e86514909b323361626266cb2471cc8",
      "0c01dc9cec1fe444d692e8dd32188aa351088dc911104b22ec13d8c77a27c016e940b06837"}},
    {true,
     {"ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c794423f19812300a6051f02195db0722909fc920796814cfc88"
      "6ab3a8083c66a5961",
      "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f14480884320acfe866b4ede922f007d89dbf507216d6aa8646c7fba0"
      "98da374b1784d4b",
      "d213fdd768eeef05ee236c6d2983b2029bb472567a5831f4ff592c",
      "facf98016edcfc2566b16866935329b4da833dcd3bbb4173cf638e",
      "f46e7b19ebc94d697afc64b7f7d78d9b89276a6fbd438985d68c5d0261f4d4b774",
      "84119bc1a1a5f9e3338c7affb30242cf3111e95c41ddcc9a5d8df32fe068ac30b1f0f4ae82"}},
};

TEST(Noise, GivesTheBytesOfOthers) {
    const KeyPair initiator = key_pair_of(key_of("e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1"));
    const KeyPair responder = key_pair_of(key_of("4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893"));
    const auto prologue = from_hex("4a6f686e2047616c74");
    NoiseStart starts[] = {{true, prologue, {}}, {false, prologue, {}}};
    for (NoiseStart& start : starts)
        start.psk = key_of("54686973206973206d7920417573747269616e20706572737065637469766521");
    starts[0].ephemeral = key_pair_of(key_of("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"));
    starts[1].ephemeral = key_pair_of(key_of("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"));
    for (const Vector& vector : kVectors) {
        if (vector.has_static_keys) {
            starts[0].keys = NoiseStart::Static{initiator, responder.shared};
            starts[1].keys = NoiseStart::Static{responder, initiator.shared};
        }
        NoiseSession ends[] = {NoiseSession(starts[0]), NoiseSession(starts[1])};
        for (size_t i = 0; i < std::size(kTexts); ++i) {
            NoiseSession &from = ends[i % 2], &to = ends[1 - i % 2];
            const auto text = std::as_bytes(std::span(std::string_view(kTexts[i])));
            const auto sent = i < 2 ? from.write(text) : from.seal(text);
            EXPECT_EQ(to_hex(sent), vector.ciphertexts[i]) << i;
            const auto got = i < 2 ? to.read(sent) : to.open(sent);
            ASSERT_TRUE(got.has_value()) << i;
            EXPECT_EQ(to_hex(*got), to_hex(text));
        }
    }
}

std::pair<NoiseSession, NoiseSession> connected() {
    std::pair<NoiseSession, NoiseSession> ends{NoiseSession({true, {}, {}}), NoiseSession({false, {}, {}})};
    EXPECT_TRUE(ends.second.read(ends.first.write()).has_value());
    EXPECT_TRUE(ends.first.read(ends.second.write()).has_value());
    return ends;
}

// Long texts are several messages of the specification's size, and each opens once, in order.
TEST(Noise, SealsTextsOfAnyLength) {
    for (const size_t size : {size_t{0}, size_t{1}, size_t{65519}, size_t{65520}, size_t{200'000}}) {
        auto [first, second] = connected();
        std::vector<std::byte> text(size);
        fill_random(text);
        const auto sealed = first.seal(text);
        EXPECT_EQ(sealed.size(), NoiseSession::sealed_bytes(size));
        EXPECT_EQ(second.open(sealed), text);
        if (size == 0) continue;
        EXPECT_EQ(second.open(sealed), std::nullopt) << "a repetition";
    }
}

TEST(Noise, OpensNothingElse) {
    auto [first, second] = connected();
    std::vector<std::byte> text(40);
    const auto sealed = first.seal(text);
    for (size_t i = 0; i < sealed.size(); ++i) {
        auto [sender, receiver] = connected();
        auto changed = sender.seal(text);
        changed[i] ^= std::byte{1};
        EXPECT_EQ(receiver.open(changed), std::nullopt) << i;
        auto [sender_again, receiver_again] = connected();
        auto cut = sender_again.seal(text);
        cut.resize(i);
        EXPECT_EQ(receiver_again.open(cut).value_or(text).size(), i == 0 ? 0 : text.size()) << i;
    }
    EXPECT_EQ(first.open(sealed), std::nullopt) << "its own";
}

// A point with which every secret gives the same result is no key.
TEST(Noise, RefusesPointsThatAreNoKeys) {
    EXPECT_FALSE(agree(make_key_pair().secret, Key{}).has_value());
    NoiseSession responder({false, {}, {}});
    EXPECT_TRUE(responder.read(NoiseSession({true, {}, {}}).write()).has_value());
    NoiseSession initiator({true, {}, {}});
    initiator.write();
    auto answer = responder.write();
    std::fill_n(answer.begin(), sizeof(Key), std::byte{0});
    EXPECT_EQ(initiator.read(answer), std::nullopt);
}

TEST(Noise, NumbersDiffer) { EXPECT_NE(random_number(), random_number()); }

}  // namespace
}  // namespace crossdock::network
