// SPDX-License-Identifier: Apache-2.0
// Frames on a link: the authenticated connection of two ranks carries all frames between them that go neither through
// shared memory nor over RDMA.
#pragma once

#include <utility>

#include "network/frame_stream.h"
#include "network/socket.h"

namespace crossdock::network {

class LinkStream final : public FrameStream {
  public:
    explicit LinkStream(Socket socket) : socket_(std::move(socket)) {}
    ~LinkStream() override { close(); }

    int fd() const { return socket_.fd(); }
    bool is_open() const override { return socket_.is_open(); }

    // What waits in a link that nobody has read from yet.
    struct Unread {
        bool has_bytes;
        uint32_t reported_loss;  // kNoRank: none
    };
    static Unread unread(const Socket& socket);

    // Ends sending. drain() discards what is received; true if the other end has closed the connection, too.
    void end_sending();
    bool drain();

    // Cancels pending sends and fetches.
    void close() {
        close_socket();
        cancel();
    }
    // The first half of close(). A forked child calls only this one, which makes a system call and nothing else.
    void close_socket() noexcept { socket_.close(); }

  private:
    ptrdiff_t write(const iovec* parts, size_t num_parts) override;
    ptrdiff_t read(const iovec* parts, size_t num_parts) override;

    Socket socket_;
};

}  // namespace crossdock::network
