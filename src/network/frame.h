// SPDX-License-Identifier: Apache-2.0
// What travels between ranks: a header of fixed size, and for some kinds bytes behind it. Whatever arrives is looked at
// here before anybody acts on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace crossdock::network {

enum class FrameKind : uint8_t {
    kAnnounce = 1,  // memory was registered: `region`, its bytes in `value`, its kind in `context`
    kPut,           // bytes for region + offset, perhaps the last of an operation and with a signal
    kGet,           // asks for `length` bytes of region + offset; `value` numbers the question
    kReply,         // bytes of an answer: `value` is the question's number, `offset` the place in it
    kRefusal,       // no answer: the region is gone; `value` is the question's number
    kNote,          // bytes for the host's side of the peer; `value` is their number
};

// Flags of a put.
inline constexpr uint8_t kFlagSignal = 1;  // `value` is to be added to the signal when the put's bytes are there
inline constexpr uint8_t kFlagStrong = 2;  // and only when all earlier frames of this lane are there, too

inline constexpr uint64_t kMaxFramePayload = uint64_t{64} << 20;
inline constexpr uint64_t kMaxNoteBytes = uint64_t{64} << 10;
inline constexpr uint64_t kSignalBytes = 8;

struct FrameHeader {
    uint64_t key;     // of this source and target; who does not know it is no rank of this communicator
    uint32_t source;  // rank
    FrameKind kind;
    uint8_t flags;
    uint16_t context;
    uint64_t number;  // of the frame in its lane: source rank, target rank, context. Only puts are numbered.
    uint32_t span;    // of a put: so many frames before this one belong to the same operation
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

// Copies the header out of `bytes`. Null, or what is wrong with it, which no rank of ours would send. It says nothing
// about the key, and nothing about regions: those can be gone.
const char* parse_frame(std::span<const std::byte> bytes, uint64_t payload_bytes, const FrameLimits& limits,
                        FrameHeader& header);

}  // namespace crossdock::network
