// SPDX-License-Identifier: Apache-2.0
// Functions of both halves of the rendezvous, and the half of ranks other than 0.
#include "network/rendezvous.h"

#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/printable.h"
#include "network/rendezvous_messages.h"
#include "runtime/cpu/clock.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kConnectNs = 5'000'000'000;
// Rank 0 accepts kMaxUnauthenticated connections per kShortTimeoutNs, so during a flood that fills the kernel's queue a
// rank waits 8 s.
constexpr uint64_t kAnswerNs = 20'000'000'000;
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

// A rank other than 0.
class OtherRank {
  public:
    OtherRank(const Rendezvous& rendezvous, const RankInfo& own)
        : rendezvous_(rendezvous),
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
            const timespec pause{0, static_cast<long>(kRetryNs / 2 + random_number() % kRetryNs)};
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

        NoiseSession session = make_session(rendezvous_, true);
        const Opening opening = make_opening(session);
        Opening answer = {};
        const uint64_t answered_by_ns = std::min(deadline_ns_, cpu::steady_now_ns() + kAnswerNs);
        if (!send_all(socket, object_bytes(opening), answered_by_ns) ||
            !receive_all(socket, std::as_writable_bytes(std::span(&answer, 1)), answered_by_ns))
            return give_up("it closed the connection, or said nothing");
        if (answer.magic == kOtherSecretMagic) return give_up(kOtherSecret);
        if (answer.magic != kRendezvousMagic)
            return give_up("the process that listens there is not a rank 0 of Crossdock");
        if (!session.read(answer.message)) return give_up(kOtherSecret);
        // Rank 0 is there now, if this is the right one.
        if (!is_of_other_job_) reason_.clear();

        Listener listener = make_listener(rendezvous_, socket);
        Hello hello = {};
        hello.rank = rendezvous_.rank;
        hello.num_ranks = rendezvous_.num_ranks;
        const uint64_t now = cpu::steady_now_ns();
        hello.time_left_ms = now < deadline_ns_ ? (deadline_ns_ - now) / 1'000'000 : 0;
        std::strncpy(hello.job, rendezvous_.job.c_str(), sizeof(hello.job) - 1);
        hello.info = own_;
        hello.info.address = listener.address();
        hello.info.address.host = own_.address.host;
        Reply reply = {};
        if (!send_all(socket, session.seal(object_bytes(hello)), deadline_ns_) || !receive(socket, session, reply))
            return give_up(cpu::steady_now_ns() < deadline_ns_ ? "it closed the connection"
                                                               : "it accepted this rank, but other ranks did not come");
        const std::string text = printable(reply.text, sizeof(reply.text));
        switch (reply.verdict) {
            case Verdict::kWelcome:
                break;
            case Verdict::kContradicts:
                fail(ncclInvalidArgument, "rank {} was refused by rank 0: {}", rendezvous_.rank, text);
            case Verdict::kTimeIsUp:
                fail(ncclRemoteError, "rank {} timed out after {} ms: {}", rendezvous_.rank,
                     rendezvous_.timeout_ns / 1'000'000, text);
            case Verdict::kGaveUp:
                fail(ncclRemoteError, "rank {} was refused by rank 0: {}", rendezvous_.rank, text);
            case Verdict::kOtherJob:  // which may end before this one's rank 0 starts
                is_of_other_job_ = true;
                return give_up(text);
        }
        std::vector<RankInfo> ranks(rendezvous_.num_ranks);
        if (reply.verdict != Verdict::kWelcome || reply.num_ranks != ranks.size() ||
            !receive(socket, session, std::span(ranks)))
            return give_up("its reply broke off, or has another form");
        listener.keep(0, std::make_unique<Lifeline>(std::move(socket), std::move(session), 0));
        return JoinedRanks{std::move(listener), std::move(ranks)};
    }

    // Sealed. False if it did not come, or was changed on its way.
    template <class Object>
    bool receive(const Socket& socket, NoiseSession& session, std::span<Object> objects) {
        const auto plain = std::as_writable_bytes(objects);
        std::vector<std::byte> sealed(NoiseSession::sealed_bytes(plain.size()));
        if (!receive_all(socket, sealed, deadline_ns_)) return false;
        const auto opened = session.open(sealed);
        if (opened) std::copy(opened->begin(), opened->end(), plain.begin());
        return opened.has_value();
    }
    bool receive(const Socket& socket, NoiseSession& session, Reply& reply) {
        return receive(socket, session, std::span(&reply, 1));
    }

    std::nullopt_t give_up(const std::string& reason) {
        // An attempt that the deadline cut short has a worse reason than the one before.
        if (reason_.empty() || cpu::steady_now_ns() < deadline_ns_) reason_ = reason;
        return std::nullopt;
    }

    const Rendezvous& rendezvous_;
    RankInfo own_;
    uint64_t deadline_ns_;
    std::vector<Endpoint> endpoints_;
    std::string reason_;  // why the last attempt failed
    bool is_of_other_job_ = false;
};

}  // namespace

NoiseSession make_session(const Rendezvous& rendezvous, bool is_initiator) {
    return NoiseSession({is_initiator, object_bytes(kRendezvousMagic), secret_of(rendezvous.secret)});
}

Opening make_opening(NoiseSession& session) {
    Opening opening = {kRendezvousMagic, {}};
    const std::vector<std::byte> message = session.write();
    std::copy(message.begin(), message.end(), opening.message.begin());
    return opening;
}

Listener make_listener(const Rendezvous& rendezvous, const Socket& socket) {
    if (!rendezvous.interfaces.empty()) return Listener(rendezvous.interfaces.c_str(), rendezvous.secret);
    const Endpoint own = local_endpoint(socket);
    // Ranks of other hosts cannot use a loopback address; there are none if rank 0's address names localhost.
    return is_loopback(own) && !names_loopback(rendezvous.address) ? Listener(nullptr, rendezvous.secret)
                                                                   : Listener(own, rendezvous.secret);
}

bool send_all(const Socket& socket, std::span<const std::byte> bytes, uint64_t deadline_ns) {
    while (!bytes.empty()) {
        const ssize_t sent = send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            bytes = bytes.subspan(static_cast<size_t>(sent));
        } else if ((errno != EAGAIN && errno != EINTR) || !await(socket, POLLOUT, deadline_ns)) {
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
        } else if (got == 0 || (errno != EAGAIN && errno != EINTR) || !await(socket, POLLIN, deadline_ns)) {
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
