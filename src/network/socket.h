// SPDX-License-Identifier: Apache-2.0
// Sockets as the handshake needs them, TCP and within a host: owned, never blocking, without surprises from signals.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace crossdock::network {

// A descriptor, owned. A forked child closes its copies at once: while it has them open, peers do not see this process
// end, and ports stay taken.
class Socket {
  public:
    Socket() = default;
    explicit Socket(int fd) : Socket(made_by([fd] { return fd; })) {}
    // make() opens a descriptor, or returns -1. No fork of another thread comes between this and the constructor.
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

// Whether the text of an address, as resolve() takes it, is localhost or a number of the loopback interface. Another
// host's name for itself may resolve to such a number there, and to another one elsewhere.
bool names_loopback(const std::string& address);

// A socket that listens at the address, on its interface alone where that is one of this host, else on this port of all
// interfaces. Error with ncclSystemError.
Socket listen_at(const std::string& address);

// A socket with a free port, which it writes into `endpoint`. The port is closed until start_to_listen.
Socket bind_to(Endpoint& endpoint);
void start_to_listen(const Socket& socket);
// The port is closed again, also in processes that inherited the socket.
void stop_listening(const Socket& socket);

// Starts to connect; poll() says when it is done.
Socket start_connect(const Endpoint& endpoint);

// A socket that processes of this host reach, of the same network namespace: no port, and no file.
using LocalName = std::array<uint64_t, 2>;
Socket bind_to(const LocalName& name);
// Connects at once. A closed socket, and errno, where nobody listens.
Socket connect_to(const LocalName& name);
// Whether the other end of such a connection belongs to the same user.
bool is_of_this_user(const Socket& socket);

// The error of a connect that has ended, 0 when it stands.
int connect_error(const Socket& socket);

// A link that stays open: probes find out within half a minute that the other side's host is gone, and small messages
// leave at once.
void keep_alive(const Socket& socket);

}  // namespace crossdock::network
