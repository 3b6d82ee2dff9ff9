// SPDX-License-Identifier: Apache-2.0
// TCP sockets as the handshake needs them: owned, never blocking, without surprises from signals.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace crossdock::network {

// A descriptor, owned.
class Socket {
  public:
    explicit Socket(int fd = -1) : fd_(fd) {}
    ~Socket() { close(); }
    Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    int fd() const { return fd_; }
    bool is_open() const { return fd_ >= 0; }
    void close();

  private:
    int fd_;
};

// An address and port, version 4 or 6, as ranks send it to each other.
struct Endpoint {
    uint16_t family;
    uint16_t port;
    uint32_t scope;
    uint8_t ip[16];
    bool operator==(const Endpoint&) const = default;
};

std::string to_string(const Endpoint& endpoint);

// The address that peers should dial: of the first interface that is up and no loopback, or of one that
// `interfaces` names (prefixes with commas between, `=` before them for whole names, `^` for all but these). The
// loopback's where there is no other. Error with ncclInvalidUsage where no interface fits the names.
Endpoint own_address(const char* interfaces);

// "host:port", "[host]:port" for IPv6: what the host's name stands for, at least one. Error with ncclInvalidArgument
// that repeats the text.
std::vector<Endpoint> resolve(const std::string& address);

// The address of this side of a connection.
Endpoint local_endpoint(const Socket& socket);

bool is_loopback(const Endpoint& endpoint);

// A listening socket on this port of all addresses of the host.
Socket listen_everywhere(uint16_t port);

// A listening socket on a free port, which it writes into `endpoint`.
Socket listen_on(Endpoint& endpoint);

// Starts to connect; poll() says when it is done.
Socket start_connect(const Endpoint& endpoint);

// The error of a connect that has ended, 0 when it stands.
int connect_error(const Socket& socket);

// A link that stays open: probes find out within half a minute that the other side's host is gone.
void keep_alive(const Socket& socket);

}  // namespace crossdock::network
