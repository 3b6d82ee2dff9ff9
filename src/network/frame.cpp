// SPDX-License-Identifier: Apache-2.0
#include "network/frame.h"

#include <cstring>

namespace crossdock::network {
namespace {

bool overflows(uint64_t offset, uint64_t bytes) { return offset + bytes < offset; }

const char* check_put(const FrameHeader& header, uint64_t payload_bytes, const FrameLimits& limits) {
    if ((header.flags & ~(kFlagSignal | kFlagStrong)) != 0) return "a put has unknown flags";
    if ((header.flags & kFlagStrong) != 0 && (header.flags & kFlagSignal) == 0)
        return "a put is strong without a signal";
    if (header.context >= limits.num_contexts) return "the context is out of range";
    if (header.length != payload_bytes) return "a put's length is not that of its bytes";
    if (header.number < header.span) return "a put begins before its lane";
    if ((header.flags & kFlagSignal) != 0) {
        if (header.signal_offset % kSignalBytes != 0) return "a signal is not aligned to 8 bytes";
        if (overflows(header.signal_offset, kSignalBytes)) return "a signal's offset is too large";
    } else if (payload_bytes == 0) {
        return "a put has neither bytes nor a signal";
    }
    return nullptr;
}

}  // namespace

const char* parse_frame(std::span<const std::byte> bytes, uint64_t payload_bytes, const FrameLimits& limits,
                        FrameHeader& header) {
    if (bytes.size() != sizeof(FrameHeader)) return "the header has another size";
    std::memcpy(&header, bytes.data(), sizeof(header));
    if (header.source >= limits.num_ranks) return "the source rank is out of range";
    if (header.reserved != 0) return "reserved bits are set";
    if (payload_bytes > kMaxFramePayload) return "more bytes than a frame may carry";
    if (overflows(header.offset, header.length)) return "offset and length are too large";
    if (header.kind == FrameKind::kPut) return check_put(header, payload_bytes, limits);

    if (header.flags != 0) return "only puts have flags";
    switch (header.kind) {
        case FrameKind::kPut:
            break;
        case FrameKind::kAnnounce:
        case FrameKind::kRefusal:
            if (payload_bytes != 0) return "bytes behind a frame that has none";
            return nullptr;
        case FrameKind::kGet:
            if (payload_bytes != 0) return "bytes behind a frame that has none";
            if (header.length == 0) return "a get of no bytes";
            return nullptr;
        case FrameKind::kReply:
            if (payload_bytes == 0 || header.length != payload_bytes)
                return "a reply's length is not that of its bytes";
            return nullptr;
        case FrameKind::kNote:
            if (payload_bytes > kMaxNoteBytes || header.length != payload_bytes)
                return "a note's length is not that of its bytes, or too large";
            return nullptr;
    }
    return "the kind is unknown";
}

}  // namespace crossdock::network
