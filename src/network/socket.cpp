// SPDX-License-Identifier: Apache-2.0
#include "network/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>

#include "core/error.h"
#include "core/process.h"
#include "network/port_owner.h"

namespace crossdock::network {
namespace {

struct OpenSockets {
    ForkSafeMutex mutex{[this] {
        for (const int fd : fds) ::close(fd);
        fds.clear();
    }};
    std::vector<int> fds;
};
OpenSockets& open_sockets() {
    static auto* instance = new OpenSockets;
    return *instance;
}
const MadeAtLoad open_sockets_made_at_load(open_sockets);

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

// The host of "host:port" or "[host]:port".
std::string host_of(const std::string& address) {
    const size_t colon = address.rfind(':');
    std::string host = address.substr(0, colon == std::string::npos ? 0 : colon);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
    return host;
}

// In the abstract namespace: the name begins with a zero byte, and the length delimits it.
socklen_t to_sockaddr(const LocalName& name, sockaddr_un& address) {
    address = {};
    address.sun_family = AF_UNIX;
    const std::string text = fmt::format("crossdock-{:016x}{:016x}", name[0], name[1]);
    std::memcpy(address.sun_path + 1, text.data(), text.size());
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
}

// True if an interface of this host has this address. Ignores the port.
bool is_own(const Endpoint& endpoint) {
    const Socket socket = Socket::made_by([&] { return ::socket(endpoint.family, SOCK_STREAM | SOCK_CLOEXEC, 0); });
    Endpoint any_port = endpoint;
    any_port.port = 0;
    sockaddr_storage storage;
    const socklen_t length = to_sockaddr(any_port, storage);
    return socket.is_open() && bind(socket.fd(), reinterpret_cast<sockaddr*>(&storage), length) == 0;
}

Socket open_socket(uint16_t family) {
    Socket socket = Socket::made_by([&] { return ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
    require(socket.is_open(), ncclSystemError, "cannot open a socket: {}", std::strerror(errno));
    return socket;
}

void set_option(const Socket& socket, int level, int option, int value) {
    setsockopt(socket.fd(), level, option, &value, sizeof(value));
}

// text: the user's text, for messages. The unspecified IPv6 address accepts both versions.
Socket listen_on(const Endpoint& endpoint, const std::string& text) {
    Socket socket = open_socket(endpoint.family);
    set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
    if (endpoint.family == AF_INET6) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    sockaddr_storage storage;
    const socklen_t length = to_sockaddr(endpoint, storage);
    const bool listens =
        bind(socket.fd(), reinterpret_cast<sockaddr*>(&storage), length) == 0 && listen(socket.fd(), SOMAXCONN) == 0;
    const int error = errno;
    const std::string owner = !listens && error == EADDRINUSE ? who_listens(endpoint.port) : "";
    require(listens, ncclSystemError, "cannot listen at {} ({}): {}{}{}", text, to_string(endpoint),
            std::strerror(error), owner.empty() ? "" : "; ", owner);
    return socket;
}

}  // namespace

Socket Socket::made_by(const std::function<int()>& make) {
    const std::lock_guard lock(open_sockets().mutex);
    std::vector<int>& fds = open_sockets().fds;
    fds.reserve(fds.size() + 1);
    Socket made;
    made.fd_ = make();
    if (made.is_open()) fds.push_back(made.fd_);
    return made;
}

void Socket::close() {
    if (fd_ < 0) return;
    const std::lock_guard lock(open_sockets().mutex);
    // A forked child has closed it already, and its number may be in use again.
    if (std::erase(open_sockets().fds, fd_) > 0) ::close(fd_);
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
    const std::string host = host_of(address);
    const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
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
    // A socket of both versions shows IPv4 addresses as IPv4-mapped IPv6 addresses.
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

bool names_loopback(const std::string& address) {
    const std::string host = host_of(address);
    if (host == "localhost") return true;
    Endpoint number = {};
    number.family = AF_INET;
    if (inet_pton(AF_INET, host.c_str(), number.ip) == 1) return is_loopback(number);
    number.family = AF_INET6;
    return inet_pton(AF_INET6, host.c_str(), number.ip) == 1 && is_loopback(number);
}

Socket listen_at(const std::string& address) {
    std::vector<Endpoint> named = resolve(address);
    // A host's name may resolve to a loopback address on that host only.
    const bool takes_loopback = names_loopback(address);
    // IPv4 first: ranks that dial localhost try all its addresses, ranks that dial 127.0.0.1 only that one.
    if (takes_loopback)
        std::stable_partition(named.begin(), named.end(), [](const Endpoint& each) { return each.family == AF_INET; });
    const auto own = std::find_if(named.begin(), named.end(), [&](const Endpoint& each) {
        return (takes_loopback || !is_loopback(each)) && is_own(each);
    });
    if (own != named.end()) return listen_on(*own, address);
    Endpoint everywhere = {};
    everywhere.port = named.front().port;
    everywhere.family = AF_INET6;
    try {
        return listen_on(everywhere, address);
    } catch (const Error&) {
        // The host may have no IPv6. A port that is in use fails with IPv4, too.
        everywhere.family = AF_INET;
        return listen_on(everywhere, address);
    }
}

Socket bind_to(Endpoint& endpoint) {
    Socket socket = open_socket(endpoint.family);
    endpoint.port = 0;
    sockaddr_storage storage;
    socklen_t length = to_sockaddr(endpoint, storage);
    auto* address = reinterpret_cast<sockaddr*>(&storage);
    const bool is_bound = bind(socket.fd(), address, length) == 0 && getsockname(socket.fd(), address, &length) == 0;
    require(is_bound, ncclSystemError, "cannot bind a socket to {}: {}", to_string(endpoint), std::strerror(errno));
    endpoint.port = from_sockaddr(*address).port;
    return socket;
}

void start_to_listen(const Socket& socket) {
    require(listen(socket.fd(), SOMAXCONN) == 0, ncclSystemError, "cannot listen for ranks: {}", std::strerror(errno));
}

void stop_listening(const Socket& socket) { shutdown(socket.fd(), SHUT_RDWR); }

Socket bind_to(const LocalName& name) {
    Socket socket = open_socket(AF_UNIX);
    sockaddr_un address;
    const socklen_t length = to_sockaddr(name, address);
    require(bind(socket.fd(), reinterpret_cast<sockaddr*>(&address), length) == 0, ncclSystemError,
            "cannot bind a socket of this host: {}", std::strerror(errno));
    return socket;
}

Socket connect_to(const LocalName& name) {
    Socket socket = Socket::made_by([] { return ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
    sockaddr_un address;
    const socklen_t length = to_sockaddr(name, address);
    if (!socket.is_open() || connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), length) == 0)
        return socket;
    const int error = errno;
    socket.close();
    errno = error;
    return socket;
}

bool is_of_this_user(const Socket& socket) {
    ucred other = {};
    socklen_t length = sizeof(other);
    return getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &other, &length) == 0 && other.uid == geteuid();
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
    set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 5);
    set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 3);
    set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 5);
}

}  // namespace crossdock::network
