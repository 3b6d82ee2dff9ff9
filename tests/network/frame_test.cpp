// SPDX-License-Identifier: Apache-2.0
// The parser accepts valid frames, and has a message for each way to be malformed.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "network/frame.h"

namespace crossdock::network {
namespace {

constexpr FrameLimits kLimits{4, 8};

FrameHeader good_put() {
    FrameHeader header = {};
    header.kind = FrameKind::kPut;
    header.source = 3;
    header.context = 7;
    header.number = 10;
    header.span = 2;
    header.length = 100;
    return header;
}

const char* parse(const FrameHeader& header, uint64_t payload_bytes) {
    FrameHeader parsed;
    return parse_frame(std::as_bytes(std::span(&header, 1)), payload_bytes, kLimits, parsed);
}

TEST(Frame, GoodOnesPass) {
    EXPECT_EQ(parse(good_put(), 100), nullptr);
    FrameHeader signal = good_put();
    signal.length = 0;
    signal.flags = kFlagSignal | kFlagStrong;
    EXPECT_EQ(parse(signal, 0), nullptr);
    FrameHeader other = {};
    other.kind = FrameKind::kGet;
    other.length = 1;
    EXPECT_EQ(parse(other, 0), nullptr);
    other.kind = FrameKind::kReply;
    EXPECT_EQ(parse(other, 1), nullptr);
    other.kind = FrameKind::kAnnounce;
    EXPECT_EQ(parse(other, 0), nullptr);
    other.kind = FrameKind::kRefusal;
    EXPECT_EQ(parse(other, 0), nullptr);
}

TEST(Frame, BadOnesAreRefused) {
    const auto refused = [](auto change, uint64_t payload_bytes, const char* message) {
        FrameHeader header = good_put();
        change(header);
        EXPECT_STREQ(parse(header, payload_bytes), message);
    };
    refused([](auto& h) { h.source = 4; }, 100, "the source rank is out of range");
    refused([](auto& h) { h.reserved = 1; }, 100, "reserved bits are set");
    refused([](auto& h) { h.length = kMaxFramePayload + 1; }, kMaxFramePayload + 1,
            "more bytes than a frame may carry");
    refused([](auto& h) { h.offset = UINT64_MAX - 5; }, 100, "offset and length are too large");
    refused([](auto& h) { h.flags = 8; }, 100, "a put has unknown flags");
    refused([](auto& h) { h.flags = kFlagStrong; }, 100, "a put is strong without a signal");
    refused([](auto& h) { h.context = 8; }, 100, "the context is out of range");
    refused([](auto&) {}, 99, "a put's length is not that of its bytes");
    refused([](auto& h) { h.number = 1; }, 100, "a put begins before its lane");
    refused([](auto& h) { h.length = 0; }, 0, "a put has neither bytes nor a signal");
    refused([](auto& h) { h.flags = kFlagSignal, h.signal_offset = 4; }, 100, "a signal is not aligned to 8 bytes");
    refused([](auto& h) { h.flags = kFlagSignal, h.signal_offset = UINT64_MAX - 7; }, 100,
            "a signal's offset is too large");
    refused([](auto& h) { h.kind = FrameKind::kGet, h.flags = 1; }, 0, "only puts have flags");
    refused([](auto& h) { h.kind = FrameKind::kGet; }, 1, "bytes behind a frame that has none");
    refused([](auto& h) { h.kind = FrameKind::kGet, h.length = 0; }, 0, "a get of no bytes");
    refused([](auto& h) { h.kind = FrameKind::kAnnounce; }, 1, "bytes behind a frame that has none");
    refused([](auto& h) { h.kind = FrameKind::kReply; }, 0, "a reply's length is not that of its bytes");
    refused([](auto& h) { h.kind = static_cast<FrameKind>(99); }, 0, "the kind is unknown");
    std::byte few[10] = {};
    FrameHeader parsed;
    EXPECT_STREQ(parse_frame(few, 0, kLimits, parsed), "the header has another size");
}

}  // namespace
}  // namespace crossdock::network
