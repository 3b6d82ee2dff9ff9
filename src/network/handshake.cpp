// SPDX-License-Identifier: Apache-2.0
#include "network/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/error.h"
#include "runtime/cpu/clock.h"

namespace crossdock::network {
namespace {

constexpr char kAddressMagic[8] = {'x', 'd', 'o', 'c', 'k', 'n', 'e', 't'};
constexpr uint32_t kVersion = 1;
// So long may somebody who connected take to introduce himself, and so many may do so at once beside the ranks.
constexpr uint64_t kPatienceNs = 10'000'000'000;
constexpr size_t kMaxStrangers = 64;
constexpr int kPollMs = 20;

uint64_t inode_of(const char* path) {
    struct stat status = {};
    return stat(path, &status) == 0 ? status.st_ino : 0;
}

struct Connection {
    Socket socket;
    std::vector<std::byte> out;
    size_t sent = 0;
    std::vector<std::byte> in;
    uint32_t peer = 0;
    bool dialled = false;   // by this rank, to `peer`
    bool connected = true;  // a dialled one has yet to become so
    bool known = false;     // its greeting was read
    uint64_t deadline_ns = 0;
};

class Meeting {
  public:
    Meeting(const Listener& listener, std::span<const RankAddress> addresses, uint32_t rank,
            std::span<const std::byte> blob)
        : listener_(listener), addresses_(addresses), rank_(rank), blob_(blob), links_(addresses.size()) {
        links_[rank].blob.assign(blob.begin(), blob.end());
        linked_.assign(addresses.size(), false);
        linked_[rank] = true;
        // Of two ranks the lower one dials.
        for (uint32_t peer = rank + 1; peer < addresses.size(); ++peer) {
            Connection connection;
            connection.socket = start_connect(addresses[peer].endpoint);
            connection.out = make_greeting(addresses, rank, peer, blob);
            connection.peer = peer;
            connection.dialled = true;
            connection.connected = false;
            connections_.push_back(std::move(connection));
        }
    }

    std::vector<Link> run(uint64_t timeout_ns) {
        const uint64_t end_ns = cpu::steady_now_ns() + std::min(timeout_ns, UINT64_MAX / 2);
        while (std::find(linked_.begin(), linked_.end(), false) != linked_.end()) {
            require(cpu::steady_now_ns() < end_ns, ncclRemoteError,
                    "rank {} waited {} ms to be connected with ranks {}", rank_, timeout_ns / 1'000'000, missing());
            step();
        }
        return std::move(links_);
    }

  private:
    std::string missing() const {
        std::string text;
        for (uint32_t peer = 0; peer < linked_.size(); ++peer) {
            if (!linked_[peer]) text += fmt::format("{}{}", text.empty() ? "" : ", ", peer);
        }
        return text;
    }

    void step() {
        std::vector<pollfd> polls;
        polls.push_back({listener_.socket().fd(), POLLIN, 0});
        for (const Connection& each : connections_) {
            const bool writes = !each.connected || each.sent < each.out.size();
            polls.push_back({each.socket.fd(), static_cast<short>(writes ? POLLOUT : POLLIN), 0});
        }
        if (poll(polls.data(), polls.size(), kPollMs) < 0 && errno != EINTR) {
            fail(ncclSystemError, "poll failed: {}", std::strerror(errno));
        }
        const uint64_t now = cpu::steady_now_ns();
        for (size_t i = 0; i < connections_.size(); ++i) {
            Connection& each = connections_[i];
            const bool keep = polls[i + 1].revents == 0 || serve(each);
            if (!keep || (!each.dialled && now > each.deadline_ns)) each.socket.close();
        }
        std::erase_if(connections_, [](const Connection& each) { return !each.socket.is_open(); });
        if ((polls[0].revents & POLLIN) != 0) accept_all(now);
    }

    void accept_all(uint64_t now) {
        for (;;) {
            Socket socket(accept4(listener_.socket().fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
            if (!socket.is_open()) return;
            const auto is_stranger = [](const Connection& each) { return !each.dialled && !each.known; };
            const auto strangers = std::count_if(connections_.begin(), connections_.end(), is_stranger);
            if (static_cast<size_t>(strangers) >= kMaxStrangers + addresses_.size()) {
                // The oldest goes: ranks introduce themselves at once.
                connections_.erase(std::find_if(connections_.begin(), connections_.end(), is_stranger));
            }
            Connection connection;
            connection.socket = std::move(socket);
            connection.deadline_ns = now + kPatienceNs;
            connections_.push_back(std::move(connection));
        }
    }

    // False: the connection is of no more use here; its socket may have become a link.
    bool serve(Connection& each) {
        if (!each.connected) {
            const int error = connect_error(each.socket);
            require(error == 0, ncclRemoteError, "rank {} cannot connect to rank {} at {}: {}", rank_, each.peer,
                    to_string(addresses_[each.peer].endpoint), std::strerror(error));
            each.connected = true;
        }
        if (each.sent < each.out.size()) {
            const ssize_t sent = send(each.socket.fd(), each.out.data() + each.sent, each.out.size() - each.sent,
                                      MSG_NOSIGNAL | MSG_DONTWAIT);
            if (sent < 0) return errno == EAGAIN || errno == EINTR || lose(each, std::strerror(errno));
            each.sent += static_cast<size_t>(sent);
            if (each.sent < each.out.size()) return true;
            if (!each.dialled) return link(each);
            return true;
        }
        return receive(each);
    }

    bool receive(Connection& each) {
        // Not more than the greeting: what the rank says behind it is for whoever has the link then.
        std::byte buffer[4096];
        const size_t missing = greeting_bytes(each.in) - each.in.size();
        const ssize_t got = recv(each.socket.fd(), buffer, std::min(missing, sizeof(buffer)), MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (got <= 0) return lose(each, got == 0 ? "it closed the connection" : std::strerror(errno));
        each.in.insert(each.in.end(), buffer, buffer + got);

        uint32_t source = 0;
        std::span<const std::byte> blob;
        switch (read_greeting(each.in, addresses_, rank_, source, blob)) {
            case Greeting::kMore:
                return true;
            case Greeting::kBad:
                return lose(each, "it is no rank of this communicator");
            case Greeting::kGood:
                break;
        }
        if (each.dialled) {
            if (source != each.peer) return lose(each, "another rank answered");
            links_[source].blob.assign(blob.begin(), blob.end());
            return link(each);
        }
        // Only ranks below dial, and each of them once.
        const bool known_already =
            linked_[source] || std::any_of(connections_.begin(), connections_.end(), [&](const Connection& other) {
                return other.known && other.peer == source;
            });
        if (source > rank_ || known_already) return false;
        each.known = true;
        each.peer = source;
        links_[source].blob.assign(blob.begin(), blob.end());
        each.out = make_greeting(addresses_, rank_, source, blob_);
        return true;
    }

    bool link(Connection& each) {
        keep_alive(each.socket);
        links_[each.peer].socket = std::move(each.socket);
        linked_[each.peer] = true;
        return false;
    }

    // A stranger goes quietly. A rank that was dialled is needed.
    bool lose(const Connection& each, const char* reason) const {
        if (each.dialled) {
            fail(ncclRemoteError, "rank {} lost rank {} at {} while they met: {}", rank_, each.peer,
                 to_string(addresses_[each.peer].endpoint), reason);
        }
        return false;
    }

    const Listener& listener_;
    std::span<const RankAddress> addresses_;
    uint32_t rank_;
    std::span<const std::byte> blob_;
    std::vector<Link> links_;
    std::vector<bool> linked_;
    std::vector<Connection> connections_;
};

}  // namespace

uint64_t host_identity() {
    struct {
        char boot[40];
        uint64_t ipc, pid, memory, mount;
    } identity = {};
    if (FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
        [[maybe_unused]] const size_t got = std::fread(identity.boot, 1, sizeof(identity.boot) - 1, file);
        std::fclose(file);
    }
    identity.ipc = inode_of("/proc/self/ns/ipc");
    identity.pid = inode_of("/proc/self/ns/pid");
    struct stat status = {};
    if (stat("/dev/shm", &status) == 0) identity.memory = status.st_dev;
    return keyed_hash({}, std::as_bytes(std::span(&identity, 1)));
}

Listener::Listener(const char* interfaces) : Listener(own_address(interfaces)) {}

Listener::Listener(const Endpoint& own) : address_{} {
    std::memcpy(address_.magic, kAddressMagic, sizeof(kAddressMagic));
    address_.version = kVersion;
    address_.endpoint = own;
    address_.secret = random_secret();
    address_.host = host_identity();
    socket_ = listen_on(address_.endpoint);
}

RankAddress read_address(const void* bytes) {
    RankAddress address;
    std::memcpy(&address, bytes, sizeof(address));
    require(std::memcmp(address.magic, kAddressMagic, sizeof(kAddressMagic)) == 0, ncclInvalidArgument,
            "a handle was not made by this library's listen");
    require(address.version == kVersion, ncclInvalidArgument,
            "a rank's handle has version {}, this library's is {}: all ranks need the same", address.version, kVersion);
    return address;
}

std::vector<Link> meet(const Listener& listener, std::span<const RankAddress> addresses, uint32_t rank,
                       std::span<const std::byte> blob, uint64_t timeout_ns) {
    require(blob.size() <= kMaxBlobBytes, ncclInternalError, "{} bytes for each peer are more than {}", blob.size(),
            kMaxBlobBytes);
    return Meeting(listener, addresses, rank, blob).run(timeout_ns);
}

}  // namespace crossdock::network
