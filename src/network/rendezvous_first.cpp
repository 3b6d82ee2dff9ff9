// SPDX-License-Identifier: Apache-2.0
// The rendezvous as rank 0 sees it: anybody may connect, and who can prove to be a rank gets its seat.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "core/error.h"
#include "network/acceptor.h"
#include "network/rendezvous_messages.h"
#include "runtime/cpu/clock.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kReplyNs = 5'000'000'000;

struct Visitor {
    Socket socket;
    Challenge asked;
    uint64_t since_ns = 0;
    std::vector<std::byte> said;
    std::optional<Hello> hello;  // of one who has a seat
};

class First {
  public:
    First(const Rendezvous& rendezvous, const RankCard& own)
        : rendezvous_(rendezvous),
          secret_(secret_of(rendezvous.secret)),
          own_(own),
          socket_(listen_at(rendezvous.address)),
          acceptor_(socket_) {}

    Attendance run() {
        const uint64_t end_ns = cpu::steady_now_ns() + std::min(rendezvous_.timeout_ns, UINT64_MAX / 2);
        while (num_seated() + 1 < rendezvous_.num_ranks) {
            if (cpu::steady_now_ns() >= end_ns) give_up();
            step();
        }
        return welcome();
    }

  private:
    size_t num_seated() const {
        return static_cast<size_t>(
            std::ranges::count_if(visitors_, [](const Visitor& each) { return each.hello.has_value(); }));
    }
    size_t num_unauthenticated() const { return visitors_.size() - num_seated(); }

    void step() {
        constexpr int kPollMs = 50;
        std::vector<pollfd> polls{{acceptor_.fd(num_unauthenticated(), cpu::steady_now_ns()), POLLIN, 0}};
        for (const Visitor& each : visitors_) polls.push_back({each.socket.fd(), POLLIN, 0});
        if (poll(polls.data(), polls.size(), kPollMs) < 0 && errno != EINTR) {
            fail(ncclSystemError, "poll failed: {}", std::strerror(errno));
        }
        const uint64_t now = cpu::steady_now_ns();
        const uint64_t timeout_ns = acceptor_.timeout_ns(num_unauthenticated(), now);
        for (size_t i = 0; i < visitors_.size(); ++i) {
            Visitor& each = visitors_[i];
            const bool keep = polls[i + 1].revents == 0 || listen_to(each);
            if (!keep || (!each.hello && now - each.since_ns > timeout_ns)) each.socket.close();
        }
        std::erase_if(visitors_, [](const Visitor& each) { return !each.socket.is_open(); });
        accept_all(now);
    }

    void accept_all(uint64_t now) {
        for (;;) {
            Visitor visitor;
            visitor.socket = acceptor_.accept(num_unauthenticated(), now);
            if (!visitor.socket.is_open()) return;
            visitor.asked = make_challenge();
            visitor.since_ns = now;
            // An empty socket takes so few bytes.
            if (send_all(visitor.socket, std::as_bytes(std::span(&visitor.asked, 1)), 0))
                visitors_.push_back(std::move(visitor));
        }
    }

    // False: the visitor goes. One who has a seat has nothing more to say.
    bool listen_to(Visitor& visitor) {
        std::byte buffer[sizeof(Hello)];
        const ssize_t got = recv(visitor.socket.fd(), buffer, sizeof(buffer), MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (got <= 0 || visitor.hello) return false;
        visitor.said.insert(visitor.said.end(), buffer, buffer + got);
        const size_t known = std::min(visitor.said.size(), sizeof(kRendezvousMagic));
        // Who speaks another protocol is turned away at the first byte.
        if (std::memcmp(visitor.said.data(), &kRendezvousMagic, known) != 0) return false;
        if (visitor.said.size() < sizeof(Hello)) return true;
        if (visitor.said.size() > sizeof(Hello)) return false;
        Hello hello;
        std::memcpy(&hello, visitor.said.data(), sizeof(hello));
        if (hello.proof != proof_of(secret_, hello, visitor.asked.nonce)) {
            ++num_without_secret_;
            refuse_unauthenticated(visitor);
            return false;
        }
        const std::string objection = why_not(hello);
        if (!objection.empty()) {
            refuse(visitor, hello, ncclInvalidArgument, objection);
            return false;
        }
        visitor.hello = hello;
        keep_alive(visitor.socket);  // a seat is free again when its rank's host is gone
        return true;
    }

    std::string why_not(const Hello& hello) const {
        if (hello.num_ranks != rendezvous_.num_ranks)
            return fmt::format("num_ranks is {} there, {} on rank 0", hello.num_ranks, rendezvous_.num_ranks);
        if (hello.rank == 0 || hello.rank >= rendezvous_.num_ranks)
            return fmt::format("rank {} is not from 1 to {}", hello.rank, rendezvous_.num_ranks - 1);
        for (const Visitor& each : visitors_) {
            if (!each.socket.is_open() || !each.hello || each.hello->rank != hello.rank) continue;
            return fmt::format("rank {} is taken by process {} of host {}", hello.rank, each.hello->card.process,
                               std::string(each.hello->card.host_name,
                                           strnlen(each.hello->card.host_name, sizeof(RankCard::host_name))));
        }
        return {};
    }

    static void refuse_unauthenticated(const Visitor& visitor) {
        Reply reply = {};
        reply.magic = kRendezvousMagic;
        reply.code = ncclInvalidArgument;
        send_all(visitor.socket, std::as_bytes(std::span(&reply, 1)), 0);
    }

    void refuse(const Visitor& visitor, const Hello& hello, ncclResult_t code, const std::string& reason) const {
        Reply reply = {};
        reply.magic = kRendezvousMagic;
        reply.code = static_cast<uint32_t>(code);
        std::strncpy(reply.text, reason.c_str(), sizeof(reply.text) - 1);
        reply.proof = proof_of(secret_, reply, {}, hello.nonce);
        send_all(visitor.socket, std::as_bytes(std::span(&reply, 1)), 0);
    }

    // Those who came learn for whom all have waited.
    [[noreturn]] void give_up() const {
        std::string missing;
        for (uint32_t rank = 1; rank < rendezvous_.num_ranks; ++rank) {
            const bool came = std::any_of(visitors_.begin(), visitors_.end(), [rank](const Visitor& each) {
                return each.hello && each.hello->rank == rank;
            });
            if (!came) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
        }
        std::string message = fmt::format("rank 0 timed out after {} ms waiting at {} for ranks {}",
                                          rendezvous_.timeout_ns / 1'000'000, rendezvous_.address, missing);
        if (num_without_secret_ > 0)
            message += fmt::format("; {} that came had another CROSSDOCK_SECRET", num_without_secret_);
        message += acceptor_.trouble();
        for (const Visitor& each : visitors_) {
            if (each.hello) refuse(each, *each.hello, ncclRemoteError, message);
        }
        fail(ncclRemoteError, "{}", message);
    }

    Attendance welcome() {
        // Seen from another host if there is any.
        const Visitor* seen_by = nullptr;
        for (const Visitor& each : visitors_) {
            if (!each.hello) continue;
            if (seen_by == nullptr || each.hello->card.address.host != own_.address.host) seen_by = &each;
        }
        Attendance attendance{seen_by == nullptr ? Listener(nullptr) : make_listener(rendezvous_, seen_by->socket),
                              std::vector<RankCard>(rendezvous_.num_ranks)};
        attendance.cards[0] = own_;
        attendance.cards[0].address = attendance.listener.address();
        attendance.cards[0].address.host = own_.address.host;
        for (const Visitor& each : visitors_) {
            if (each.hello) attendance.cards[each.hello->rank] = each.hello->card;
        }
        for (const Visitor& each : visitors_) {
            if (!each.hello) continue;
            Reply reply = {};
            reply.magic = kRendezvousMagic;
            reply.code = ncclSuccess;
            reply.num_ranks = rendezvous_.num_ranks;
            reply.proof = proof_of(secret_, reply, attendance.cards, each.hello->nonce);
            const uint64_t deadline_ns = cpu::steady_now_ns() + kReplyNs;
            // One that does not take it will be missed when connections are made.
            if (send_all(each.socket, std::as_bytes(std::span(&reply, 1)), deadline_ns))
                send_all(each.socket, std::as_bytes(std::span(attendance.cards)), deadline_ns);
        }
        return attendance;
    }

    const Rendezvous& rendezvous_;
    Secret secret_;
    RankCard own_;
    Socket socket_;
    Acceptor acceptor_;
    std::vector<Visitor> visitors_;
    uint64_t num_without_secret_ = 0;
};

}  // namespace

Attendance attend_as_first(const Rendezvous& rendezvous, const RankCard& own) { return First(rendezvous, own).run(); }

}  // namespace crossdock::network
