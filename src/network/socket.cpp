// SPDX-License-Identifier: Apache-2.0
#include "network/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
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

std::vector<Endpoint> resolve(const std::string& address) {
    const size_t colon = address.rfind(':');
    std::string host = address.substr(0, colon == std::string::npos ? 0 : colon);
    const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
    uint16_t number = 0;
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
    require(!host.empty() && error == std::errc{} && end == port.data() + port.size() && number > 0,
            ncclInvalidArgument, "the address '{}' is not HOST:PORT with a port from 1 to 65535", address);
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* list = nullptr;
    const int status = getaddrinfo(host.c_str(), nullptr, &hints, &list);
    require(status == 0, ncclInvalidArgument, "the host of the address '{}' is unknown: {}", address,
            gai_strerror(status));
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
    std::vector<Endpoint> endpoints;
    for (const addrinfo* each = list; each != nullptr; each = each->ai_next) {
        if (each->ai_family != AF_INET && each->ai_family != AF_INET6) continue;
        endpoints.push_back(from_sockaddr(*each->ai_addr));
        endpoints.back().port = number;
    }
    require(!endpoints.empty(), ncclInvalidArgument, "the host of the address '{}' has no IP address", address);
    return endpoints;
}

Endpoint local_endpoint(const Socket& socket) {
    sockaddr_storage storage = {};
    socklen_t length = sizeof(storage);
    require(getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&storage), &length) == 0, ncclSystemError,
            "getsockname failed: {}", std::strerror(errno));
    Endpoint endpoint = from_sockaddr(reinterpret_cast<const sockaddr&>(storage));
    // A socket for both versions shows addresses of version 4 as this range of version 6.
    constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    if (endpoint.family == AF_INET6 && std::memcmp(endpoint.ip, kMapped, sizeof(kMapped)) == 0) {
        endpoint.family = AF_INET;
        endpoint.scope = 0;
        std::memmove(endpoint.ip, endpoint.ip + sizeof(kMapped), 4);
        std::memset(endpoint.ip + 4, 0, sizeof(endpoint.ip) - 4);
    }
    return endpoint;
}

bool is_loopback(const Endpoint& endpoint) {
    if (endpoint.family == AF_INET) return endpoint.ip[0] == 127;
    return std::memcmp(endpoint.ip, &in6addr_loopback, sizeof(endpoint.ip)) == 0;
}

Socket listen_everywhere(uint16_t port) {
    for (const uint16_t family : {uint16_t{AF_INET6}, uint16_t{AF_INET}}) {
        Socket socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
        if (!socket.is_open()) continue;
        set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
        if (family == AF_INET6) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
        Endpoint any = {};
        any.family = family;
        any.port = port;
        sockaddr_storage storage;
        const socklen_t length = to_sockaddr(any, storage);
        if (bind(socket.fd(), reinterpret_cast<sockaddr*>(&storage), length) == 0 &&
            listen(socket.fd(), SOMAXCONN) == 0)
            return socket;
        // A host without version 6 may still take version 4.
        require(family == AF_INET6 && errno != EADDRINUSE, ncclSystemError, "cannot listen on port {}: {}", port,
                std::strerror(errno));
    }
    fail(ncclSystemError, "cannot listen on port {}: the host has no IP", port);
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
