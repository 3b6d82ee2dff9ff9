// SPDX-License-Identifier: Apache-2.0
#include "network/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>

#include "core/error.h"

namespace crossdock::network {
namespace {

socklen_t to_sockaddr(const Endpoint& endpoint, sockaddr_storage& storage) {
    std::memset(&storage, 0, sizeof(storage));
    if (endpoint.family == AF_INET) {
        auto& address = reinterpret_cast<sockaddr_in&>(storage);
        address.sin_family = AF_INET;
        address.sin_port = htons(endpoint.port);
        std::memcpy(&address.sin_addr, endpoint.ip, sizeof(address.sin_addr));
        return sizeof(address);
    }
    auto& address = reinterpret_cast<sockaddr_in6&>(storage);
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(endpoint.port);
    address.sin6_scope_id = endpoint.scope;
    std::memcpy(&address.sin6_addr, endpoint.ip, sizeof(address.sin6_addr));
    return sizeof(address);
}

Endpoint from_sockaddr(const sockaddr& any) {
    Endpoint endpoint{};
    endpoint.family = any.sa_family;
    if (any.sa_family == AF_INET) {
        const auto& address = reinterpret_cast<const sockaddr_in&>(any);
        std::memcpy(endpoint.ip, &address.sin_addr, sizeof(address.sin_addr));
        endpoint.port = ntohs(address.sin_port);
    } else {
        const auto& address = reinterpret_cast<const sockaddr_in6&>(any);
        std::memcpy(endpoint.ip, &address.sin6_addr, sizeof(address.sin6_addr));
        endpoint.port = ntohs(address.sin6_port);
        endpoint.scope = address.sin6_scope_id;
    }
    return endpoint;
}

bool is_named(std::string_view interface, std::string_view names) {
    const bool all_but = names.starts_with('^');
    if (all_but) names.remove_prefix(1);
    const bool whole = names.starts_with('=');
    if (whole) names.remove_prefix(1);
    bool found = false;
    while (!names.empty() && !found) {
        const size_t comma = names.find(',');
        const std::string_view name = names.substr(0, comma);
        found = !name.empty() && (whole ? interface == name : interface.starts_with(name));
        names = comma == std::string_view::npos ? std::string_view() : names.substr(comma + 1);
    }
    return found != all_but;
}

Socket open_socket(uint16_t family) {
    Socket socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    require(socket.is_open(), ncclSystemError, "cannot open a socket: {}", std::strerror(errno));
    return socket;
}

void set_option(const Socket& socket, int level, int option, int value) {
    setsockopt(socket.fd(), level, option, &value, sizeof(value));
}

}  // namespace

void Socket::close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

std::string to_string(const Endpoint& endpoint) {
    char text[INET6_ADDRSTRLEN] = "?";
    inet_ntop(endpoint.family, endpoint.ip, text, sizeof(text));
    return fmt::format("{} port {}", text, endpoint.port);
}

Endpoint own_address(const char* interfaces) {
    ifaddrs* list = nullptr;
    require(getifaddrs(&list) == 0, ncclSystemError, "cannot list network interfaces: {}", std::strerror(errno));
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
    const bool named = interfaces != nullptr && *interfaces != '\0';
    const auto find = [&](uint16_t family, bool loopback) -> const ifaddrs* {
        for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
            if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != family) continue;
            if ((each->ifa_flags & IFF_UP) == 0 || ((each->ifa_flags & IFF_LOOPBACK) != 0) != loopback) continue;
            if (!named || is_named(each->ifa_name, interfaces)) return each;
        }
        return nullptr;
    };
    for (const bool loopback : {false, true}) {
        for (const uint16_t family : {uint16_t{AF_INET}, uint16_t{AF_INET6}}) {
            if (const ifaddrs* found = find(family, loopback)) return from_sockaddr(*found->ifa_addr);
        }
    }
    fail(ncclInvalidUsage, "no network interface that is up fits '{}'", named ? interfaces : "");
}

Socket listen_on(Endpoint& endpoint) {
    Socket socket = open_socket(endpoint.family);
    endpoint.port = 0;
    sockaddr_storage storage;
    socklen_t length = to_sockaddr(endpoint, storage);
    auto* address = reinterpret_cast<sockaddr*>(&storage);
    const bool listens = bind(socket.fd(), address, length) == 0 && listen(socket.fd(), SOMAXCONN) == 0 &&
                         getsockname(socket.fd(), address, &length) == 0;
    require(listens, ncclSystemError, "cannot listen on {}: {}", to_string(endpoint), std::strerror(errno));
    endpoint.port = from_sockaddr(*address).port;
    return socket;
}

Socket start_connect(const Endpoint& endpoint) {
    Socket socket = open_socket(endpoint.family);
    sockaddr_storage storage;
    const socklen_t length = to_sockaddr(endpoint, storage);
    const int status = connect(socket.fd(), reinterpret_cast<const sockaddr*>(&storage), length);
    require(status == 0 || errno == EINPROGRESS, ncclSystemError, "cannot connect to {}: {}", to_string(endpoint),
            std::strerror(errno));
    return socket;
}

int connect_error(const Socket& socket) {
    int error = 0;
    socklen_t length = sizeof(error);
    if (getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
    return error;
}

void keep_alive(const Socket& socket) {
    set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 5);
    set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 3);
    set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 5);
}

}  // namespace crossdock::network
