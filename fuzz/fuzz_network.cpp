// SPDX-License-Identifier: Apache-2.0
// What unauthenticated connections and broken peers may send: greetings on a new connection, frames, and the records of
// a link. Whatever the bytes are, nothing is read beyond them, and what passes keeps the parser's promises. The first
// byte chooses.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fuzz/input.h"
#include "fuzz/link_records.h"
#include "network/frame.h"
#include "network/handshake.h"
#include "network/lane.h"

namespace {

using namespace crossdock::network;
using crossdock::fuzz::Input;

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

// A greeting of a rank that knows the secrets, as it is or changed on its way, or as a recording of it: only the first
// is good.
void overhear(Input input) {
    std::vector<RankAddress> addresses(2 + input.below(3));
    for (size_t i = 0; i < addresses.size(); ++i) addresses[i].secret = {i + 1, 77 * i};
    const auto num_ranks = static_cast<uint32_t>(addresses.size());
    const uint32_t target = input.below(num_ranks);
    const uint32_t source = (target + 1 + input.below(num_ranks - 1)) % num_ranks;
    const Secret asked{3, input.byte()}, nonce{input.byte(), 5};
    const size_t blob_bytes = input.rarely() ? kMaxBlobBytes - 1 + input.below(3) : input.byte();
    std::vector<std::byte> blob(blob_bytes, std::byte{input.byte()});
    std::vector<std::byte> bytes = make_greeting(addresses, source, target, asked, nonce, blob);
    Greeting expected = blob_bytes <= kMaxBlobBytes ? Greeting::kGood : Greeting::kBad;
    Secret answered = asked;
    size_t at = input.byte() * size_t{257} + input.byte();
    switch (input.below(6)) {
        case 0:
            break;
        case 1:  // what has come so far
            bytes.resize(at % bytes.size());
            if (expected == Greeting::kGood) expected = Greeting::kMore;
            break;
        case 2: {
            const uint8_t flip = input.byte();
            if (flip != 0) expected = Greeting::kBad;
            bytes[at % bytes.size()] ^= std::byte{flip};
            break;
        }
        case 3:  // answers another challenge
            answered[at % 2] ^= uint64_t{1} << input.below(64);
            expected = Greeting::kBad;
            break;
        case 4:  // more than was announced
            bytes.resize(bytes.size() + 1 + input.byte());
            expected = Greeting::kBad;
            break;
        default:  // meant for another rank
            addresses[target].secret[at % 2] ^= uint64_t{1} << input.below(64);
            expected = Greeting::kBad;
    }
    Greeted greeted;
    const Greeting seen = read_greeting(copy_of(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()),
                                        addresses, target, answered, greeted);
    // Of too large a blob the head says so, once it is there.
    require(seen == expected || (expected == Greeting::kBad && blob_bytes > kMaxBlobBytes && seen == Greeting::kMore));
    require(seen != Greeting::kGood ||
            (greeted.source == source && greeted.nonce == nonce && greeted.blob.size() == blob_bytes));
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
    switch (data[0] % 4) {
        case 0:
            greet(data + 1, size - 1);
            break;
        case 1:
            take_frames(data + 1, size - 1);
            break;
        case 2:
            crossdock::fuzz::receive_records(Input(data + 1, size - 1));
            break;
        default:
            overhear(Input(data + 1, size - 1));
    }
    return 0;
}
