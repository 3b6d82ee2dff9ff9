// SPDX-License-Identifier: Apache-2.0
// What unauthenticated connections and broken peers may send: greetings on a new connection, frames, and the records of
// a link. Whatever the bytes are, nothing is read beyond them, and what passes keeps the parser's promises. The first
// byte chooses.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fuzz/input.h"
#include "fuzz/link_records.h"
#include "network/frame.h"
#include "network/greeting.h"
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

// Ranks that greet each other; made once, because their keys cost more than a run.
struct Ranks {
    Ranks() {
        for (Identity& each : identities) each = {make_key_pair(), secret_of("secret")};
        for (size_t i = 0; i < identities.size(); ++i) addresses[i].key = identities[i].keys.shared;
    }
    std::vector<Identity> identities = std::vector<Identity>(4);
    std::vector<RankAddress> addresses = std::vector<RankAddress>(4);
};
const Ranks& ranks() {
    static const Ranks instance;
    return instance;
}

// Any bytes on a new connection: they prove nothing, and no more is asked for than an unproven rank may send.
void greet(const uint8_t* data, size_t size) {
    Greeting greeting(ranks().identities[1], ranks().addresses, 1, std::nullopt, {});
    while (size > 0) {
        require(greeting.wanted() > 0 && greeting.wanted() < 1024);
        const std::vector<std::byte> bytes = copy_of(data, std::min(size, greeting.wanted()));
        const char* refusal = greeting.take(bytes);
        require(!greeting.is_proven() && !greeting.is_done());
        if (refusal != nullptr) return;
        greeting.take_output();
        data += bytes.size();
        size -= bytes.size();
    }
}

// A conversation whose messages come in parts, one of which is changed, cut, repeated, reflected, taken from an earlier
// conversation or taken to another rank: only an untouched one ends well.
void overhear(Input input) {
    const uint32_t source = input.below(3);
    const uint32_t target = source + 1 + input.below(3 - source);
    const size_t blob_bytes = input.rarely() ? kMaxBlobBytes - input.below(3) : input.byte();
    const std::vector<std::byte> blobs[2] = {std::vector<std::byte>(blob_bytes, std::byte{input.byte()}),
                                             std::vector<std::byte>(input.byte(), std::byte{input.byte()})};
    const uint32_t listening = input.rarely() ? input.below(4) : target;
    const auto start = [&] {
        std::vector<Greeting> ends;
        ends.emplace_back(ranks().identities[source], ranks().addresses, source, target, blobs[0]);
        ends.emplace_back(ranks().identities[listening], ranks().addresses, listening, std::nullopt, blobs[1]);
        return ends;
    };
    std::vector<Greeting> earlier = start(), ends = start();
    bool is_touched = listening != target;
    for (size_t from = 0;; from = 1 - from) {
        std::vector<std::byte> bytes = ends[from].take_output();
        std::vector<std::byte> old = earlier[from].take_output();
        if (bytes.empty()) break;
        const size_t at = (input.byte() * size_t{257} + input.byte()) % bytes.size();
        switch (input.below(12)) {
            case 0: {
                const uint8_t flip = input.byte();
                bytes[at] ^= std::byte{flip};
                is_touched |= flip != 0;
                break;
            }
            case 1:
                bytes.resize(at);
                is_touched = true;
                break;
            case 2:
                if (!old.empty()) {
                    bytes = old;
                    is_touched = true;
                }
                break;
            case 3:
                if (ends[from].is_done()) break;
                require(ends[from].take(ByteSpan(bytes).first(std::min(bytes.size(), ends[from].wanted()))) != nullptr);
                return;
            default:
                break;
        }
        Greeting& to = ends[1 - from];
        for (size_t done = 0; done < bytes.size();) {
            const size_t part = std::min({bytes.size() - done, to.wanted(), size_t{1} + input.byte() * size_t{64}});
            if (part == 0) break;
            const std::vector<std::byte> copy(&bytes[done], &bytes[done] + part);
            if (to.take(copy) != nullptr) {
                require(is_touched);
                return;
            }
            done += part;
        }
        for (ByteSpan left = old; !left.empty() && earlier[1 - from].wanted() > 0;) {
            const ByteSpan part = left.first(std::min(left.size(), earlier[1 - from].wanted()));
            if (earlier[1 - from].take(part) != nullptr) break;
            left = left.subspan(part.size());
        }
    }
    require((ends[0].is_done() && ends[1].is_done()) == !is_touched);
    if (is_touched) return;
    require(ends[1].peer() == source && ends[0].take_blob() == blobs[1] && ends[1].take_blob() == blobs[0]);
    require(ends[0].key_in() == ends[1].key_out() && ends[0].key_out() == ends[1].key_in());
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
