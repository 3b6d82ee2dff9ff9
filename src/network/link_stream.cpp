// SPDX-License-Identifier: Apache-2.0
#include "network/link_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <vector>

namespace crossdock::network {

ptrdiff_t LinkStream::write(const iovec* parts, size_t num_parts) {
    msghdr message = {};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = num_parts;
    ptrdiff_t sent = 0;
    do {
        sent = sendmsg(socket_.fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent;
}

ptrdiff_t LinkStream::read(const iovec* parts, size_t num_parts) {
    ptrdiff_t got = 0;
    do {
        got = num_parts == 1 ? recv(socket_.fd(), parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT)
                             : readv(socket_.fd(), parts, static_cast<int>(num_parts));
    } while (got < 0 && errno == EINTR);
    return got;
}

LinkStream::Unread LinkStream::unread(const Socket& socket) {
    // Ranks that have met send little before all others have, too.
    std::vector<std::byte> bytes(size_t{64} << 10);
    const ssize_t got = recv(socket.fd(), bytes.data(), bytes.size(), MSG_PEEK | MSG_DONTWAIT);
    return {got > 0, report_in(std::span(bytes).first(static_cast<size_t>(std::max<ssize_t>(got, 0))))};
}

void LinkStream::end_sending() {
    if (is_open()) shutdown(socket_.fd(), SHUT_WR);
}

bool LinkStream::drain() {
    constexpr int kReads = 16;  // at a time: the other end may go on sending
    std::byte nowhere[4096];
    for (int i = 0; is_open() && i < kReads; ++i) {
        const ptrdiff_t got = recv(socket_.fd(), nowhere, sizeof(nowhere), MSG_DONTWAIT);
        if (got <= 0) return got == 0 || (errno != EAGAIN && errno != EINTR);
    }
    return !is_open();
}

}  // namespace crossdock::network
