// SPDX-License-Identifier: Apache-2.0
#include "network/lifeline.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace crossdock::network {

Lifeline::Lifeline(Socket socket, NoiseSession session, uint32_t peer)
    : socket_(std::move(socket)), session_(std::move(session)), peer_(peer) {
    keep_alive(socket_);
}

void Lifeline::say(uint32_t lost) {
    if (!socket_.is_open()) return;
    // The socket's buffer is empty, so this sends all.
    const std::vector<std::byte> words = session_.seal(object_bytes(lost));
    (void)!send(socket_.fd(), words.data(), words.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

std::optional<uint32_t> Lifeline::hear() {
    uint32_t lost = peer_;
    const size_t expected = NoiseSession::sealed_bytes(sizeof(lost));
    std::byte buffer[64];
    const ssize_t got = recv(socket_.fd(), buffer, expected - received_.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
    if (got > 0) {
        received_.insert(received_.end(), buffer, buffer + got);
        if (received_.size() < expected) return std::nullopt;
        if (const auto words = session_.open(received_)) std::memcpy(&lost, words->data(), sizeof(lost));
    }
    socket_.close();
    return lost;
}

}  // namespace crossdock::network
