// SPDX-License-Identifier: Apache-2.0
// Frames on a link: the authenticated connection of two ranks carries all frames between them that go neither through
// shared memory nor over RDMA. Bytes of a large frame are read from the socket directly into their target.
//
// A stream is a sequence of records: 8 bytes that say what follows, then a frame's header and its bytes. A close notice
// and a failure report have no more than the 8 bytes. Nothing here blocks. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "network/frame.h"
#include "network/payload.h"
#include "network/socket.h"

namespace crossdock::network {

inline constexpr uint32_t kNoRank = UINT32_MAX;

// Maximum payload of a frame on a link, so that small frames do not wait long behind large ones.
inline constexpr uint64_t kLinkPayloadBytes = uint64_t{512} << 10;

// How the other end closed the link.
struct LinkEnd {
    bool in_order;                  // with a close notice
    std::string reason;             // if not in order
    uint32_t because_of = kNoRank;  // if in order: the lost rank for which it left
};

class LinkStream final : private PayloadSource {
  public:
    explicit LinkStream(Socket socket) : socket_(std::move(socket)) {}
    ~LinkStream() { close(); }
    LinkStream(const LinkStream&) = delete;
    LinkStream& operator=(const LinkStream&) = delete;

    int fd() const { return socket_.fd(); }
    bool is_open() const { return socket_.is_open(); }

    // Returns UCS_INPROGRESS if `done` will be called, once; otherwise the final status, and `done` is not called. A
    // frame counts as sent when the kernel has accepted its bytes.
    ucs_status_t send(Send& send);
    // Sends queued records until the socket would block.
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
    // Ends sending. drain() discards what is received; true if the other end has closed the connection, too.
    void end_sending();
    bool drain();

    // Cancels pending sends and fetches.
    void close() {
        close_socket();
        cancel();
    }
    // The two halves of close(). A forked child calls only the first one, which makes a system call and nothing else.
    void close_socket() noexcept { socket_.close(); }
    void cancel();

  private:
    enum class Incoming : uint8_t {
        kRecord,    // the buffer begins with a record
        kOffered,   // a frame is being handed out
        kHeld,      // its bytes stay in the socket until fetch()
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

    Socket socket_;
    std::deque<Outgoing> queue_;
    bool is_flushing_ = false;
    bool is_broken_ = false;  // for sending
    uint32_t reported_loss_ = kNoRank;

    std::unique_ptr<std::byte[]> buffer_;  // allocated on the first receive
    size_t begin_ = 0, end_ = 0;           // of the buffer's contents
    Incoming incoming_ = Incoming::kRecord;
    std::byte* target_ = nullptr;
    uint64_t missing_ = 0;  // bytes of the current frame still in the buffer or the socket
    Done fetched_ = nullptr;
    void* argument_ = nullptr;
};

}  // namespace crossdock::network
