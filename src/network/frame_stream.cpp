// SPDX-License-Identifier: Apache-2.0
#include "network/frame_stream.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace crossdock::network {
namespace {

// Records per write.
constexpr size_t kMaxRecords = 16;
// A receive() call returns after about this many bytes, so that no stream starves the others.
constexpr size_t kBytesPerTurn = size_t{1} << 20;
// Bytes of the next record that are read along with a frame's payload: its head, and little that must be copied.
constexpr size_t kBytesReadAhead = 2048;

constexpr const char* kNoRanksWords = "it sent what no rank sends";

// Why the other end is gone, given the result of read() that is not a number of bytes.
const char* reason_of_end(ptrdiff_t got) {
    if (got == 0) return "its process ended";
    if (errno == EPROTO) return kNoRanksWords;
    // A process that ends with unread data resets the connection.
    return errno == ECONNRESET ? "its process ended, or its connection was reset" : std::strerror(errno);
}

}  // namespace

// Sends the unsent parts of `records`. Returns the result of write().
ptrdiff_t FrameStream::write_some(const Outgoing* records, size_t count) {
    iovec parts[3 * kMaxRecords];
    size_t num_parts = 0;
    for (size_t i = 0; i < count; ++i) {
        size_t skipped = records[i].sent;
        const auto add = [&](const void* data, size_t bytes) {
            const size_t skip = std::min(skipped, bytes);
            skipped -= skip;
            if (bytes > skip)
                parts[num_parts++] = {const_cast<std::byte*>(static_cast<const std::byte*>(data)) + skip, bytes - skip};
        };
        add(&records[i].head, sizeof(RecordHead));
        if (records[i].send == nullptr) continue;
        add(records[i].send->header.data(), records[i].send->header.size());
        add(records[i].send->bytes.data(), records[i].send->bytes.size());
    }
    return write(parts, num_parts);
}

ucs_status_t FrameStream::send(Send& send) {
    if (!is_open() || is_broken_) return UCS_ERR_CANCELED;
    Outgoing record = {{kFrame, static_cast<uint32_t>(send.bytes.size())}, &send, 0};
    if (queue_.empty()) {
        const ptrdiff_t sent = write_some(&record, 1);
        if (sent < 0 && errno != EAGAIN) {
            is_broken_ = true;
            return UCS_ERR_CONNECTION_RESET;
        }
        record.sent = sent < 0 ? 0 : static_cast<size_t>(sent);
        if (record.sent == record.bytes()) return UCS_OK;
    }
    queue_.push_back(record);
    return UCS_INPROGRESS;
}

void FrameStream::flush() {
    // A callback may send more, which is then queued at the end.
    if (is_flushing_) return;
    is_flushing_ = true;
    while (!queue_.empty()) {
        Outgoing records[kMaxRecords];
        const size_t count = std::min(queue_.size(), kMaxRecords);
        std::copy_n(queue_.begin(), count, records);
        const ptrdiff_t sent = write_some(records, count);
        if (sent < 0) {
            if (errno != EAGAIN) fail_sends(UCS_ERR_CONNECTION_RESET);
            break;
        }
        size_t left = static_cast<size_t>(sent);
        while (left > 0) {
            Outgoing& first = queue_.front();
            const size_t part = std::min(left, first.bytes() - first.sent);
            first.sent += part;
            left -= part;
            if (first.sent < first.bytes()) break;
            Send* send = first.send;
            queue_.pop_front();
            if (send != nullptr) send->done(*send, UCS_OK);
        }
    }
    is_flushing_ = false;
}

void FrameStream::fail_sends(ucs_status_t status) {
    is_broken_ = true;
    for (const Outgoing& record : std::exchange(queue_, {})) {
        if (record.send != nullptr) record.send->done(*record.send, status);
    }
}

bool FrameStream::receive(FrameReceiver& receiver, std::unique_ptr<LinkEnd>& link_end) {
    if (!is_open() || incoming_ == Incoming::kHeld) return false;
    if (buffer_ == nullptr) buffer_ = std::make_unique<std::byte[]>(kBufferBytes);
    size_t taken = 0;
    while (taken < kBytesPerTurn) {
        bool is_drained = false;
        const ptrdiff_t got = read_some(is_drained);
        if (got < 0 && errno == EAGAIN) break;
        if (got <= 0) {
            link_end.reset(new LinkEnd{false, reason_of_end(got)});
            return true;
        }
        taken += static_cast<size_t>(got);
        const bool goes_on = hand_out(receiver, link_end);
        if (!goes_on || is_drained) break;
    }
    return taken > 0;
}

// Reads once: to the target of a fetch (the buffer is empty then), and to the end of the buffer. is_drained: the stream
// had no more.
ptrdiff_t FrameStream::read_some(bool& is_drained) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
    end_ -= std::exchange(begin_, 0);
    iovec parts[2] = {{nullptr, 0}, {buffer_.get() + end_, kBufferBytes - end_}};
    if (incoming_ == Incoming::kFetching) {
        parts[0] = {target_, missing_};
        parts[1].iov_len = kBytesReadAhead;
    }
    const bool is_fetching = incoming_ == Incoming::kFetching;
    const ptrdiff_t got = is_fetching ? read(parts, 2) : read(parts + 1, 1);
    if (got <= 0) return got;
    is_drained = static_cast<size_t>(got) < parts[0].iov_len + parts[1].iov_len;
    const size_t direct = std::min(static_cast<size_t>(got), parts[0].iov_len);
    end_ += static_cast<size_t>(got) - direct;
    if (direct > 0) {
        target_ += direct;
        missing_ -= direct;
        if (missing_ == 0) end_fetch(UCS_OK);
    }
    return got;
}

// Moves bytes of the current frame from the buffer to the target, or discards them.
void FrameStream::take(size_t bytes) {
    if (incoming_ == Incoming::kFetching) {
        std::memcpy(target_, buffer_.get() + begin_, bytes);
        target_ += bytes;
    }
    begin_ += bytes;
    missing_ -= bytes;
    if (missing_ > 0) return;
    if (incoming_ == Incoming::kFetching) return end_fetch(UCS_OK);
    incoming_ = Incoming::kRecord;
}

// Returns false if the current frame is held or the other end has left.
bool FrameStream::hand_out(FrameReceiver& receiver, std::unique_ptr<LinkEnd>& link_end) {
    while (begin_ < end_ || incoming_ == Incoming::kRecord) {
        if (incoming_ == Incoming::kHeld) break;
        if (incoming_ != Incoming::kRecord) {
            take(std::min<uint64_t>(missing_, end_ - begin_));
            continue;
        }
        const size_t have = end_ - begin_;
        const std::byte* record = buffer_.get() + begin_;
        RecordHead head;
        if (have < sizeof(head)) return true;
        std::memcpy(&head, record, sizeof(head));
        if (head.kind == kCloseNotice) {
            link_end.reset(new LinkEnd{true, {}, head.value});
            return false;
        }
        if (head.kind == kFailureReport) {
            reported_loss_ = head.value;
            begin_ += sizeof(head);
            continue;
        }
        if (head.kind != kFrame || head.value > kMaxFramePayload) {
            link_end.reset(new LinkEnd{false, kNoRanksWords});
            return false;
        }
        constexpr size_t kHeadBytes = sizeof(RecordHead) + sizeof(FrameHeader);
        if (have < kHeadBytes) return true;
        const std::span<const std::byte> header(record + sizeof(head), sizeof(FrameHeader));
        const bool is_whole = have >= kHeadBytes + head.value;
        if (!is_whole && head.value <= kWholeBytes) return true;
        begin_ += kHeadBytes;
        if (is_whole) {
            Payload payload = Payload::borrowed(buffer_.get() + begin_, head.value);
            begin_ += head.value;
            receiver.on_frame(header, payload);
            continue;
        }
        incoming_ = Incoming::kOffered;
        missing_ = head.value;
        // The header stays valid: the buffer is not read into before this call returns.
        Payload payload(this, this, nullptr, head.value);
        receiver.on_frame(header, payload);
        if (incoming_ == Incoming::kOffered) incoming_ = Incoming::kSkipping;
    }
    return incoming_ != Incoming::kHeld;
}

void FrameStream::hold(void*) {
    if (incoming_ == Incoming::kOffered) incoming_ = Incoming::kHeld;
}

void FrameStream::let_go(void*) {
    if (incoming_ == Incoming::kHeld) incoming_ = Incoming::kSkipping;
}

void FrameStream::fetch(void*, std::byte* target, uint64_t, Done done, void* argument) {
    if (!is_open()) return done(argument, UCS_ERR_CANCELED);
    target_ = target;
    fetched_ = done;
    argument_ = argument;
    incoming_ = Incoming::kFetching;
    if (begin_ < end_) take(std::min<uint64_t>(missing_, end_ - begin_));
}

void FrameStream::end_fetch(ucs_status_t status) {
    incoming_ = Incoming::kRecord;
    std::exchange(fetched_, nullptr)(argument_, status);
}

void FrameStream::send_word(uint32_t kind, uint32_t value) {
    if (!is_open() || is_broken_) return;
    const bool is_begun = !queue_.empty() && queue_.front().sent > 0;
    queue_.insert(queue_.begin() + (is_begun ? 1 : 0), Outgoing{{kind, value}, nullptr, 0});
    flush();
}

uint32_t FrameStream::report_in(std::span<const std::byte> bytes) {
    uint32_t lost = kNoRank;
    RecordHead head;
    while (bytes.size() >= sizeof(head)) {
        std::memcpy(&head, bytes.data(), sizeof(head));
        if (head.kind != kFrame && head.kind != kFailureReport) break;
        if (head.kind == kFailureReport) lost = head.value;
        const size_t record = sizeof(head) + (head.kind == kFrame ? sizeof(FrameHeader) + size_t{head.value} : 0);
        bytes = bytes.subspan(std::min(record, bytes.size()));
    }
    return lost;
}

void FrameStream::cancel() {
    if (incoming_ == Incoming::kFetching) end_fetch(UCS_ERR_CANCELED);
    fail_sends(UCS_ERR_CANCELED);
}

}  // namespace crossdock::network
