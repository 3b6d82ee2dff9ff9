// SPDX-License-Identifier: Apache-2.0
// The handshake's sockets, TCP and within a host: owned, non-blocking, close-on-exec.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace crossdock::network {

// Owns a descriptor. A forked child closes its copies at once; otherwise peers would not see this process end, and
// ports would stay in use.
class Socket {
  public:
    Socket() = default;
    explicit Socket(int fd) : Socket(made_by([fd] { return fd; })) {}
    // make() opens a descriptor, or returns -1. Atomic with respect to forks of other threads.
    static Socket made_by(const std::function<int()>& make);
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
    int fd_ = -1;
};

// An IPv4 or IPv6 address and port, as ranks send it to each other.
struct Endpoint {
    uint16_t family;
    uint16_t port;
    uint32_t scope;
    uint8_t ip[16];
    bool operator==(const Endpoint&) const = default;
};

std::string to_string(const Endpoint& endpoint);

// The address that peers should dial: of the first interface that is up and no loopback, or of one that `interfaces`
// names (comma-separated prefixes; `=` first: exact names, `^` first: all but these). The loopback's if there is no
// other. Throws ncclInvalidUsage if no interface matches.
Endpoint own_address(const char* interfaces);

// Resolves "host:port", or "[host]:port" for IPv6. Returns at least one endpoint. Throws ncclInvalidArgument that
// quotes the text.
std::vector<Endpoint> resolve(const std::string& address);

// The local address of a connection.
Endpoint local_endpoint(const Socket& socket);

bool is_loopback(const Endpoint& endpoint);

// True if the address, as resolve() takes it, is localhost or a numeric loopback address. A host's own name is neither:
// it may resolve to a loopback address on that host only.
bool names_loopback(const std::string& address);

// A socket that listens at the address: on its interface if it is one of this host, otherwise on this port of all
// interfaces. Throws ncclSystemError.
Socket listen_at(const std::string& address);

// A socket bound to a free port, which is written into `endpoint`. The port is closed until start_to_listen().
Socket bind_to(Endpoint& endpoint);
void start_to_listen(const Socket& socket);
// Closes the port, also in processes that inherited the socket.
void stop_listening(const Socket& socket);

// Starts to connect; poll() for POLLOUT tells when it is done.
Socket start_connect(const Endpoint& endpoint);

// A Unix socket in the abstract namespace: reachable by processes of this host and network namespace; uses no port and
// no file.
using LocalName = std::array<uint64_t, 2>;
Socket bind_to(const LocalName& name);
// Connects at once. Returns a closed socket and sets errno if no process listens.
Socket connect_to(const LocalName& name);
// True if the other end of such a connection belongs to the same user.
bool is_of_this_user(const Socket& socket);

// The result of a finished connect: an errno, or 0.
int connect_error(const Socket& socket);

// For links that stay open: keep-alive probes detect a lost host within half a minute, and small messages are sent at
// once.
void keep_alive(const Socket& socket);

}  // namespace crossdock::network
