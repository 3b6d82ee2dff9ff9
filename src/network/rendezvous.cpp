// SPDX-License-Identifier: Apache-2.0
// Functions of both halves of the rendezvous, and the half of ranks other than 0.
#include "network/rendezvous.h"

#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "core/error.h"
#include "core/interrupt.h"
#include "network/rendezvous_messages.h"
#include "runtime/cpu/clock.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kConnectNs = 5'000'000'000;
// Rank 0 accepts kMaxUnauthenticated connections per kShortTimeoutNs, so during a flood that fills the kernel's queue a
// rank waits 8 s.
constexpr uint64_t kChallengeNs = 20'000'000'000;
constexpr uint64_t kRetryNs = 20'000'000;
constexpr const char* kOtherSecret = "its CROSSDOCK_SECRET differs: set the same value on all ranks";

// Waits for the socket; returns false if the deadline has passed. Throws ncclRemoteError if the program interrupts it.
bool await(const Socket& socket, short events, uint64_t deadline_ns) {
    constexpr uint64_t kPollMs = 50;
    Interruption interruption;
    for (;;) {
        require(!interruption.has_come(), ncclRemoteError, "joining was interrupted, waiting for another rank's words");
        const uint64_t now = cpu::steady_now_ns();
        if (now >= deadline_ns) return false;
        pollfd waiting{socket.fd(), events, 0};
        const uint64_t left_ms = (deadline_ns - now) / 1'000'000 + 1;
        if (poll(&waiting, 1, static_cast<int>(std::min(left_ms, kPollMs))) > 0) return true;
    }
}

template <class Object>
std::span<const std::byte> bytes_of(const Object& object) {
    return std::as_bytes(std::span(&object, 1));
}

uint64_t proof_of_parts(const Secret& secret, std::initializer_list<std::span<const std::byte>> parts) {
    std::vector<std::byte> bytes;
    for (const auto& part : parts) bytes.insert(bytes.end(), part.begin(), part.end());
    return keyed_hash(secret, bytes);
}

// A rank other than 0.
class OtherRank {
  public:
    OtherRank(const Rendezvous& rendezvous, const RankInfo& own)
        : rendezvous_(rendezvous),
          secret_(secret_of(rendezvous.secret)),
          own_(own),
          deadline_ns_(cpu::steady_now_ns() + std::min(rendezvous.timeout_ns, UINT64_MAX / 2)),
          endpoints_(resolve(rendezvous.address)) {}

    JoinedRanks run() {
        Interruption interruption;
        for (size_t attempt = 0; cpu::steady_now_ns() < deadline_ns_; ++attempt) {
            require(!interruption.has_come(), ncclRemoteError, "rank {} was interrupted waiting for rank 0 at {}: {}",
                    rendezvous_.rank, rendezvous_.address, reason_);
            if (auto joined = try_to_join(endpoints_[attempt % endpoints_.size()])) return std::move(*joined);
            // A random pause, so that ranks refused together do not retry together.
            const timespec pause{0, static_cast<long>(kRetryNs / 2 + random_secret()[0] % kRetryNs)};
            nanosleep(&pause, nullptr);
        }
        fail(ncclRemoteError, "rank {} timed out after {} ms waiting for rank 0 at {}: {}", rendezvous_.rank,
             rendezvous_.timeout_ns / 1'000'000, rendezvous_.address, reason_);
    }

  private:
    // Returns nullopt if rank 0 does not answer; reason_ says why.
    std::optional<JoinedRanks> try_to_join(const Endpoint& endpoint) {
        Socket socket;
        try {
            socket = start_connect(endpoint);
        } catch (const Error& error) {
            reason_ = error.what();
            return std::nullopt;
        }
        const uint64_t connected_by_ns = std::min(deadline_ns_, cpu::steady_now_ns() + kConnectNs);
        if (!await(socket, POLLOUT, connected_by_ns)) return give_up("it does not answer");
        if (const int error = connect_error(socket); error != 0) return give_up(std::strerror(error));

        // If no process listens, a socket that got this port by chance connects to itself.
        if (local_endpoint(socket) == endpoint) return give_up("no process listens there");

        Challenge challenge = {};
        const uint64_t challenged_by_ns = std::min(deadline_ns_, cpu::steady_now_ns() + kChallengeNs);
        if (!receive_all(socket, std::as_writable_bytes(std::span(&challenge, 1)), challenged_by_ns))
            return give_up("it closed the connection, or said nothing");
        if (!is_challenge(challenge)) return give_up("the process that listens there is not a rank 0 of Crossdock");

        Listener listener = make_listener(rendezvous_, socket);
        Hello hello = {};
        hello.magic = kRendezvousMagic;
        hello.nonce = random_secret();
        hello.rank = rendezvous_.rank;
        hello.num_ranks = rendezvous_.num_ranks;
        hello.info = own_;
        hello.info.address = listener.address();
        hello.info.address.host = own_.address.host;
        hello.proof = proof_of(secret_, hello, challenge.nonce);
        Reply reply = {};
        if (!send_all(socket, bytes_of(hello), deadline_ns_) ||
            !receive_all(socket, std::as_writable_bytes(std::span(&reply, 1)), deadline_ns_))
            return give_up(cpu::steady_now_ns() < deadline_ns_ ? "it closed the connection"
                                                               : "it accepted this rank, but other ranks did not come");
        if (reply.magic != kRendezvousMagic) return give_up("it speaks another protocol");
        reply.text[sizeof(reply.text) - 1] = '\0';
        if (reply.code != ncclSuccess) {
            // Another process may be listening on this port. Only one that knows the secret can refuse a rank.
            if (reply.proof != proof_of(secret_, reply, {}, hello.nonce)) return give_up(kOtherSecret);
            fail(static_cast<ncclResult_t>(reply.code), "rank {} was refused by rank 0: {}", rendezvous_.rank,
                 reply.text);
        }
        std::vector<RankInfo> ranks(rendezvous_.num_ranks);
        if (reply.num_ranks != ranks.size() ||
            !receive_all(socket, std::as_writable_bytes(std::span(ranks)), deadline_ns_))
            return give_up("its reply broke off");
        if (reply.proof != proof_of(secret_, reply, ranks, hello.nonce)) return give_up(kOtherSecret);
        return JoinedRanks{std::move(listener), std::move(ranks)};
    }

    std::nullopt_t give_up(const char* reason) {
        // An attempt that the deadline cut short has a worse reason than the one before.
        if (reason_.empty() || cpu::steady_now_ns() < deadline_ns_) reason_ = reason;
        return std::nullopt;
    }

    const Rendezvous& rendezvous_;
    Secret secret_;
    RankInfo own_;
    uint64_t deadline_ns_;
    std::vector<Endpoint> endpoints_;
    std::string reason_;
};

}  // namespace

Secret secret_of(const std::string& text) {
    const auto bytes = std::as_bytes(std::span(text));
    return {keyed_hash({1, 0}, bytes), keyed_hash({2, 0}, bytes)};
}

uint64_t proof_of(const Secret& secret, Hello hello, const Secret& nonce) {
    hello.proof = 0;
    return proof_of_parts(secret, {bytes_of(hello), bytes_of(nonce)});
}

uint64_t proof_of(const Secret& secret, Reply reply, std::span<const RankInfo> ranks, const Secret& nonce) {
    reply.proof = 0;
    return proof_of_parts(secret, {bytes_of(reply), bytes_of(nonce), std::as_bytes(ranks)});
}

Listener make_listener(const Rendezvous& rendezvous, const Socket& socket) {
    if (!rendezvous.interfaces.empty()) return Listener(rendezvous.interfaces.c_str());
    const Endpoint own = local_endpoint(socket);
    // Ranks of other hosts cannot use a loopback address; there are none if rank 0's address names localhost.
    return is_loopback(own) && !names_loopback(rendezvous.address) ? Listener(nullptr) : Listener(own);
}

bool send_all(const Socket& socket, std::span<const std::byte> bytes, uint64_t deadline_ns) {
    while (!bytes.empty()) {
        const ssize_t sent = send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            bytes = bytes.subspan(static_cast<size_t>(sent));
        } else if (errno != EAGAIN && errno != EINTR) {
            return false;
        } else if (!await(socket, POLLOUT, deadline_ns)) {
            return false;
        }
    }
    return true;
}

bool receive_all(const Socket& socket, std::span<std::byte> bytes, uint64_t deadline_ns) {
    while (!bytes.empty()) {
        const ssize_t got = recv(socket.fd(), bytes.data(), bytes.size(), MSG_DONTWAIT);
        if (got > 0) {
            bytes = bytes.subspan(static_cast<size_t>(got));
        } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
            return false;
        } else if (!await(socket, POLLIN, deadline_ns)) {
            return false;
        }
    }
    return true;
}

JoinedRanks join_as_other(const Rendezvous& rendezvous, const RankInfo& own) {
    return OtherRank(rendezvous, own).run();
}

JoinedRanks join_ranks(const Rendezvous& rendezvous, const RankInfo& own) {
    return rendezvous.rank == 0 ? join_as_first(rendezvous, own) : join_as_other(rendezvous, own);
}

}  // namespace crossdock::network
