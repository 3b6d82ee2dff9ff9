// SPDX-License-Identifier: Apache-2.0
#include "fuzz/link_records.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "network/frame.h"
#include "network/lane.h"
#include "network/link_stream.h"

namespace crossdock::fuzz {
namespace {

using namespace crossdock::network;

using Bytes = std::vector<std::byte>;

constexpr uint32_t kFrame = 0x6d617266;        // "fram"
constexpr uint32_t kCloseNotice = 0x65796267;  // "gbye"
constexpr size_t kMostBytes = size_t{1} << 20;
constexpr uint32_t kMostRecords = 24;
constexpr FrameLimits kLimits{4, 16};

struct RecordHead {
    uint32_t kind;
    uint32_t value;
};

void require(bool condition) {
    if (!condition) std::abort();
}

void append(Bytes& bytes, const void* data, size_t size) {
    const auto* first = static_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), first, first + size);
}

// Around the sizes at which a stream changes how it hands out a frame.
uint32_t choose_payload(Input& input) {
    static constexpr uint32_t kSizes[] = {
        0, 1, 8, 4096, static_cast<uint32_t>(kMaxNoteBytes), static_cast<uint32_t>(kMaxNoteBytes) + 1, 90'000, 200'000};
    const uint32_t size = kSizes[input.below(8)];
    return input.rarely() ? size + input.byte() : size;
}

void append_frame(Input& input, Bytes& record) {
    const uint32_t payload_bytes = choose_payload(input);
    FrameHeader header = {};
    header.source = input.below(5);
    header.kind = input.rarely() ? static_cast<FrameKind>(input.byte()) : FrameKind::kPut;
    header.flags = payload_bytes == 0 ? kFlagSignal : static_cast<uint8_t>(input.below(4));
    header.context = static_cast<uint16_t>(input.below(17));
    header.number = input.or_edge(input.byte());
    header.span = input.below(3);
    header.offset = input.or_edge(64);
    header.length = input.rarely() ? input.or_edge(0) : payload_bytes;
    const RecordHead head{kFrame, payload_bytes};
    append(record, &head, sizeof(head));
    append(record, &header, sizeof(header));
    const std::byte first{input.byte()};
    for (uint32_t i = 0; i < payload_bytes; ++i) record.push_back(first ^ static_cast<std::byte>(i * 31));
}

// The bytes on the connection.
Bytes make_wire(Input& input) {
    Bytes wire;
    std::vector<Bytes> records;
    const uint32_t most_records = 1 + input.below(kMostRecords);
    for (uint32_t i = 0; i < most_records && wire.size() < kMostBytes && !input.is_empty(); ++i) {
        Bytes record;
        switch (input.below(8)) {
            case 0: {
                const RecordHead head{kCloseNotice, input.or_edge(input.below(4))};
                append(record, &head, sizeof(head));
                break;
            }
            case 1: {  // says more than a frame may carry, or than comes
                const RecordHead head{kFrame, static_cast<uint32_t>(kMaxFramePayload) + input.below(3) - 1};
                append(record, &head, sizeof(head));
                record.resize(record.size() + (input.below(2) == 0 ? 0 : sizeof(FrameHeader) + input.byte()));
                break;
            }
            case 2:  // any bytes
                for (uint32_t count = input.byte(); count > 0; --count) record.push_back(std::byte{input.byte()});
                break;
            case 3:  // an earlier one
                if (!records.empty()) record = records[input.below(static_cast<uint32_t>(records.size()))];
                break;
            default:
                append_frame(input, record);
        }
        if (input.rarely() && !record.empty()) record.resize(record.size() - 1 - input.byte() % record.size());
        if (input.rarely() && !record.empty()) record[input.byte() % record.size()] ^= std::byte{input.byte()};
        append(wire, record.data(), record.size());
        records.push_back(std::move(record));
    }
    return wire;
}

struct Expected {
    size_t header;  // where it begins in the bytes
    uint32_t payload_bytes;
};

// What the bytes say, read in the plainest way.
struct Script {
    std::vector<Expected> frames;
    std::optional<uint32_t> close_notice;
    bool is_garbage = false;
    bool is_cut = false;  // the last frame's bytes do not all come
};

Script read_wire(const Bytes& wire) {
    Script script;
    for (size_t at = 0; at + sizeof(RecordHead) <= wire.size();) {
        RecordHead head;
        std::memcpy(&head, &wire[at], sizeof(head));
        if (head.kind == kCloseNotice) {
            script.close_notice = head.value;
            break;
        }
        if (head.kind != kFrame || head.value > kMaxFramePayload) {
            script.is_garbage = true;
            break;
        }
        const size_t header = at + sizeof(head);
        if (header + sizeof(FrameHeader) > wire.size()) break;
        const size_t here = wire.size() - header - sizeof(FrameHeader);
        script.is_cut = here < head.value;
        // Small frames are handed out when all of their bytes are there.
        if (script.is_cut && head.value <= kMaxNoteBytes) break;
        script.frames.push_back({header, head.value});
        if (script.is_cut) break;
        at = header + sizeof(FrameHeader) + head.value;
    }
    return script;
}

// Takes frames as the bytes of `input` say: at once, later, or not at all. All must be what the peer sent.
class Taker final : public FrameReceiver {
  public:
    Taker(Input& input, const Bytes& wire, const Script& script) : input_(input), wire_(wire), script_(script) {}

    void on_frame(std::span<const std::byte> header, Payload& payload) override {
        require(num_frames_ < script_.frames.size() && kept_ == nullptr);
        const Expected& expected = script_.frames[num_frames_++];
        require(payload.bytes() == expected.payload_bytes && header.size() == sizeof(FrameHeader));
        require(std::memcmp(header.data(), &wire_[expected.header], header.size()) == 0);
        look_at(header, payload.bytes());
        if (payload.data() != nullptr || payload.bytes() == 0) {
            require(is_sent(expected, payload.data(), payload.bytes()));
            return;
        }
        switch (input_.below(3)) {
            case 0:
                fetch(payload, expected);
                break;
            case 1:
                payload.keep();
                kept_ = std::make_unique<Payload>(std::move(payload));
                break;
            default:
                break;  // nobody wants it
        }
    }
    void on_endpoint_error(uint32_t, const char*) override { std::abort(); }

    bool is_holding() const { return kept_ != nullptr; }
    void release() {
        if (kept_ == nullptr) return;
        const std::unique_ptr<Payload> kept = std::move(kept_);
        if (input_.below(2) == 0) fetch(*kept, script_.frames[num_frames_ - 1]);
    }
    size_t num_frames() const { return num_frames_; }
    // Every fetch has ended, with all bytes but where the connection ended before.
    void require_ended() const { require(num_begun_ == num_fetched_ + num_cancelled_); }
    void require_whole() const { require(num_cancelled_ == 0); }

  private:
    struct Fetch {
        Taker* taker;
        const Expected* expected;
        Bytes bytes;
    };

    // What a mesh does first: a frame that passes, also when it comes again, keeps the parser's promises.
    void look_at(std::span<const std::byte> bytes, uint64_t payload_bytes) {
        FrameHeader header;
        if (parse_frame(bytes, payload_bytes, kLimits, header) != nullptr || header.kind != FrameKind::kPut) return;
        require(header.source < kLimits.num_ranks && header.context < kLimits.num_contexts);
        lane_.land(header.number);
        require(!lane_.land(header.number));
    }
    bool is_sent(const Expected& expected, const std::byte* data, size_t bytes) const {
        return bytes == 0 || std::memcmp(data, &wire_[expected.header + sizeof(FrameHeader)], bytes) == 0;
    }
    void fetch(Payload& payload, const Expected& expected) {
        ++num_begun_;
        Fetch& fetch = fetches_.emplace_back(Fetch{this, &expected, Bytes(payload.bytes())});
        payload.fetch(fetch.bytes.data(), on_fetched, &fetch);
    }
    static void on_fetched(void* argument, ucs_status_t status) {
        auto& fetch = *static_cast<Fetch*>(argument);
        Taker& taker = *fetch.taker;
        if (status != UCS_OK) {
            ++taker.num_cancelled_;
            return;
        }
        ++taker.num_fetched_;
        require(taker.is_sent(*fetch.expected, fetch.bytes.data(), fetch.bytes.size()));
    }

    Input& input_;
    const Bytes& wire_;
    const Script& script_;
    Lane lane_;
    size_t num_frames_ = 0;
    std::unique_ptr<Payload> kept_;
    std::deque<Fetch> fetches_;
    size_t num_begun_ = 0, num_fetched_ = 0, num_cancelled_ = 0;
};

// At most `most` bytes from `sent` on. Returns how many the system took.
size_t write_some(int fd, const Bytes& wire, size_t sent, size_t most) {
    const size_t bytes = std::min(most, wire.size() - sent);
    if (bytes == 0) return 0;
    const ptrdiff_t taken = ::send(fd, &wire[sent], bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    require(taken >= 0 || errno == EAGAIN || errno == ENOBUFS);
    return taken < 0 ? 0 : static_cast<size_t>(taken);
}

}  // namespace

void receive_records(Input input) {
    const bool ends_early = input.below(2) == 1;  // the peer's process ends behind the last byte
    const size_t part_bytes = size_t{1} << input.below(20);
    const Bytes wire = make_wire(input);
    const Script script = read_wire(wire);

    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    Socket peer(ends[0]);
    LinkStream stream{Socket(ends[1])};
    Taker taker(input, wire, script);
    std::unique_ptr<LinkEnd> link_end;
    size_t sent = 0;
    // Parts of few bytes are for short conversations.
    const size_t part = std::max(part_bytes, wire.size() / 256 + 1);
    while (link_end == nullptr) {
        const size_t now = write_some(peer.fd(), wire, sent, part);
        sent += now;
        const bool came = stream.receive(taker, link_end);
        if (!came && taker.is_holding()) {
            taker.release();
            continue;
        }
        if (!came && now == 0 && sent == wire.size()) break;
    }
    const bool has_end = script.close_notice.has_value() || script.is_garbage;
    require((link_end != nullptr) == has_end);
    if (link_end == nullptr && ends_early) {
        peer.close();
        require(stream.receive(taker, link_end) && link_end != nullptr && !link_end->in_order);
    } else if (link_end != nullptr) {
        require(link_end->in_order == script.close_notice.has_value());
        require(!link_end->in_order || link_end->because_of == *script.close_notice);
        require(link_end->in_order || link_end->reason == "it sent what no rank sends");
    }
    require(taker.num_frames() == script.frames.size());
    if (!script.is_cut) taker.require_whole();
    stream.close();
    taker.require_ended();
    require(!stream.receive(taker, link_end));
}

}  // namespace crossdock::fuzz
