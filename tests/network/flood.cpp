// SPDX-License-Identifier: Apache-2.0
#include "flood.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

namespace crossdock::network {

Flood::Flood(const Endpoint& endpoint, size_t num_connections)
    : thread_([this, endpoint, num_connections] { run(endpoint, num_connections); }) {}

Flood::~Flood() {
    ends_ = true;
    thread_.join();
}

bool Flood::await_closed(size_t count) const {
    for (int i = 0; i < 20'000 && num_closed_ < count; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return num_closed_ >= count;
}

void Flood::run(const Endpoint& endpoint, size_t num_connections) {
    std::vector<Socket> sockets(num_connections);
    while (!ends_) {
        std::vector<pollfd> polls;
        for (Socket& socket : sockets) {
            if (!socket.is_open()) socket = start_connect(endpoint);
            polls.push_back({socket.fd(), POLLIN, 0});
        }
        poll(polls.data(), polls.size(), 1);
        for (size_t i = 0; i < num_connections; ++i) {
            if (polls[i].revents == 0) continue;
            char byte;
            const ssize_t got = recv(sockets[i].fd(), &byte, 1, MSG_DONTWAIT);
            if (got > 0 || (got < 0 && errno == EAGAIN)) continue;
            sockets[i].close();
            if (got == 0) ++num_closed_;  // one that waits to be accepted would be reset
        }
    }
}

std::vector<std::string> listening_ports() {
    std::set<std::string> inodes;  // of this process's sockets
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code gone;
        const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
        if (target.starts_with("socket:[")) inodes.insert(target.substr(8, target.size() - 9));
    }
    std::vector<std::string> ports;
    for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
        std::ifstream lines(table);
        for (std::string line; std::getline(lines, line);) {
            char ip[40], inode[32];
            unsigned port = 0, state = 0;
            if (std::sscanf(line.c_str(), " %*[^:]: %39[0-9A-F]:%x %*s %x %*s %*s %*s %*s %*s %31s", ip, &port, &state,
                            inode) != 4)
                continue;
            constexpr unsigned kListens = 10;
            if (state != kListens || inodes.count(inode) == 0) continue;
            Endpoint endpoint = {};
            endpoint.family = std::strlen(ip) == 8 ? AF_INET : AF_INET6;
            endpoint.port = static_cast<uint16_t>(port);
            for (size_t word = 0; word < std::strlen(ip) / 8; ++word) {
                const auto value = static_cast<uint32_t>(std::stoul(std::string(ip + 8 * word, 8), nullptr, 16));
                std::memcpy(endpoint.ip + 4 * word, &value, sizeof(value));
            }
            ports.push_back(to_string(endpoint));
        }
    }
    return ports;
}

}  // namespace crossdock::network
