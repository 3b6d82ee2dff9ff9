// SPDX-License-Identifier: Apache-2.0
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <vector>

#include "bench/network/measure.h"
#include "network/socket.h"

namespace crossdock::network_bench {
namespace {

void send_all(int fd, const std::byte* bytes, size_t count) {
    while (count > 0) {
        const ssize_t sent = send(fd, bytes, count, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) throw std::runtime_error("send failed");
        if (sent <= 0) continue;
        bytes += sent;
        count -= static_cast<size_t>(sent);
    }
}

void receive_all(int fd, std::byte* bytes, size_t count) {
    while (count > 0) {
        const ssize_t got = recv(fd, bytes, count, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN)) throw std::runtime_error("recv failed");
        if (got <= 0) continue;
        bytes += got;
        count -= static_cast<size_t>(got);
    }
}

network::Socket connect_pair(Meeting& meeting, int rank) {
    network::Endpoint endpoint = network::own_address("=lo");
    network::Socket socket;
    if (rank == 0) {
        const network::Socket listener = network::bind_to(endpoint);
        network::start_to_listen(listener);
        publish(meeting, endpoint.port);
        while (!socket.is_open()) socket = network::Socket(accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK));
    } else {
        endpoint.port = static_cast<uint16_t>(await_number(meeting));
        socket = network::start_connect(endpoint);
        pollfd writable{socket.fd(), POLLOUT, 0};
        ::poll(&writable, 1, 5000);
    }
    const int on = 1;
    setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return socket;
}

}  // namespace

Result measure_tcp(const Amount& amount) {
    return run_pair("", [&](Meeting& meeting, int rank) {
        const network::Socket socket = connect_pair(meeting, rank);
        std::vector<std::byte> bytes(amount.bytes);
        Result result;
        uint64_t begin = 0;
        const uint32_t warm_up = amount.round_trips / 10 + 1;
        for (uint32_t i = 0; i < warm_up + amount.round_trips; ++i) {
            if (i == warm_up) begin = now_ns();
            if (rank == 1) receive_all(socket.fd(), bytes.data(), bytes.size());
            send_all(socket.fd(), bytes.data(), bytes.size());
            if (rank == 0) receive_all(socket.fd(), bytes.data(), bytes.size());
        }
        result.half_round_trip_us = static_cast<double>(now_ns() - begin) / 2e3 / amount.round_trips;
        begin = now_ns();
        for (uint32_t i = 0; i < amount.messages; ++i) {
            rank == 0 ? send_all(socket.fd(), bytes.data(), bytes.size())
                      : receive_all(socket.fd(), bytes.data(), bytes.size());
        }
        rank == 0 ? receive_all(socket.fd(), bytes.data(), 1) : send_all(socket.fd(), bytes.data(), 1);
        result.gigabytes_per_s =
            static_cast<double>(amount.bytes) * amount.messages / static_cast<double>(now_ns() - begin);
        return result;
    });
}

}  // namespace crossdock::network_bench
