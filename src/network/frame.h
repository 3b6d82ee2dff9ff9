// SPDX-License-Identifier: Apache-2.0
// Frames between ranks: a header of fixed size, followed by a payload for some kinds. Received headers are validated
// here before use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace crossdock::network {

enum class FrameKind : uint8_t {
    kAnnounce = 1,  // memory was registered: `region`, its bytes in `value`, its kind in `context`
    kPut,           // bytes for region + offset; an operation's last frame may carry a signal
    kGet,           // requests `length` bytes of region + offset; `value` is the request's number
    kReply,         // bytes for request `value`, at `offset` in its target
    kRefusal,       // request `value` is refused: the region was deregistered
    kNote,          // bytes for the peer's host program; `value` is their number
};

// Flags of a put.
inline constexpr uint8_t kFlagSignal = 1;  // add `value` to the signal once the put's bytes have landed
inline constexpr uint8_t kFlagStrong = 2;  // and all earlier frames of this lane, too

inline constexpr uint64_t kMaxFramePayload = uint64_t{64} << 20;
inline constexpr uint64_t kMaxNoteBytes = uint64_t{64} << 10;
inline constexpr uint64_t kSignalBytes = 8;

struct FrameHeader {
    uint64_t key;     // secret of this source and target. On a link: 0, the link tells who sends
    uint32_t source;  // rank
    FrameKind kind;
    uint8_t flags;
    uint16_t context;
    uint64_t number;  // of the frame in its lane: source rank, target rank, context. Only puts are numbered.
    uint32_t span;    // put: number of earlier frames of the same operation
    uint32_t region;
    uint64_t offset;
    uint64_t length;
    uint64_t value;
    uint64_t signal_offset;
    uint32_t signal_region;
    uint32_t reserved;  // zero
};
static_assert(sizeof(FrameHeader) == 72 && std::is_trivially_copyable_v<FrameHeader>);

struct FrameLimits {
    uint32_t num_ranks;
    uint32_t num_contexts;
};

// Copies the header out of `bytes`. Returns null, or why it is malformed. Does not check the key, nor whether regions
// exist.
const char* parse_frame(std::span<const std::byte> bytes, uint64_t payload_bytes, const FrameLimits& limits,
                        FrameHeader& header);

}  // namespace crossdock::network
