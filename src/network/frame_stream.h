// SPDX-License-Identifier: Apache-2.0
// Frames as a stream of bytes: on a link (link_stream.h) or in shared memory (host_streams.h). Bytes of a large frame
// are read directly into their target.
//
// A stream is a sequence of records: 8 bytes that say what follows, then a frame's header and its bytes. A close notice
// and a failure report have no more than the 8 bytes. Nothing here blocks. One thread at a time.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>

#include "network/frame.h"
#include "network/payload.h"

namespace crossdock::network {

inline constexpr uint32_t kNoRank = UINT32_MAX;

// Maximum payload of a frame in a stream, so that small frames do not wait long behind large ones.
inline constexpr uint64_t kStreamPayloadBytes = uint64_t{512} << 10;

// How the other end closed the link.
struct LinkEnd {
    bool in_order;                  // with a close notice
    std::string reason;             // if not in order
    uint32_t because_of = kNoRank;  // if in order: the lost rank for which it left
};

class FrameStream : private PayloadSource {
  public:
    virtual ~FrameStream() = default;
    FrameStream(const FrameStream&) = delete;
    FrameStream& operator=(const FrameStream&) = delete;

    virtual bool is_open() const = 0;

    // Returns UCS_INPROGRESS if `done` will be called, once; otherwise the final status, and `done` is not called. A
    // frame counts as sent when the stream has accepted its bytes.
    ucs_status_t send(Send& send);
    // Sends queued records until the stream is full.
    void flush();
    bool is_flushed() const { return queue_.empty(); }

    // Passes received frames to the receiver. Returns true if anything was received. Sets `link_end` if the other end
    // has closed the link; then the caller closes the stream. Not reentrant.
    bool receive(FrameReceiver& receiver, std::unique_ptr<LinkEnd>& link_end);

    // Queued after the record that is being sent, before all others.
    void send_close_notice(uint32_t because_of) { send_word(kCloseNotice, because_of); }
    // This rank fails because it has lost `lost`; kNoRank: this is over.
    void send_failure_report(uint32_t lost) { send_word(kFailureReport, lost); }
    // The latest report of the other end, also after its end; kNoRank: none.
    uint32_t reported_loss() const { return reported_loss_; }

    // Cancel pending sends, and sends and fetches. No more is sent then.
    void cancel_sends() { fail_sends(UCS_ERR_CANCELED); }
    void cancel();

  protected:
    FrameStream() = default;
    // The latest failure report among these bytes, with which a stream begins; kNoRank: none.
    static uint32_t report_in(std::span<const std::byte> bytes);
    // As writev() and readv() of a descriptor that does not block.
    virtual ptrdiff_t write(const iovec* parts, size_t num_parts) = 0;
    virtual ptrdiff_t read(const iovec* parts, size_t num_parts) = 0;

  private:
    enum class Incoming : uint8_t {
        kRecord,    // the buffer begins with a record
        kOffered,   // a frame is being handed out
        kHeld,      // its bytes stay in the stream until fetch()
        kFetching,  // its bytes are read to `target_`
        kSkipping,  // its bytes are discarded
    };
    struct RecordHead {
        uint32_t kind;
        uint32_t value;  // frame: bytes of its payload; close notice: because_of; failure report: the lost rank
    };
    struct Outgoing {
        RecordHead head;
        Send* send;   // null: a head only
        size_t sent;  // bytes of the record
        size_t bytes() const { return sizeof(head) + (send == nullptr ? 0 : send->header.size() + send->bytes.size()); }
    };
    static constexpr uint32_t kFrame = 0x6d617266;          // "fram"
    static constexpr uint32_t kCloseNotice = 0x65796267;    // "gbye"
    static constexpr uint32_t kFailureReport = 0x74736f6c;  // "lost"
    // Frames of at most this many bytes are handed out when complete.
    static constexpr size_t kWholeBytes = kMaxNoteBytes;
    static constexpr size_t kBufferBytes = kWholeBytes + (size_t{16} << 10);
    static_assert(kBufferBytes >= sizeof(RecordHead) + sizeof(FrameHeader) + kWholeBytes);

    void hold(void* descriptor) override;
    void fetch(void* descriptor, std::byte* target, uint64_t bytes, Done done, void* argument) override;
    void let_go(void* descriptor) override;

    ptrdiff_t write_some(const Outgoing* records, size_t count);
    void send_word(uint32_t kind, uint32_t value);
    void fail_sends(ucs_status_t status);
    ptrdiff_t read_some(bool& is_drained);
    void take(size_t bytes);
    bool hand_out(FrameReceiver& receiver, std::unique_ptr<LinkEnd>& link_end);
    void end_fetch(ucs_status_t status);

    std::deque<Outgoing> queue_;
    bool is_flushing_ = false;
    bool is_broken_ = false;  // for sending
    uint32_t reported_loss_ = kNoRank;

    std::unique_ptr<std::byte[]> buffer_;  // allocated on the first receive
    size_t begin_ = 0, end_ = 0;           // of the buffer's contents
    Incoming incoming_ = Incoming::kRecord;
    std::byte* target_ = nullptr;
    uint64_t missing_ = 0;  // bytes of the current frame still in the buffer or the stream
    Done fetched_ = nullptr;
    void* argument_ = nullptr;
};

}  // namespace crossdock::network
