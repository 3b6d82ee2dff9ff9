// SPDX-License-Identifier: Apache-2.0
#include "network/handshake.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>

#include "core/error.h"
#include "core/interrupt.h"
#include "network/acceptor.h"
#include "network/greeting.h"
#include "network/link_stream.h"
#include "runtime/cpu/clock.h"

namespace crossdock::network {
namespace {

constexpr char kAddressMagic[8] = {'x', 'd', 'o', 'c', 'k', 'n', 'e', 't'};
constexpr uint32_t kVersion = 3;
constexpr int kPollMs = 20;
constexpr uint64_t kMinPauseNs = 1'000'000;
constexpr uint64_t kMaxPauseNs = 128'000'000;
// During a flood that fills the kernel's queue, a rank waits 8 s to be accepted.
constexpr uint64_t kSilenceNs = 20'000'000'000;
constexpr const char* kSilence = "it says nothing";
// A rank that fails stays for at most this long, to tell those that it is not linked with yet.
constexpr uint64_t kTellNs = 3'000'000'000;

uint64_t inode_of(const char* path) {
    struct stat status = {};
    return stat(path, &status) == 0 ? status.st_ino : 0;
}

// Identifies this boot of the host.
std::array<char, 40> boot_id() {
    std::array<char, 40> boot = {};
    if (FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
        [[maybe_unused]] const size_t got = std::fread(boot.data(), 1, boot.size() - 1, file);
        std::fclose(file);
    }
    return boot;
}

// Equal for equal bytes.
uint64_t number_of(ByteSpan bytes) {
    const Key hash = sha256(bytes);
    uint64_t number;
    std::memcpy(&number, hash.data(), sizeof(number));
    return number;
}

struct Connection {
    Connection(Socket new_socket, Greeting new_greeting, const Acceptor* of, uint64_t now_ns)
        : socket(std::move(new_socket)),
          greeting(std::move(new_greeting)),
          acceptor(of),
          since_ns(now_ns),
          out(greeting.take_output()) {}

    Socket socket;
    Greeting greeting;
    const Acceptor* acceptor;  // that accepted it; null: this rank dialled
    bool is_connected = true;  // a dialled one has yet to become so
    uint64_t since_ns;
    std::vector<std::byte> out;
    size_t sent = 0;

    bool is_unauthenticated() const { return acceptor != nullptr && !greeting.is_proven(); }
    bool is_sent() const { return sent == out.size(); }
};

// A rank that this one dials until they are linked.
struct Dialling {
    uint64_t next_ns = 0;
    uint64_t pause_ns = kMinPauseNs;
    bool is_open = false;  // there is a connection
    std::string reason;    // why the last one ended
};

// The lower rank dials.
bool is_dialled_from_other_hosts(std::span<const RankAddress> addresses, uint32_t rank) {
    return std::ranges::any_of(addresses.first(rank),
                               [&](const RankAddress& each) { return !is_local(each, addresses[rank]); });
}

class Meeting {
  public:
    Meeting(const Listener& listener, std::span<const RankAddress> addresses, uint32_t rank,
            std::span<const std::byte> blob)
        : addresses_(addresses),
          rank_(rank),
          blob_(blob),
          listener_(listener),
          remote_(listener.remote(), is_dialled_from_other_hosts(addresses, rank)),
          local_(listener.local()),
          links_(addresses.size()),
          has_left_(addresses.size(), false),
          dialling_(addresses.size()) {
        links_[rank].blob.assign(blob.begin(), blob.end());
        linked_.assign(addresses.size(), false);
        linked_[rank] = true;
        // The port stays closed where nobody dials.
        if (remote_.listens()) start_to_listen(listener.remote());
    }
    ~Meeting() {
        stop_listening(listener_.remote());
        stop_listening(listener_.local());
    }
    Meeting(const Meeting&) = delete;
    Meeting& operator=(const Meeting&) = delete;

    std::vector<Link> run(uint64_t timeout_ns) {
        const uint64_t end_ns = cpu::saturating_add(cpu::steady_now_ns(), timeout_ns);
        Interruption interruption;
        while (!failure_ && first_missing() < linked_.size()) {
            require(!interruption.has_come(), ncclRemoteError, "rank {} was interrupted connecting to ranks {}", rank_,
                    missing());
            if (cpu::steady_now_ns() < end_ns) {
                step();
            } else {
                fail_for(first_missing(), fmt::format("rank {} timed out after {} ms connecting to ranks {}{}{}{}",
                                                      rank_, timeout_ns / 1'000'000, missing(), obstacles(),
                                                      remote_.trouble(), local_.trouble()));
            }
        }
        const uint64_t told_ns = std::min(end_ns, cpu::steady_now_ns() + kTellNs);
        while (failure_ && !are_all_told() && cpu::steady_now_ns() < told_ns && !interruption.has_come()) step();
        if (failure_) fail(ncclRemoteError, "{}", failure_->message);
        say_to_lifelines(kNoRank);
        return std::move(links_);
    }

  private:
    struct Failure {
        uint32_t lost;
        std::string message;
    };

    // The number of ranks if none is missing.
    uint32_t first_missing() const {
        return static_cast<uint32_t>(std::ranges::find(linked_, false) - linked_.begin());
    }

    std::string missing() const {
        std::string text;
        for (uint32_t peer = 0; peer < linked_.size(); ++peer) {
            if (!linked_[peer]) text += fmt::format("{}{}", text.empty() ? "" : ", ", peer);
        }
        return text;
    }

    // This rank has lost another one. It says so at once, and on each link that it makes later.
    void fail_for(uint32_t lost, std::string message) {
        if (failure_) return;
        failure_ = Failure{lost, std::move(message)};
        for (uint32_t peer = 0; peer < links_.size(); ++peer) tell(peer);
        say_to_lifelines(lost);
    }

    // Without evidence about another rank, a peer that is gone is itself the lost one. A rank does not name itself.
    void lose(uint32_t peer, uint32_t reported, const char* what_happened) {
        const bool is_reported = reported < links_.size() && reported != rank_ && reported != peer;
        const uint32_t lost = is_reported ? reported : peer;
        const std::string list = missing();
        fail_for(lost, fmt::format("rank {} lost rank {} ({}) while ranks met: {}{}{}", rank_, lost, place_of(lost),
                                   is_reported ? fmt::format("rank {} reported it", peer) : what_happened,
                                   list.empty() ? "" : "; not connected yet are ranks ", list));
    }

    void tell(uint32_t peer) {
        if (!links_[peer].socket.is_open()) return;
        LinkStream& link = told_.emplace_back(std::move(links_[peer].socket));
        link.send_failure_report(failure_->lost);
        // Unread bytes would reset the connection when it is closed.
        link.end_sending();
        link.drain();
    }

    bool are_all_told() const {
        for (uint32_t peer = 0; peer < linked_.size(); ++peer) {
            if (!linked_[peer] && !has_left_[peer] && peer != failure_->lost) return false;
        }
        return true;
    }

    void say_to_lifelines(uint32_t lost) {
        for (uint32_t peer = 0; peer < linked_.size(); ++peer) {
            if (Lifeline* lifeline = listener_.lifeline(peer)) lifeline->say(lost);
        }
    }

    std::string place_of(uint32_t peer) const {
        return is_local(addresses_[peer], addresses_[rank_]) ? "on this host" : to_string(addresses_[peer].endpoint);
    }

    std::string obstacles() const {
        std::string text;
        for (uint32_t peer = rank_ + 1; peer < linked_.size(); ++peer) {
            if (linked_[peer]) continue;
            const Dialling& dialling = dialling_[peer];
            if (!dialling.reason.empty() || dialling.is_open)
                text += fmt::format("; rank {} ({}): {}", peer, place_of(peer),
                                    dialling.reason.empty() ? kSilence : dialling.reason);
        }
        return text;
    }

    size_t num_unauthenticated(const Acceptor& acceptor) const {
        return static_cast<size_t>(std::ranges::count_if(connections_, [&](const Connection& each) {
            return each.is_unauthenticated() && each.acceptor == &acceptor;
        }));
    }

    void step() {
        uint64_t now = cpu::steady_now_ns();
        dial(now);
        std::vector<pollfd> polls;
        for (const Connection& each : connections_) {
            const bool writes = !each.is_connected || !each.is_sent();
            polls.push_back({each.socket.fd(), static_cast<short>(writes ? POLLOUT : POLLIN), 0});
        }
        for (uint32_t peer = 0; peer < links_.size(); ++peer) {
            const Lifeline* lifeline = linked_[peer] ? nullptr : listener_.lifeline(peer);
            if (lifeline != nullptr)
                polls.push_back({lifeline->fd(), POLLIN, 0});
            else
                polls.push_back({has_left_[peer] ? -1 : links_[peer].socket.fd(), POLLRDHUP, 0});
        }
        for (const Acceptor* acceptor : {&remote_, &local_})
            polls.push_back({acceptor->fd(num_unauthenticated(*acceptor), now), POLLIN, 0});
        if (poll(polls.data(), polls.size(), kPollMs) < 0 && errno != EINTR) {
            fail(ncclSystemError, "poll failed: {}", std::strerror(errno));
        }
        now = cpu::steady_now_ns();
        for (uint32_t peer = 0; peer < links_.size(); ++peer) {
            if (polls[connections_.size() + peer].revents == 0) continue;
            linked_[peer] ? check_link(peer) : check_lifeline(peer);
        }
        // The timeouts depend on the number of connections before any of them is served.
        const uint64_t remote_timeout = remote_.timeout_ns(num_unauthenticated(remote_), now);
        const uint64_t local_timeout = local_.timeout_ns(num_unauthenticated(local_), now);
        for (size_t i = 0; i < connections_.size(); ++i) {
            Connection& each = connections_[i];
            if (!each.socket.is_open()) continue;  // its rank has connected again
            bool keep = polls[i].revents == 0 || serve(each);
            if (keep && each.acceptor == nullptr && now - each.since_ns > kSilenceNs) keep = break_off(each, kSilence);
            const uint64_t timeout = each.acceptor == &local_ ? local_timeout : remote_timeout;
            if (!keep || (each.is_unauthenticated() && now - each.since_ns > timeout)) each.socket.close();
        }
        std::erase_if(connections_, [](const Connection& each) { return !each.socket.is_open(); });
        accept_all(remote_, now);
        accept_all(local_, now);
    }

    void dial(uint64_t now) {
        for (uint32_t peer = rank_ + 1; peer < linked_.size(); ++peer) {
            if (linked_[peer] || dialling_[peer].is_open || now < dialling_[peer].next_ns) continue;
            Socket socket;
            const bool is_here = is_local(addresses_[peer], addresses_[rank_]);
            if (is_here) {
                socket = connect_to(addresses_[peer].local);
                if (!socket.is_open()) {
                    const int error = errno;
                    if (error == ECONNREFUSED && !awaits_rank_0()) {
                        has_left_[peer] = true;
                        lose(peer, kNoRank, "its process ended, or gave up meeting others");
                    }
                    dial_again(peer, std::strerror(error));
                    continue;
                }
            } else {
                try {
                    socket = start_connect(addresses_[peer].endpoint);
                } catch (const Error& error) {
                    dial_again(peer, error.what());
                    continue;
                }
            }
            connections_.emplace_back(std::move(socket), Greeting(listener_.identity(), addresses_, rank_, peer, blob_),
                                      nullptr, now);
            connections_.back().is_connected = is_here;
            dialling_[peer].is_open = true;
        }
    }

    // Rank 0 has not linked with this rank: it may have ended before it told all ranks each other's addresses. Then
    // those that it did not tell are gone, too.
    bool awaits_rank_0() const { return listener_.lifeline(0) != nullptr && !linked_[0]; }

    void dial_again(uint32_t peer, std::string reason) {
        Dialling& dialling = dialling_[peer];
        dialling.is_open = false;
        dialling.reason = std::move(reason);
        // A random pause, so that ranks refused together do not retry together.
        dialling.next_ns = cpu::steady_now_ns() + dialling.pause_ns / 2 + random_number() % dialling.pause_ns;
        dialling.pause_ns = std::min(2 * dialling.pause_ns, kMaxPauseNs);
    }

    void accept_all(Acceptor& acceptor, uint64_t now) {
        for (size_t count = num_unauthenticated(acceptor);; ++count) {
            Socket socket = acceptor.accept(count, now);
            if (!socket.is_open()) return;
            if (&acceptor == &local_ && !is_of_this_user(socket)) continue;
            connections_.emplace_back(std::move(socket),
                                      Greeting(listener_.identity(), addresses_, rank_, std::nullopt, blob_), &acceptor,
                                      now);
        }
    }

    // Returns false if the connection is done; its socket may have become a link.
    bool serve(Connection& each) {
        if (!each.is_connected) {
            if (const int error = connect_error(each.socket); error != 0) return break_off(each, std::strerror(error));
            each.is_connected = true;
        }
        if (each.is_sent()) return receive(each);
        const ssize_t sent = send(each.socket.fd(), each.out.data() + each.sent, each.out.size() - each.sent,
                                  MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) return errno == EAGAIN || errno == EINTR || break_off(each, std::strerror(errno));
        each.sent += static_cast<size_t>(sent);
        return each.is_sent() && each.greeting.is_done() ? link(each) : true;
    }

    bool receive(Connection& each) {
        std::byte buffer[4096];
        const ssize_t got =
            recv(each.socket.fd(), buffer, std::min(each.greeting.wanted(), sizeof(buffer)), MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (got < 0) return break_off(each, std::strerror(errno));
        if (got == 0)
            return break_off(each, each.greeting.is_proven() ? "it closed the connection"
                                                             : "it closed the connection; a rank with another "
                                                               "CROSSDOCK_SECRET does that");
        const char* refusal = each.greeting.take({buffer, static_cast<size_t>(got)});
        if (refusal != nullptr) return break_off(each, refusal);
        each.out = each.greeting.take_output();
        each.sent = 0;
        if (!each.greeting.is_done()) return true;
        // A rank dials again if its connection broke, so the latest one is valid.
        for (Connection& other : connections_) {
            if (&other != &each && !other.is_unauthenticated() && other.greeting.peer() == each.greeting.peer())
                other.socket.close();
        }
        return each.is_sent() ? link(each) : true;
    }

    bool link(Connection& each) {
        keep_alive(each.socket);
        const uint32_t peer = each.greeting.peer();
        links_[peer] = {std::move(each.socket), each.greeting.take_blob(), each.greeting.key_out(),
                        each.greeting.key_in()};
        linked_[peer] = true;
        if (failure_) tell(peer);
        return false;
    }

    // A link has ended. Bytes sent before belong to the owner of the link.
    void check_link(uint32_t peer) {
        const LinkStream::Unread unread = LinkStream::unread(links_[peer].socket);
        has_left_[peer] = true;
        if (!unread.has_bytes || unread.reported_loss != kNoRank)
            lose(peer, unread.reported_loss, "its process ended, or gave up meeting others");
    }

    void check_lifeline(uint32_t peer) {
        const std::optional<uint32_t> lost = listener_.lifeline(peer)->hear();
        if (!lost || *lost == kNoRank) return;
        has_left_[peer] = true;
        lose(peer, *lost, "its process ended, or gave up meeting others");
    }

    // Returns false: the connection is closed. A rank that this one dialled is dialled again.
    bool break_off(const Connection& each, const char* reason) {
        if (each.acceptor == nullptr) dial_again(each.greeting.peer(), reason);
        return false;
    }

    std::span<const RankAddress> addresses_;
    uint32_t rank_;
    std::span<const std::byte> blob_;
    const Listener& listener_;
    Acceptor remote_;
    Acceptor local_;
    std::vector<Link> links_;
    std::vector<bool> linked_;
    std::vector<bool> has_left_;
    std::optional<Failure> failure_;
    std::deque<LinkStream> told_;  // links on which the failure has been reported
    std::vector<Dialling> dialling_;
    std::vector<Connection> connections_;
};

}  // namespace

uint64_t host_identity() {
    struct {
        std::array<char, 40> boot;
        uint64_t ipc, pid;
    } identity = {};
    identity.boot = boot_id();
    identity.ipc = inode_of("/proc/self/ns/ipc");
    identity.pid = inode_of("/proc/self/ns/pid");
    const uint64_t host = number_of(std::as_bytes(std::span(&identity, 1)));
    const char* played = std::getenv("CROSSDOCK_HOST");
    if (played == nullptr || *played == '\0') return host;
    const std::string name = fmt::format("{} {}", host, played);
    return number_of(std::as_bytes(std::span(name)));
}

bool is_local(const RankAddress& a, const RankAddress& b) { return a.host == b.host && a.network == b.network; }

Listener::Listener(const char* interfaces, const std::string& secret) : Listener(own_address(interfaces), secret) {}

Listener::Listener(const Endpoint& own, const std::string& secret)
    : identity_{make_key_pair(), secret_of(secret)}, address_{} {
    std::memcpy(address_.magic, kAddressMagic, sizeof(kAddressMagic));
    address_.version = kVersion;
    address_.endpoint = own;
    address_.key = identity_.keys.shared;
    address_.host = host_identity();
    const std::string network = fmt::format("{} {}", boot_id().data(), inode_of("/proc/self/ns/net"));
    address_.network = number_of(std::as_bytes(std::span(network)));
    address_.local = {random_number(), random_number()};
    remote_ = bind_to(address_.endpoint);
    local_ = bind_to(address_.local);
    start_to_listen(local_);
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
