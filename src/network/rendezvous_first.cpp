// SPDX-License-Identifier: Apache-2.0
// Rank 0's half of the rendezvous: accepts connections, and joins those that authenticate as a rank.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "core/error.h"
#include "core/interrupt.h"
#include "network/acceptor.h"
#include "network/rendezvous_messages.h"
#include "runtime/cpu/clock.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kReplyNs = 5'000'000'000;

struct Client {
    Socket socket;
    Challenge asked;
    uint64_t since_ns = 0;
    std::vector<std::byte> received;
    std::optional<Hello> hello;  // valid once the rank has joined
};

class First {
  public:
    First(const Rendezvous& rendezvous, const RankInfo& own)
        : rendezvous_(rendezvous),
          secret_(secret_of(rendezvous.secret)),
          own_(own),
          socket_(listen_at(rendezvous.address)),
          acceptor_(socket_) {}

    JoinedRanks run() {
        const uint64_t end_ns = cpu::steady_now_ns() + std::min(rendezvous_.timeout_ns, UINT64_MAX / 2);
        Interruption interruption;
        while (num_joined() + 1 < rendezvous_.num_ranks) {
            if (cpu::steady_now_ns() >= end_ns)
                give_up(fmt::format("timed out after {} ms", rendezvous_.timeout_ns / 1'000'000));
            if (interruption.has_come()) give_up("was interrupted");
            step();
        }
        return reply_to_all();
    }

  private:
    size_t num_joined() const {
        return static_cast<size_t>(
            std::ranges::count_if(clients_, [](const Client& each) { return each.hello.has_value(); }));
    }
    size_t num_unauthenticated() const { return clients_.size() - num_joined(); }

    void step() {
        constexpr int kPollMs = 50;
        std::vector<pollfd> polls{{acceptor_.fd(num_unauthenticated(), cpu::steady_now_ns()), POLLIN, 0}};
        for (const Client& each : clients_) polls.push_back({each.socket.fd(), POLLIN, 0});
        if (poll(polls.data(), polls.size(), kPollMs) < 0 && errno != EINTR) {
            fail(ncclSystemError, "poll failed: {}", std::strerror(errno));
        }
        const uint64_t now = cpu::steady_now_ns();
        const uint64_t timeout_ns = acceptor_.timeout_ns(num_unauthenticated(), now);
        for (size_t i = 0; i < clients_.size(); ++i) {
            Client& each = clients_[i];
            const bool keep = polls[i + 1].revents == 0 || receive_hello(each);
            if (!keep || (!each.hello && now - each.since_ns > timeout_ns)) each.socket.close();
        }
        std::erase_if(clients_, [](const Client& each) { return !each.socket.is_open(); });
        accept_all(now);
    }

    void accept_all(uint64_t now) {
        for (;;) {
            Client client;
            client.socket = acceptor_.accept(num_unauthenticated(), now);
            if (!client.socket.is_open()) return;
            client.asked = make_challenge();
            client.since_ns = now;
            // Does not block: the socket's buffer is empty.
            if (send_all(client.socket, std::as_bytes(std::span(&client.asked, 1)), 0))
                clients_.push_back(std::move(client));
        }
    }

    // Returns false if the client is to be closed. A rank that has joined sends nothing more.
    bool receive_hello(Client& client) {
        std::byte buffer[sizeof(Hello)];
        const ssize_t got = recv(client.socket.fd(), buffer, sizeof(buffer), MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (got <= 0 || client.hello) return false;
        client.received.insert(client.received.end(), buffer, buffer + got);
        const size_t known = std::min(client.received.size(), sizeof(kRendezvousMagic));
        // Other protocols are refused at the first wrong byte.
        if (std::memcmp(client.received.data(), &kRendezvousMagic, known) != 0) return false;
        if (client.received.size() < sizeof(Hello)) return true;
        if (client.received.size() > sizeof(Hello)) return false;
        Hello hello;
        std::memcpy(&hello, client.received.data(), sizeof(hello));
        if (hello.proof != proof_of(secret_, hello, client.asked.nonce)) {
            ++num_without_secret_;
            refuse_unauthenticated(client);
            return false;
        }
        const std::string objection = why_not(hello);
        if (!objection.empty()) {
            refuse(client, hello, ncclInvalidArgument, objection);
            return false;
        }
        client.hello = hello;
        keep_alive(client.socket);  // detects a lost host, whose rank may then join again
        return true;
    }

    std::string why_not(const Hello& hello) const {
        if (hello.num_ranks != rendezvous_.num_ranks)
            return fmt::format("num_ranks is {} there, {} on rank 0", hello.num_ranks, rendezvous_.num_ranks);
        if (hello.rank == 0 || hello.rank >= rendezvous_.num_ranks)
            return fmt::format("rank {} is not from 1 to {}", hello.rank, rendezvous_.num_ranks - 1);
        for (const Client& each : clients_) {
            if (!each.socket.is_open() || !each.hello || each.hello->rank != hello.rank) continue;
            return fmt::format("rank {} is taken by process {} of host {}", hello.rank, each.hello->info.process,
                               std::string(each.hello->info.host_name,
                                           strnlen(each.hello->info.host_name, sizeof(RankInfo::host_name))));
        }
        return {};
    }

    static void refuse_unauthenticated(const Client& client) {
        Reply reply = {};
        reply.magic = kRendezvousMagic;
        reply.code = ncclInvalidArgument;
        send_all(client.socket, std::as_bytes(std::span(&reply, 1)), 0);
    }

    void refuse(const Client& client, const Hello& hello, ncclResult_t code, const std::string& reason) const {
        Reply reply = {};
        reply.magic = kRendezvousMagic;
        reply.code = static_cast<uint32_t>(code);
        std::strncpy(reply.text, reason.c_str(), sizeof(reply.text) - 1);
        reply.proof = proof_of(secret_, reply, {}, hello.nonce);
        send_all(client.socket, std::as_bytes(std::span(&reply, 1)), 0);
    }

    // Tells the ranks that have joined which ranks are missing.
    [[noreturn]] void give_up(const std::string& happened) const {
        std::string missing;
        for (uint32_t rank = 1; rank < rendezvous_.num_ranks; ++rank) {
            const bool came = std::any_of(clients_.begin(), clients_.end(), [rank](const Client& each) {
                return each.hello && each.hello->rank == rank;
            });
            if (!came) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
        }
        std::string message =
            fmt::format("rank 0 {} waiting at {} for ranks {}", happened, rendezvous_.address, missing);
        if (num_without_secret_ > 0)
            message += fmt::format("; {} that came had another CROSSDOCK_SECRET", num_without_secret_);
        message += acceptor_.trouble();
        for (const Client& each : clients_) {
            if (each.hello) refuse(each, *each.hello, ncclRemoteError, message);
        }
        fail(ncclRemoteError, "{}", message);
    }

    JoinedRanks reply_to_all() {
        // Choose this rank's address as another host sees it, if there is one.
        const Client* seen_by = nullptr;
        for (const Client& each : clients_) {
            if (!each.hello) continue;
            if (seen_by == nullptr || each.hello->info.address.host != own_.address.host) seen_by = &each;
        }
        JoinedRanks joined{seen_by == nullptr ? Listener(nullptr) : make_listener(rendezvous_, seen_by->socket),
                           std::vector<RankInfo>(rendezvous_.num_ranks)};
        joined.ranks[0] = own_;
        joined.ranks[0].address = joined.listener.address();
        joined.ranks[0].address.host = own_.address.host;
        for (const Client& each : clients_) {
            if (each.hello) joined.ranks[each.hello->rank] = each.hello->info;
        }
        for (const Client& each : clients_) {
            if (!each.hello) continue;
            Reply reply = {};
            reply.magic = kRendezvousMagic;
            reply.code = ncclSuccess;
            reply.num_ranks = rendezvous_.num_ranks;
            reply.proof = proof_of(secret_, reply, joined.ranks, each.hello->nonce);
            const uint64_t deadline_ns = cpu::steady_now_ns() + kReplyNs;
            // A rank that does not receive it is reported as missing by meet().
            if (send_all(each.socket, std::as_bytes(std::span(&reply, 1)), deadline_ns))
                send_all(each.socket, std::as_bytes(std::span(joined.ranks)), deadline_ns);
        }
        return joined;
    }

    const Rendezvous& rendezvous_;
    Secret secret_;
    RankInfo own_;
    Socket socket_;
    Acceptor acceptor_;
    std::vector<Client> clients_;
    uint64_t num_without_secret_ = 0;
};

}  // namespace

JoinedRanks join_as_first(const Rendezvous& rendezvous, const RankInfo& own) { return First(rendezvous, own).run(); }

}  // namespace crossdock::network
