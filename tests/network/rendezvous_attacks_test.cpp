// SPDX-License-Identifier: Apache-2.0
// Who stands between ranks and rank 0, or listens in its place, can keep ranks apart and nothing else.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "core/error.h"
#include "network/greeting.h"
#include "network/rendezvous_messages.h"
#include "ranks.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;

std::vector<std::byte> text_bytes(const std::string& text) {
    const auto bytes = std::as_bytes(std::span(text));
    return {bytes.begin(), bytes.end()};
}

bool contains(ByteSpan bytes, ByteSpan part) {
    return std::search(bytes.begin(), bytes.end(), part.begin(), part.end()) != bytes.end();
}

std::string port() {
    static int next = getpid() * 61;
    for (;;) {
        const std::string number = std::to_string(10'000 + ++next % 20'000);
        try {
            listen_at("127.0.0.1:" + number);
            return number;
        } catch (const Error&) {
            // Taken.
        }
    }
}

struct Outcome {
    std::vector<RankInfo> ranks;
    std::string message;
    ncclResult_t code = ncclSuccess;
};

std::future<Outcome> start(const Rendezvous& rendezvous) {
    return std::async(std::launch::async, [rendezvous] {
        RankInfo info = {};
        info.process = 100 + rendezvous.rank;
        std::strcpy(info.host_name, "this-is-the-host");
        Outcome outcome;
        try {
            outcome.ranks = join_ranks(rendezvous, info).ranks;
        } catch (const Error& error) {
            outcome.message = error.what();
            outcome.code = error.code();
        }
        return outcome;
    });
}

Rendezvous meeting(const std::string& address, uint32_t rank, uint64_t timeout_ns = 20 * kSecond) {
    return {address, "the secret of this job", rank, 2, timeout_ns, ""};
}

// Accepts on `from` and passes all bytes on to `to`, which it records and may change.
class Relay {
  public:
    // number: of the byte in its direction and connection.
    using Change = std::function<std::byte(bool is_to_rank_0, size_t number, std::byte byte)>;

    Relay(const std::string& from, const std::string& to, Change change = {})
        : listening_(listen_at(from)),
          to_(resolve(to).front()),
          change_(std::move(change)),
          thread_([this] { run(); }) {}
    ~Relay() {
        ends_ = true;
        thread_.join();
    }
    std::vector<std::byte> recorded(bool is_to_rank_0) {
        const std::lock_guard lock(mutex_);
        return recorded_[is_to_rank_0];
    }

  private:
    struct Pair {
        Socket ends[2];  // the rank's, and that to rank 0
        size_t passed[2] = {0, 0};
    };

    void run() {
        std::vector<Pair> pairs;
        while (!ends_) {
            std::vector<pollfd> polls{{listening_.fd(), POLLIN, 0}};
            for (const Pair& pair : pairs) {
                for (const Socket& end : pair.ends) polls.push_back({end.fd(), POLLIN, 0});
            }
            poll(polls.data(), polls.size(), 5);
            for (size_t i = 0; i < pairs.size(); ++i) {
                for (const int from : {0, 1}) {
                    if (polls[1 + 2 * i + static_cast<size_t>(from)].revents != 0) pass(pairs[i], from);
                }
            }
            std::erase_if(pairs, [](const Pair& pair) { return !pair.ends[0].is_open(); });
            if (polls[0].revents == 0) continue;
            Pair pair;
            pair.ends[0] = Socket(accept4(listening_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
            pair.ends[1] = start_connect(to_);
            pollfd writable{pair.ends[1].fd(), POLLOUT, 0};
            poll(&writable, 1, 1000);
            pairs.push_back(std::move(pair));
        }
    }

    void pass(Pair& pair, int from) {
        if (!pair.ends[0].is_open()) return;
        std::byte bytes[4096];
        const ssize_t got = recv(pair.ends[from].fd(), bytes, sizeof(bytes), 0);
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) {
            for (Socket& end : pair.ends) end.close();
            return;
        }
        for (ssize_t i = 0; i < got; ++i) {
            if (change_) bytes[i] = change_(from == 0, pair.passed[from], bytes[i]);
            ++pair.passed[from];
        }
        {
            const std::lock_guard lock(mutex_);
            auto& recorded = recorded_[from == 0];
            recorded.insert(recorded.end(), bytes, bytes + got);
        }
        // Who has what was sent may ask for the recording.
        (void)!send(pair.ends[1 - from].fd(), bytes, static_cast<size_t>(got), MSG_NOSIGNAL);
    }

    Socket listening_;
    Endpoint to_;
    Change change_;
    std::mutex mutex_;
    std::map<bool, std::vector<std::byte>> recorded_;
    std::atomic<bool> ends_{false};
    std::thread thread_;
};

// A relay reads nothing, and what it has recorded opens no door: not as rank 1, not as rank 0, not on a link.
TEST(RendezvousAttacks, ARelayLearnsNothing) {
    const std::string number = port();
    Relay relay("127.0.0.2:" + number, "127.0.0.1:" + number);
    auto first = start(meeting("127.0.0.1:" + number, 0));
    const Outcome second = start(meeting("127.0.0.2:" + number, 1)).get();
    ASSERT_EQ(second.message, "");
    const Outcome joined = first.get();
    ASSERT_EQ(joined.ranks.size(), 2u);
    for (const bool is_to_rank_0 : {true, false}) {
        const auto wire = relay.recorded(is_to_rank_0);
        ASSERT_GT(wire.size(), sizeof(Reply) * (is_to_rank_0 ? 0 : 1));
        for (const char* word : {"the secret", "this-is-the-host"}) EXPECT_FALSE(contains(wire, text_bytes(word)));
        EXPECT_FALSE(contains(wire, secret_of("the secret of this job")));
        for (const RankInfo& info : joined.ranks) {
            EXPECT_FALSE(contains(wire, info.address.key));
            EXPECT_FALSE(contains(wire, object_bytes(info.address.local)));
        }
    }
    // Even with the addresses of all ranks, which it has not seen, it can be neither of them.
    std::vector<RankAddress> addresses;
    for (const RankInfo& info : joined.ranks) addresses.push_back(info.address);
    const Listener own("=lo", "the secret of this job");
    Greeting as_first(own.identity(), addresses, 0, 1, {});
    const Listener other("=lo", "the secret of this job");
    std::vector<RankAddress> of_ranks = {addresses[0], other.address()};
    Greeting real(other.identity(), of_ranks, 1, std::nullopt, {});
    EXPECT_NE(real.take(as_first.take_output()), nullptr);
}

// What ranks sent to rank 0 and back, played to a later rendezvous of the same secret.
TEST(RendezvousAttacks, RecordingsAreWorthNothing) {
    const std::string number = port();
    std::vector<std::byte> to_rank_0, to_rank_1;
    {
        Relay relay("127.0.0.2:" + number, "127.0.0.1:" + number);
        auto first = start(meeting("127.0.0.1:" + number, 0));
        EXPECT_EQ(start(meeting("127.0.0.2:" + number, 1)).get().message, "");
        EXPECT_EQ(first.get().message, "");
        to_rank_0 = relay.recorded(true);
        to_rank_1 = relay.recorded(false);
    }
    auto first = start(meeting("127.0.0.1:" + number, 0, 2 * kSecond));
    for (int attempt = 0; attempt < 200; ++attempt) {
        const Socket socket = start_connect(resolve("127.0.0.1:" + number).front());
        usleep(5000);
        if (connect_error(socket) != 0) continue;
        EXPECT_TRUE(send_all(socket, to_rank_0, UINT64_MAX));
        Opening answer;
        std::byte next;
        EXPECT_TRUE(receive_all(socket, std::as_writable_bytes(std::span(&answer, 1)), UINT64_MAX));
        EXPECT_FALSE(receive_all(socket, std::span(&next, 1), UINT64_MAX));
        break;
    }
    EXPECT_NE(first.get().message.find("for ranks 1"), std::string::npos);

    auto second = start(meeting("127.0.0.1:" + number, 1, kSecond));
    const Socket rogue = listen_at("127.0.0.1:" + number);
    pollfd caller{rogue.fd(), POLLIN, 0};
    ASSERT_EQ(poll(&caller, 1, 20'000), 1);
    const Socket socket(accept(rogue.fd(), nullptr, nullptr));
    EXPECT_TRUE(send_all(socket, to_rank_1, UINT64_MAX));
    EXPECT_EQ(second.get().code, ncclRemoteError);
}

// A relay that changes any one byte keeps the ranks apart, or is not noticed because nothing reads that byte any more.
TEST(RendezvousAttacks, ARelayThatChangesBytesOnlyCuts) {
    const std::string number = port();
    const size_t to_rank_0 = sizeof(Opening) + NoiseSession::sealed_bytes(sizeof(Hello));
    const size_t to_rank_1 =
        sizeof(Opening) + NoiseSession::sealed_bytes(sizeof(Reply)) + NoiseSession::sealed_bytes(2 * sizeof(RankInfo));
    std::atomic<size_t> changed = 0;
    std::atomic<bool> changes_to_rank_0 = true;
    Relay relay("127.0.0.2:" + number, "127.0.0.1:" + number, [&](bool is_to_rank_0, size_t at, std::byte byte) {
        return is_to_rank_0 == changes_to_rank_0 && at == changed ? byte ^ std::byte{16} : byte;
    });
    for (const bool direction : {true, false}) {
        changes_to_rank_0 = direction;
        const size_t bytes = direction ? to_rank_0 : to_rank_1;
        for (size_t at = 0; at < bytes; at += at < 2 * sizeof(Opening) ? 9 : 131) {
            changed = at;
            auto first = start(meeting("127.0.0.1:" + number, 0, kSecond / 5));
            const Outcome second = start(meeting("127.0.0.2:" + number, 1, kSecond / 5)).get();
            EXPECT_EQ(second.ranks.size(), 0u) << "byte " << at << ", to rank 0: " << direction;
            EXPECT_EQ(second.code, ncclRemoteError) << second.message;
            const Outcome alone = first.get();
            EXPECT_TRUE(!direction || alone.ranks.empty()) << at;
        }
    }
}

// A stranger that listens at one of the two addresses of rank 0's name keeps no rank from the other one, and is told
// nothing but random bytes.
TEST(RendezvousAttacks, AStrangerAtOneOfTwoAddresses) {
    if (geteuid() != 0) GTEST_SKIP() << "no root";
    const std::string number = port();
    run_ranks(1, [&](TestRank& rank) {
        const std::string hosts = "/tmp/crossdock-hosts-" + number;
        std::ofstream(hosts) << "127.0.0.1 localhost\n127.0.0.3 two-addresses\n127.0.0.1 two-addresses\n";
        const bool is_apart = unshare(CLONE_NEWNS) == 0 &&
                              mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                              mount(hosts.c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) == 0;
        const bool has_two = is_apart && resolve("two-addresses:" + number).size() == 2;
        unlink(hosts.c_str());
        if (!has_two) return rank.fail("no name with two addresses");
        std::vector<std::byte> heard;
        std::atomic<bool> is_over{false};
        std::atomic<int> num_calls{0};
        const Socket listening = listen_at("127.0.0.3:" + number);
        std::thread stranger([&] {
            // It has another secret, or says what the rank said, or anything.
            for (int turn = 0; !is_over; ++turn) {
                pollfd caller{listening.fd(), POLLIN, 0};
                if (poll(&caller, 1, 10) != 1) continue;
                const Socket socket(accept(listening.fd(), nullptr, nullptr));
                ++num_calls;
                Opening opening = {};
                if (!receive_all(socket, std::as_writable_bytes(std::span(&opening, 1)), UINT64_MAX)) continue;
                const auto said = object_bytes(opening);
                heard.insert(heard.end(), said.begin(), said.end());
                if (turn % 3 == 0) {
                    NoiseSession session({false, object_bytes(kRendezvousMagic), secret_of("a guess")});
                    if (session.read(opening.message)) rank.fail("it read the opening");
                }
                if (turn % 3 == 1) opening.message.fill(std::byte{1});
                send_all(socket, object_bytes(opening), UINT64_MAX);
                std::byte next;
                if (receive_all(socket, std::span(&next, 1), UINT64_MAX)) rank.fail("the rank went on");
            }
        });
        auto second = start(meeting("two-addresses:" + number, 1));
        while (num_calls < 4) std::this_thread::yield();
        auto first = start(meeting("127.0.0.1:" + number, 0));
        rank.expect(second.get().message.empty() && first.get().message.empty(), "the ranks did not meet");
        is_over = true;
        stranger.join();
        rank.expect(!contains(heard, secret_of("the secret of this job")), "it heard the secret");
    });
}

// Plays rank 0, and knows the secret. Replies to the first rank that comes.
Outcome refused_with(Verdict verdict, const std::string& text) {
    const std::string address = "127.0.0.1:" + port();
    const Socket listening = listen_at(address);
    const Rendezvous own = meeting(address, 0);
    auto rank_1 = start(meeting(address, 1, kSecond));
    pollfd caller{listening.fd(), POLLIN, 0};
    EXPECT_EQ(poll(&caller, 1, 20'000), 1);
    {
        const Socket socket(accept(listening.fd(), nullptr, nullptr));
        NoiseSession session = make_session(own, false);
        Opening opening;
        EXPECT_TRUE(receive_all(socket, std::as_writable_bytes(std::span(&opening, 1)), UINT64_MAX));
        EXPECT_TRUE(session.read(opening.message).has_value());
        EXPECT_TRUE(send_all(socket, object_bytes(make_opening(session)), UINT64_MAX));
        std::vector<std::byte> hello(NoiseSession::sealed_bytes(sizeof(Hello)));
        EXPECT_TRUE(receive_all(socket, hello, UINT64_MAX));
        Reply reply = {};
        reply.verdict = verdict;
        std::memset(reply.text, 'x', sizeof(reply.text));  // it need not end
        std::memcpy(reply.text, text.data(), text.size());
        EXPECT_TRUE(send_all(socket, session.seal(object_bytes(reply)), UINT64_MAX));
    }
    // Later attempts find nobody.
    stop_listening(listening);
    return rank_1.get();
}

// Whatever rank 0 says, the message can be printed and the code is a known one.
TEST(RendezvousAttacks, RefusalsArePrintableAndKnown) {
    for (const uint32_t verdict : {0u, 1u, 2u, 3u, 4u, 5u, 6u, 77u, 0xffffffffu}) {
        const Outcome outcome =
            refused_with(static_cast<Verdict>(verdict), "\x1b[31mred\x1b]0;title\x07 \x7f\xc2\x9b\r\n");
        EXPECT_TRUE(outcome.code == ncclRemoteError || outcome.code == ncclInvalidArgument) << verdict;
        EXPECT_FALSE(outcome.message.empty());
        for (const char each : outcome.message) EXPECT_TRUE(each >= ' ' && each <= '~') << verdict << outcome.message;
        const bool is_shown = verdict >= 2 && verdict <= 4;  // after 5 it tries again
        EXPECT_EQ(outcome.message.find("?[31mred") != std::string::npos, is_shown) << outcome.message;
    }
}

}  // namespace
}  // namespace crossdock::network
