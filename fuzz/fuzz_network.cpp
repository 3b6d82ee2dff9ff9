// SPDX-License-Identifier: Apache-2.0
// What strangers and broken peers may send: greetings on a new connection, and frames. Whatever the bytes are, nothing
// is read beyond them, and what passes keeps the parser's promises.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "network/frame.h"
#include "network/handshake.h"
#include "network/lane.h"

namespace {

using namespace crossdock::network;

void require(bool condition) {
    if (!condition) std::abort();
}

// A copy that ends where the bytes end, so that the sanitizer sees a step beyond.
std::vector<std::byte> copy_of(const uint8_t* data, size_t size) {
    const auto* first = reinterpret_cast<const std::byte*>(data);
    return {first, first + size};
}

void greet(const uint8_t* data, size_t size) {
    std::vector<RankAddress> addresses(3);
    for (size_t i = 0; i < addresses.size(); ++i) addresses[i].secret = {i + 1, 77 * i};
    constexpr Secret kAsked{3, 4};
    Greeted greeted;
    const std::vector<std::byte> bytes = copy_of(data, size);
    if (read_greeting(bytes, addresses, 1, kAsked, greeted) != Greeting::kGood) return;
    require(greeted.source < 3 && greeted.source != 1 && greeted.blob.size() <= bytes.size());
    // Only one greeting has these contents.
    require(make_greeting(addresses, greeted.source, 1, kAsked, greeted.nonce, greeted.blob) == bytes);
}

// Frames one after another, as one lane would get them.
void take_frames(const uint8_t* data, size_t size) {
    constexpr FrameLimits kLimits{4, 16};
    Lane lane;
    while (size > 2) {
        const uint64_t payload_bytes = data[0] == 255 ? kMaxFramePayload + data[1] : data[0];
        const size_t length = data[1] < 250 ? sizeof(FrameHeader) : data[1];
        data += 2;
        size -= 2;
        const std::vector<std::byte> bytes = copy_of(data, length < size ? length : size);
        FrameHeader header;
        if (parse_frame(bytes, payload_bytes, kLimits, header) == nullptr) {
            require(header.source < kLimits.num_ranks && payload_bytes <= kMaxFramePayload);
            require(header.offset + header.length >= header.offset);
            if (header.kind == FrameKind::kPut) {
                require(header.context < kLimits.num_contexts && header.length == payload_bytes);
                const bool is_new = lane.land(header.number);
                require(!is_new || lane.has_landed(header.number, header.number));
                require(!lane.land(header.number));
                lane.has_landed(header.number - header.span, header.number);
            }
        }
        data += bytes.size();
        size -= bytes.size();
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    data[0] % 2 == 0 ? greet(data + 1, size - 1) : take_frames(data + 1, size - 1);
    return 0;
}
