// SPDX-License-Identifier: Apache-2.0
// Rank 0's half of the rendezvous: accepts connections, and joins those that authenticate as a rank.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/printable.h"
#include "network/acceptor.h"
#include "network/rendezvous_messages.h"
#include "runtime/cpu/clock.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kReplyNs = 5'000'000'000;

// A rank is told which others are missing before its own time is up.
constexpr uint64_t kMostNoticeMs = 500;

struct Client {
    Socket socket;
    NoiseSession session;
    uint64_t since_ns = 0;
    bool is_open = false;  // the opening has come
    std::vector<std::byte> received;
    std::optional<Hello> hello;       // valid once the rank has joined
    uint64_t leaves_ns = UINT64_MAX;  // when it gives up
};

// Of a rank that may not be here now.
enum class History : uint8_t {
    kNeverCame,
    kCame,
    kGaveUp,  // its time was up
};

class First {
  public:
    First(const Rendezvous& rendezvous, const RankInfo& own)
        : rendezvous_(rendezvous),
          own_(own),
          socket_(listen_at(rendezvous.address)),
          acceptor_(socket_),
          histories_(rendezvous.num_ranks, History::kNeverCame) {}

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
        std::vector<pollfd> polls{{acceptor_.fd(num_unauthenticated(), cpu::steady_now_ns()), POLLIN, 0}};
        for (const Client& each : clients_) polls.push_back({each.socket.fd(), POLLIN, 0});
        if (poll(polls.data(), polls.size(), poll_ms()) < 0 && errno != EINTR) {
            fail(ncclSystemError, "poll failed: {}", std::strerror(errno));
        }
        const uint64_t now = cpu::steady_now_ns();
        const uint64_t timeout_ns = acceptor_.timeout_ns(num_unauthenticated(), now);
        for (size_t i = 0; i < clients_.size(); ++i) {
            Client& each = clients_[i];
            // A connection that has ended when its rank's time was up is one of a rank that gave up.
            const bool keep = !has_no_time(each, now) && (polls[i + 1].revents == 0 || receive(each));
            if (!keep || (!each.hello && now - each.since_ns > timeout_ns)) each.socket.close();
        }
        std::erase_if(clients_, [](const Client& each) { return !each.socket.is_open(); });
        accept_all(now);
    }

    // Until the next rank must be told that its time is up.
    int poll_ms() const {
        constexpr uint64_t kMostMs = 50;
        const uint64_t now = cpu::steady_now_ns();
        uint64_t left_ns = kMostMs * 1'000'000;
        for (const Client& each : clients_) left_ns = std::min(left_ns, each.leaves_ns - std::min(each.leaves_ns, now));
        return static_cast<int>((left_ns + 999'999) / 1'000'000);
    }

    void accept_all(uint64_t now) {
        for (;;) {
            Socket socket = acceptor_.accept(num_unauthenticated(), now);
            if (!socket.is_open()) return;
            clients_.push_back({std::move(socket), make_session(rendezvous_, false), now});
        }
    }

    // Returns false if the client is to be closed. A rank that has joined sends nothing more.
    bool receive(Client& client) {
        std::byte buffer[sizeof(Hello) + kTagBytes];
        static_assert(sizeof(buffer) >= sizeof(Opening));
        const size_t expected = client.is_open ? NoiseSession::sealed_bytes(sizeof(Hello)) : sizeof(Opening);
        const ssize_t got =
            recv(client.socket.fd(), buffer, std::max<size_t>(expected - client.received.size(), 1), MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (got <= 0 || client.hello) return false;
        client.received.insert(client.received.end(), buffer, buffer + got);
        // Other protocols are refused at the first wrong byte.
        const size_t known = std::min(client.received.size(), sizeof(kRendezvousMagic));
        if (!client.is_open && std::memcmp(client.received.data(), &kRendezvousMagic, known) != 0) return false;
        if (client.received.size() < expected) return true;
        const std::vector<std::byte> message = std::exchange(client.received, {});
        return client.is_open ? read_hello(client, message) : read_opening(client, message);
    }

    bool read_opening(Client& client, ByteSpan message) {
        Opening answer = {kOtherSecretMagic, {}};
        client.is_open = client.session.read(message.subspan(sizeof(kRendezvousMagic))).has_value();
        if (client.is_open) answer = make_opening(client.session);
        num_without_secret_ += client.is_open ? 0 : 1;
        // Does not block: the socket's buffer is empty.
        return send_all(client.socket, object_bytes(answer), 0) && client.is_open;
    }

    bool read_hello(Client& client, ByteSpan sealed) {
        const auto opened = client.session.open(sealed);
        if (!opened) return false;
        Hello hello;
        std::memcpy(&hello, opened->data(), sizeof(hello));
        const std::string job = job_of(hello);
        if (job != own_job()) {
            ++num_of_other_jobs_;
            refuse(client, Verdict::kOtherJob,
                   fmt::format("the rank 0 that listens there, process {} of host {}, is of job '{}', this rank of "
                               "job '{}'",
                               own_.process, host_of(own_), own_job(), job));
            return false;
        }
        const std::string objection = why_not(hello);
        if (!objection.empty()) {
            refused_ = objection;
            refuse(client, Verdict::kContradicts, objection);
            return false;
        }
        client.hello = hello;
        histories_[hello.rank] = History::kCame;
        const uint64_t notice_ms = std::min(hello.time_left_ms / 8, kMostNoticeMs);
        if (hello.time_left_ms < UINT64_MAX / 2'000'000)
            client.leaves_ns = cpu::steady_now_ns() + (hello.time_left_ms - notice_ms) * 1'000'000;
        keep_alive(client.socket);  // detects a lost host, whose rank may then join again
        return true;
    }

    // A rank whose own time is up is told why; another process may take its place.
    bool has_no_time(Client& client, uint64_t now) {
        if (!client.hello || now < client.leaves_ns) return false;
        refuse(client, Verdict::kTimeIsUp, fmt::format("rank 0 at {} waits for {}", rendezvous_.address, missing()));
        histories_[client.hello->rank] = History::kGaveUp;
        return true;
    }

    static std::string host_of(const RankInfo& info) { return printable(info.host_name, sizeof(info.host_name)); }
    static std::string job_of(const Hello& hello) { return printable(hello.job, sizeof(hello.job)); }
    std::string own_job() const { return printable(rendezvous_.job.c_str(), sizeof(Hello::job) - 1); }

    std::string why_not(const Hello& hello) const {
        if (hello.num_ranks != rendezvous_.num_ranks)
            return fmt::format("num_ranks is {} there, {} on rank 0", hello.num_ranks, rendezvous_.num_ranks);
        if (hello.rank == 0 || hello.rank >= rendezvous_.num_ranks)
            return fmt::format("rank {} is not from 1 to {}", hello.rank, rendezvous_.num_ranks - 1);
        for (const Client& each : clients_) {
            if (!each.socket.is_open() || !each.hello || each.hello->rank != hello.rank) continue;
            return fmt::format("rank {} is taken by process {} of host {}", hello.rank, each.hello->info.process,
                               host_of(each.hello->info));
        }
        return {};
    }

    static void refuse(Client& client, Verdict verdict, const std::string& reason) {
        Reply reply = {};
        reply.verdict = verdict;
        std::strncpy(reply.text, reason.c_str(), sizeof(reply.text) - 1);
        send_all(client.socket, client.session.seal(object_bytes(reply)), 0);
    }

    // A rank that never came, or has ended, is why others gave up.
    std::string missing() const {
        std::string never_came, ended, gave_up;
        for (uint32_t rank = 1; rank < rendezvous_.num_ranks; ++rank) {
            const bool is_here = std::ranges::any_of(clients_, [rank](const Client& each) {
                return each.socket.is_open() && each.hello && each.hello->rank == rank;
            });
            if (is_here) continue;
            const History history = histories_[rank];
            std::string& list = history == History::kNeverCame ? never_came
                                : history == History::kCame    ? ended
                                                               : gave_up;
            list += fmt::format("{}{}", list.empty() ? "" : ", ", rank);
        }
        std::string text;
        if (never_came.empty()) {
            text = fmt::format("ranks {}, which had come and left", ended.empty() ? gave_up : ended);
            if (ended.empty()) gave_up.clear();
        } else {
            text = fmt::format("ranks {}", never_came);
            if (!ended.empty()) text += fmt::format("; ranks {} had come and left", ended);
        }
        if (!gave_up.empty()) text += fmt::format("; ranks {} had come and gave up", gave_up);
        return text;
    }

    // Tells the ranks that have joined which ranks are missing.
    [[noreturn]] void give_up(const std::string& happened) {
        std::string message = fmt::format("rank 0 {} waiting at {} for {}", happened, rendezvous_.address, missing());
        if (num_without_secret_ > 0)
            message += fmt::format("; {} that came had another CROSSDOCK_SECRET", num_without_secret_);
        if (num_of_other_jobs_ > 0)
            message += fmt::format("; {} that came were of other jobs than '{}'", num_of_other_jobs_, own_job());
        if (!refused_.empty()) message += fmt::format("; a rank was refused: {}", refused_);
        message += acceptor_.trouble();
        for (Client& each : clients_) {
            if (each.hello) refuse(each, Verdict::kGaveUp, message);
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
        JoinedRanks joined{
            seen_by == nullptr ? Listener(nullptr, rendezvous_.secret) : make_listener(rendezvous_, seen_by->socket),
            std::vector<RankInfo>(rendezvous_.num_ranks)};
        joined.ranks[0] = own_;
        joined.ranks[0].address = joined.listener.address();
        joined.ranks[0].address.host = own_.address.host;
        for (const Client& each : clients_) {
            if (each.hello) joined.ranks[each.hello->rank] = each.hello->info;
        }
        for (Client& each : clients_) {
            if (!each.hello) continue;
            Reply reply = {};
            reply.verdict = Verdict::kWelcome;
            reply.num_ranks = rendezvous_.num_ranks;
            const uint64_t deadline_ns = cpu::steady_now_ns() + kReplyNs;
            // A rank that does not receive it is reported as missing by meet().
            if (send_all(each.socket, each.session.seal(object_bytes(reply)), deadline_ns))
                send_all(each.socket, each.session.seal(std::as_bytes(std::span(joined.ranks))), deadline_ns);
            const uint32_t rank = each.hello->rank;
            joined.listener.keep(rank,
                                 std::make_unique<Lifeline>(std::move(each.socket), std::move(each.session), rank));
        }
        return joined;
    }

    const Rendezvous& rendezvous_;
    RankInfo own_;
    Socket socket_;
    Acceptor acceptor_;
    std::vector<Client> clients_;
    std::vector<History> histories_;  // per rank
    uint64_t num_without_secret_ = 0;
    uint64_t num_of_other_jobs_ = 0;
    std::string refused_;  // why the last rank that contradicted was
};

}  // namespace

JoinedRanks join_as_first(const Rendezvous& rendezvous, const RankInfo& own) { return First(rendezvous, own).run(); }

}  // namespace crossdock::network
