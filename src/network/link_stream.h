// SPDX-License-Identifier: Apache-2.0
// Frames on a link: the connection over which two ranks proved who they are carries everything between them that
// neither shared memory nor RDMA carries. Bytes of a large frame go from the socket straight to their target.
//
// A stream is a sequence of records: 8 bytes that say what follows, then a frame's header and its bytes, or nothing
// behind a goodbye. It never waits. One thread at a time.
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

// Frames on a link carry at most so many bytes, so that small ones need not wait long behind large ones.
inline constexpr uint64_t kLinkPayloadBytes = uint64_t{512} << 10;

// How the other end left.
struct Farewell {
    bool in_order;
    std::string reason;             // of one that is not in order
    uint32_t because_of = kNoRank;  // in order: for the loss of whom it leaves
};

class LinkStream final : private PayloadSource {
  public:
    explicit LinkStream(Socket socket) : socket_(std::move(socket)) {}
    ~LinkStream() { close(); }
    LinkStream(const LinkStream&) = delete;
    LinkStream& operator=(const LinkStream&) = delete;

    int fd() const { return socket_.fd(); }
    bool is_open() const { return socket_.is_open(); }

    // UCS_INPROGRESS: `done` will be called, once. Everything else is how it has ended, and nothing will be called.
    // A frame has been sent when the system has taken its bytes.
    ucs_status_t send(Send& send);
    // Sends what is queued, as far as the system takes it.
    void flush();
    bool is_flushed() const { return queue_.empty(); }

    // Hands out what came. True if something came. `farewell` is set where the other end has left; then the caller
    // closes the stream. Not reentrant.
    bool receive(FrameReceiver& receiver, std::unique_ptr<Farewell>& farewell);

    // Behind the record that is being sent, before those that wait.
    void say_goodbye(uint32_t because_of);
    // Nothing more is sent; what still comes is thrown away. True: the other end has closed the connection, too.
    void end_sending();
    bool drain();

    // Cancels what is under way.
    void close() {
        close_socket();
        cancel();
    }
    // Its two halves. The first one alone is for a forked child, and calls nothing but the system.
    void close_socket() noexcept { socket_.close(); }
    void cancel();

  private:
    enum class Incoming : uint8_t {
        kRecord,    // the buffer begins with a record
        kOffered,   // a frame is handed out, its bytes were not asked for yet
        kHeld,      // its bytes stay in the socket until they are asked for
        kFetching,  // they go to `target_`
        kSkipping,  // nobody wants them
    };
    struct RecordHead {
        uint32_t kind;
        uint32_t value;  // of a frame its payload's bytes, of a goodbye because of whom
    };
    struct Outgoing {
        RecordHead head;
        Send* send;   // null: a goodbye
        size_t sent;  // bytes of the record
        size_t bytes() const { return sizeof(head) + (send == nullptr ? 0 : send->header.size() + send->bytes.size()); }
    };
    static constexpr uint32_t kFrame = 0x6d617266;    // "fram"
    static constexpr uint32_t kGoodbye = 0x65796267;  // "gbye"
    // Of up to so many bytes a frame is handed out when all are here.
    static constexpr size_t kWholeBytes = kMaxNoteBytes;
    static constexpr size_t kBufferBytes = kWholeBytes + (size_t{16} << 10);
    static_assert(kBufferBytes >= sizeof(RecordHead) + sizeof(FrameHeader) + kWholeBytes);

    void hold(void* descriptor) override;
    void fetch(void* descriptor, std::byte* target, uint64_t bytes, Done done, void* argument) override;
    void let_go(void* descriptor) override;

    ptrdiff_t write_some(const Outgoing* records, size_t count);
    void fail_sends(ucs_status_t status);
    ptrdiff_t read_some(bool& is_drained);
    void take(size_t bytes);
    bool hand_out(FrameReceiver& receiver, std::unique_ptr<Farewell>& farewell);
    void end_fetch(ucs_status_t status);

    Socket socket_;
    std::deque<Outgoing> queue_;
    bool is_flushing_ = false;
    bool is_broken_ = false;  // for sending

    std::unique_ptr<std::byte[]> buffer_;  // made when something comes
    size_t begin_ = 0, end_ = 0;           // of what is in the buffer
    Incoming incoming_ = Incoming::kRecord;
    std::byte* target_ = nullptr;
    uint64_t missing_ = 0;  // bytes of the frame at hand that were not taken out of the buffer or the socket
    Done fetched_ = nullptr;
    void* argument_ = nullptr;
};

}  // namespace crossdock::network
