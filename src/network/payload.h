// SPDX-License-Identifier: Apache-2.0
// The payload of a frame as its receiver gets it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "network/ucx_library.h"

namespace crossdock::network {

// A transport that holds received bytes: UCX's worker, or the stream of a link.
class PayloadSource {
  public:
    // `done` is called once, perhaps before fetch() returns.
    using Done = void (*)(void* argument, ucs_status_t status);

    // Called while the frame is handed out. The bytes stay valid until fetch() or let_go().
    virtual void hold(void* descriptor) = 0;
    // Writes all `bytes` held bytes to `target`.
    virtual void fetch(void* descriptor, std::byte* target, uint64_t bytes, Done done, void* argument) = 0;
    virtual void let_go(void* descriptor) = 0;

  protected:
    ~PayloadSource() = default;
};

// Valid while the frame is handed out; after keep() also later.
class Payload {
  public:
    // `data` is valid while the frame is handed out.
    static Payload borrowed(const std::byte* data, uint64_t bytes) { return Payload(nullptr, nullptr, data, bytes); }
    // descriptor: null if the source cannot hold the bytes. data: null if they must be fetched.
    Payload(PayloadSource* source, void* descriptor, const std::byte* data, uint64_t bytes)
        : source_(source), descriptor_(descriptor), data_(data), bytes_(bytes) {}
    ~Payload() {
        if (is_held_) source_->let_go(descriptor_);
    }
    Payload(Payload&& other) noexcept
        : source_(other.source_),
          descriptor_(other.descriptor_),
          data_(other.data_),
          bytes_(other.bytes_),
          copy_(std::move(other.copy_)),
          is_held_(std::exchange(other.is_held_, false)) {}
    Payload& operator=(Payload&&) = delete;

    uint64_t bytes() const { return bytes_; }
    const std::byte* data() const { return data_; }  // null: call fetch()

    void keep() {
        if (descriptor_ != nullptr) {
            hold();
        } else if (bytes_ > 0 && copy_.empty()) {
            copy_.assign(data_, data_ + bytes_);
            data_ = copy_.data();
        }
    }

    // At most once, and only where data() is null.
    void fetch(std::byte* target, PayloadSource::Done done, void* argument) {
        hold();
        is_held_ = false;
        source_->fetch(descriptor_, target, bytes_, done, argument);
    }

  private:
    void hold() {
        if (!is_held_) source_->hold(descriptor_);
        is_held_ = true;
    }

    PayloadSource* source_;
    void* descriptor_;
    const std::byte* data_;
    uint64_t bytes_;
    std::vector<std::byte> copy_;
    bool is_held_ = false;
};

// Receives frames from a transport.
class FrameReceiver {
  public:
    virtual void on_frame(std::span<const std::byte> header, Payload& payload) = 0;
    virtual void on_endpoint_error(uint32_t peer, const char* reason) = 0;

  protected:
    ~FrameReceiver() = default;
};

// A frame that is being sent.
struct Send {
    using Done = void (*)(Send& send, ucs_status_t status);
    std::span<const std::byte> header;  // header and bytes stay valid until `done`
    std::span<const std::byte> bytes;
    Done done;
    class UcxWorker* worker;     // set by the worker that sends it
    bool arrives_whole = false;  // sent eagerly: the receiver need not fetch its bytes
};

}  // namespace crossdock::network
