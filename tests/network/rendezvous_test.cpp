// SPDX-License-Identifier: Apache-2.0
// Ranks that know rank 0's address find each other in any order; unauthenticated connections are closed, and missing or
// contradicting ranks are named.
#include "network/rendezvous.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <optional>
#include <thread>

#include "core/error.h"
#include "flood.h"
#include "network/rendezvous_messages.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;

std::string free_address() {
    // Below the kernel's ephemeral port range.
    static int next = getpid() * 61;
    for (;;) {
        const auto port = static_cast<uint16_t>(10'000 + ++next % 20'000);
        try {
            const std::string address = fmt::format("127.0.0.1:{}", port);
            listen_at(address);
            return address;
        } catch (const Error&) {
            // Taken.
        }
    }
}

struct Outcome {
    std::vector<RankInfo> ranks;
    std::string message;  // of a failure
    std::optional<JoinedRanks> joined = std::nullopt;
};

std::future<Outcome> start(const Rendezvous& rendezvous) {
    return std::async(std::launch::async, [rendezvous] {
        RankInfo info = {};
        info.process = 100 + rendezvous.rank;
        std::strcpy(info.host_name, "here");
        Outcome outcome;
        try {
            outcome.joined = join_ranks(rendezvous, info);
            outcome.ranks = outcome.joined->ranks;
        } catch (const Error& error) {
            outcome.message = error.what();
        }
        return outcome;
    });
}

Rendezvous meeting(const std::string& address, uint32_t rank, uint32_t num_ranks, uint64_t timeout_ns = 100 * kSecond) {
    return {address, "secret", rank, num_ranks, timeout_ns, ""};
}

void expect_words(const std::string& message, std::initializer_list<const char*> words) {
    for (const char* word : words) EXPECT_NE(message.find(word), std::string::npos) << "'" << message << "'";
}

void expect_all(const Outcome& outcome, size_t num_ranks) {
    EXPECT_EQ(outcome.message, "");
    ASSERT_EQ(outcome.ranks.size(), num_ranks);
    for (size_t rank = 0; rank < num_ranks; ++rank)
        EXPECT_EQ(outcome.ranks[rank].process, static_cast<int64_t>(100 + rank));
}

TEST(Rendezvous, EachRankReceivesTheInfoOfAll) {
    for (const uint32_t first : {0u, 3u}) {
        const std::string address = free_address();
        std::vector<std::future<Outcome>> ranks;
        // Rank 0 first, or last.
        for (uint32_t i = 0; i < 4; ++i) ranks.push_back(start(meeting(address, first == 0 ? i : 3 - i, 4)));
        for (auto& rank : ranks) expect_all(rank.get(), 4);
    }
    expect_all(start(meeting(free_address(), 0, 1)).get(), 1);
}

TEST(Rendezvous, NamesMissingRanks) {
    const std::string address = free_address();
    auto first = start(meeting(address, 0, 4, 2 * kSecond));
    auto second = start(meeting(address, 2, 4));
    expect_words(first.get().message, {"rank 0 timed out after 2000 ms", "for ranks 1, 3"});
    // The ranks that have joined are told, too.
    expect_words(second.get().message, {"rank 2", "for ranks 1, 3"});
    expect_words(start(meeting(free_address(), 1, 2, kSecond)).get().message,
                 {"rank 1 timed out after 1000 ms waiting for rank 0 at 127.0.0.1:", "refused"});
}

// Rank 0 says so, too, when it has timed out waiting for that rank.
TEST(Rendezvous, ARefusalIsNamedWhereARankIsMissing) {
    const std::string address = free_address();
    auto first = start(meeting(address, 0, 2, kSecond));
    expect_words(start(meeting(address, 1, 3)).get().message, {"rank 1 was refused"});
    expect_words(first.get().message, {"for ranks 1", "a rank was refused: num_ranks is 3 there, 2 on rank 0"});
}

TEST(Rendezvous, ContradictionsAreNamed) {
    const std::string address = free_address();
    auto first = start(meeting(address, 0, 3));
    auto second = start(meeting(address, 1, 3));
    Rendezvous wrong = meeting(address, 2, 4);
    expect_words(start(wrong).get().message, {"rank 2 was refused", "num_ranks is 4 there, 3 on rank 0"});
    // Of two processes that say that they are rank 1, one is.
    auto twin = start(meeting(address, 1, 3));
    const auto is_over = [](std::future<Outcome>& future) {
        return future.wait_for(std::chrono::milliseconds(1)) == std::future_status::ready;
    };
    while (!is_over(second) && !is_over(twin)) {
    }
    std::future<Outcome>& refused = is_over(second) ? second : twin;
    expect_words(refused.get().message, {"rank 1 is taken by process 101 of host here"});
    expect_all(start(meeting(address, 2, 3)).get(), 3);
    expect_all(first.get(), 3);
    expect_all((&refused == &second ? twin : second).get(), 3);
}

// Other processes that know the port can neither block nor join.
TEST(Rendezvous, ClosesUnauthenticatedConnections) {
    const std::string address = free_address();
    auto first = start(meeting(address, 0, 2));
    std::vector<Socket> connections;
    for (int i = 0; i < 80; ++i) {
        Socket socket;
        for (int attempt = 0; attempt < 20'000; ++attempt) {
            socket = start_connect(resolve(address).front());
            usleep(2000);
            if (connect_error(socket) == 0) break;
        }
        const std::vector<char> rubbish(static_cast<size_t>(i) * 37, static_cast<char>(i));
        if (!rubbish.empty()) send(socket.fd(), rubbish.data(), rubbish.size(), MSG_NOSIGNAL);
        connections.push_back(std::move(socket));
    }
    expect_all(start(meeting(address, 1, 2)).get(), 2);
    expect_all(first.get(), 2);
}

// A child that is forked while rank 0 waits, and lives on, keeps its port from no later rank 0.
TEST(Rendezvous, AForkedChildKeepsNoPort) {
    const std::string address = free_address();
    const std::string port = to_string(resolve(address).front());
    auto first = start(meeting(address, 0, 2));
    while (std::ranges::count(listening_ports(), port) == 0) std::this_thread::yield();
    const int has_forked = eventfd(0, EFD_CLOEXEC);
    const pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        eventfd_write(has_forked, 1);
        for (;;) pause();
    }
    eventfd_t count = 0;
    EXPECT_EQ(eventfd_read(has_forked, &count), 0);
    close(has_forked);
    expect_all(start(meeting(address, 1, 2)).get(), 2);
    expect_all(first.get(), 2);
    EXPECT_NO_THROW(listen_at(address));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
}

// Several hundred connections that are opened again whenever they are closed keep no rank out.
TEST(Rendezvous, RanksJoinDuringAFlood) {
    const std::string address = free_address();
    auto first = start(meeting(address, 0, 2));
    Flood flood(resolve(address).front(), 400);
    EXPECT_TRUE(flood.await_closed(1));  // all places are taken
    expect_all(start(meeting(address, 1, 2)).get(), 2);
    expect_all(first.get(), 2);
}

// Without the secret neither side is trusted: ranks retry, and report it at their timeout.
TEST(Rendezvous, TheSecretIsNeeded) {
    const std::string address = free_address();
    auto first = start(meeting(address, 0, 2, 4 * kSecond));
    Rendezvous wrong = meeting(address, 1, 2, 2 * kSecond);
    wrong.secret = "another";
    expect_words(start(wrong).get().message,
                 {"rank 1 timed out after 2000 ms waiting for rank 0", "CROSSDOCK_SECRET differs"});
    expect_words(first.get().message, {"for ranks 1", "another CROSSDOCK_SECRET"});
}

// A process that listens at rank 0's address before rank 0 does cannot fail a rank.
TEST(Rendezvous, OnlyRankZeroRefuses) {
    const std::string address = free_address();
    auto other = start(meeting(address, 1, 2));
    {
        const Socket rogue = listen_at(address);
        for (int visit = 0; visit < 3; ++visit) {
            pollfd caller{rogue.fd(), POLLIN, 0};
            ASSERT_EQ(poll(&caller, 1, 20'000), 1);
            const Socket socket(accept(rogue.fd(), nullptr, nullptr));
            const uint64_t deadline_ns = UINT64_MAX;
            Opening opening;
            ASSERT_TRUE(receive_all(socket, std::as_writable_bytes(std::span(&opening, 1)), deadline_ns));
            Opening answer = {visit == 0 ? kOtherSecretMagic : kRendezvousMagic, {}};
            if (visit == 2) answer.message = opening.message;
            ASSERT_TRUE(send_all(socket, object_bytes(answer), deadline_ns));
            Reply reply = {};
            reply.verdict = Verdict::kContradicts;
            std::strcpy(reply.text, "forged");
            send_all(socket, object_bytes(reply), deadline_ns);
        }
    }
    auto first = start(meeting(address, 0, 2));
    expect_all(first.get(), 2);
    expect_all(other.get(), 2);
}

// Ranks of another job are turned away, and join their own rank 0 when it comes.
TEST(Rendezvous, JobsDoNotMix) {
    const std::string address = free_address();
    const auto of_job = [&](const char* job, uint32_t rank, uint64_t timeout_ns = 20 * kSecond) {
        Rendezvous rendezvous = meeting(address, rank, 2, timeout_ns);
        rendezvous.job = job;
        return rendezvous;
    };
    auto first = start(of_job("B\n", 0, 3 * kSecond));
    expect_words(start(of_job("A", 1, kSecond)).get().message,
                 {"rank 1 timed out after 1000 ms waiting for rank 0", "process 100 of host here, is of job 'B?'",
                  "this rank of job 'A'"});
    auto other = start(of_job("A", 1));
    expect_words(first.get().message, {"for ranks 1", "that came were of other jobs than 'B?'"});
    auto own_first = start(of_job("A", 0));
    expect_all(own_first.get(), 2);
    expect_all(other.get(), 2);
}

// A port in use: by whom is part of the message.
TEST(Rendezvous, NamesTheProcessThatUsesTheAddress) {
    const std::string address = free_address();
    const Socket taken = listen_at(address);
    char name[17] = {};
    prctl(PR_GET_NAME, name);
    expect_words(start(meeting(address, 0, 2)).get().message,
                 {"cannot listen at 127.0.0.1:", "Address already in use",
                  fmt::format("process {} (", getpid()).c_str(), ") listens there"});
}

// Whoever starts first, the rank that never starts is named, by rank 0 and by those that it has met.
TEST(Rendezvous, TheRankThatNeverStartsIsNamed) {
    for (const bool rank_0_is_last : {false, true}) {
        const std::string address = free_address();
        std::future<Outcome> first;
        if (!rank_0_is_last) first = start(meeting(address, 0, 4, 4 * kSecond));
        std::vector<std::future<Outcome>> others;
        for (const uint32_t rank : {1u, 3u}) others.push_back(start(meeting(address, rank, 4, 3 * kSecond)));
        if (rank_0_is_last) {
            std::this_thread::sleep_for(std::chrono::milliseconds(500));
            first = start(meeting(address, 0, 4, 4 * kSecond));
        }
        for (auto& other : others) {
            expect_words(other.get().message, {"timed out after 3000 ms: rank 0 at 127.0.0.1:", "waits for ranks 2"});
        }
        expect_words(first.get().message, {"for ranks 2; ranks 1, 3 had come and gave up"});
    }
}

// A rank that joined and ended can be replaced by another process, and the missing rank is the one that is named.
TEST(Rendezvous, ARankThatEndedCanBeReplaced) {
    const std::string address = free_address();
    auto first = start(meeting(address, 0, 3));
    auto second = start(meeting(address, 1, 3, 3 * kSecond));
    expect_words(start(meeting(address, 2, 4)).get().message, {"num_ranks"});  // rank 0 is there
    expect_words(second.get().message, {"rank 1 timed out after 3000 ms"});
    second = start(meeting(address, 1, 3));
    expect_all(start(meeting(address, 2, 3)).get(), 3);
    expect_all(first.get(), 3);
    expect_all(second.get(), 3);
}

// A rank that comes, and ends before the others have.
void come_and_end(const std::string& address, uint32_t rank, uint32_t num_ranks) {
    const Rendezvous rendezvous = meeting(address, rank, num_ranks);
    for (;;) {
        const Socket socket = start_connect(resolve(address).front());
        pollfd writable{socket.fd(), POLLOUT, 0};
        if (poll(&writable, 1, 5000) != 1 || connect_error(socket) != 0) continue;
        NoiseSession session = make_session(rendezvous, true);
        Opening answer = {};
        ASSERT_TRUE(send_all(socket, object_bytes(make_opening(session)), UINT64_MAX));
        ASSERT_TRUE(receive_all(socket, std::as_writable_bytes(std::span(&answer, 1)), UINT64_MAX));
        ASSERT_TRUE(session.read(answer.message));
        Hello hello = {};
        hello.rank = rank;
        hello.num_ranks = num_ranks;
        hello.time_left_ms = UINT64_MAX;
        ASSERT_TRUE(send_all(socket, session.seal(object_bytes(hello)), UINT64_MAX));
        return;
    }
}

// A rank that gives up because another one has ended is not named with it.
TEST(Rendezvous, TheRankThatEndedIsNamed) {
    const std::string address = free_address();
    auto first = start(meeting(address, 0, 4, 5 * kSecond));
    come_and_end(address, 3, 4);
    auto second = start(meeting(address, 1, 4, 3 * kSecond));
    auto third = start(meeting(address, 2, 4, 4 * kSecond));
    expect_words(second.get().message, {"waits for ranks 3, which had come and left"});
    expect_words(third.get().message, {"waits for ranks 3, which had come and left; ranks 1 had come and gave up"});
    expect_words(first.get().message, {"for ranks 3, which had come and left; ranks 1, 2 had come and gave up"});
}

// The message with which a rank that has joined fails to meet the others.
std::string fail_to_meet(const JoinedRanks& joined, uint32_t rank) {
    std::vector<RankAddress> addresses;
    for (const RankInfo& info : joined.ranks) addresses.push_back(info.address);
    try {
        meet(joined.listener, addresses, rank, {}, 100 * kSecond);
    } catch (const Error& error) {
        return error.what();
    }
    return "it met all";
}

// Rank 0 ends when it has replied to some ranks only. The others begin anew, and those that meet name rank 0, not them.
// At another time the last rank ends: rank 0, which has seen it, tells ranks that cannot know it.
TEST(Rendezvous, ARankThatEndsBeforeItMeetsIsNamed) {
    for (const uint32_t ended : {0u, 3u}) {
        const std::string address = free_address();
        std::vector<std::future<Outcome>> ranks;
        for (uint32_t rank = 0; rank < 4; ++rank) ranks.push_back(start(meeting(address, rank, 4)));
        std::vector<Outcome> outcomes;
        for (auto& rank : ranks) outcomes.push_back(rank.get());
        for (auto& outcome : outcomes) {
            ASSERT_EQ(outcome.message, "");
            // Different hosts, where a port that is closed proves nothing.
            for (uint32_t rank = 0; ended == 3 && rank < 4; ++rank) outcome.joined->ranks[rank].address.host = rank;
        }
        outcomes[3].joined.reset();
        if (ended == 0) outcomes[0].joined.reset();
        std::vector<std::future<std::string>> messages;
        for (uint32_t rank = ended == 0 ? 1 : 0; rank < 3; ++rank) {
            messages.push_back(std::async(std::launch::async, fail_to_meet, std::cref(*outcomes[rank].joined), rank));
        }
        for (auto& message : messages) {
            const std::string text = message.get();
            EXPECT_NE(text.find(fmt::format(" lost rank {} (", ended)), std::string::npos) << text;
        }
    }
}

struct Ends {
    Lifeline of_0, of_1;
};
Ends make_ends() {
    int sockets[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    const Rendezvous rendezvous = meeting("", 1, 2);
    NoiseSession dials = make_session(rendezvous, true), answers = make_session(rendezvous, false);
    EXPECT_TRUE(answers.read(make_opening(dials).message));
    EXPECT_TRUE(dials.read(make_opening(answers).message));
    return {Lifeline(Socket(sockets[0]), std::move(answers), 1), Lifeline(Socket(sockets[1]), std::move(dials), 0)};
}

// What ranks say on the connections of the rendezvous arrives; anything else only shows that the peer is gone.
TEST(Rendezvous, OnlyThePeerSaysWhoIsLost) {
    for (const uint32_t lost : {3u, UINT32_MAX}) {
        Ends ends = make_ends();
        EXPECT_EQ(ends.of_0.hear(), std::nullopt);
        ends.of_1.say(lost);
        EXPECT_EQ(ends.of_0.hear(), lost);
        EXPECT_EQ(ends.of_0.fd(), -1);
    }
    std::optional<Ends> ended = make_ends();
    Lifeline alone = std::move(ended->of_0);
    ended.reset();
    EXPECT_EQ(alone.hear(), 1);
    // A stranger's bytes.
    Ends ends = make_ends();
    const std::vector<std::byte> bytes(NoiseSession::sealed_bytes(sizeof(uint32_t)), std::byte{3});
    EXPECT_EQ(send(ends.of_1.fd(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    EXPECT_EQ(ends.of_0.hear(), 1);
}

// Rank 0 listens on the interface that its address names.
TEST(Rendezvous, RankZeroListensWhereItsAddressSays) {
    const std::string port = free_address().substr(std::strlen("127.0.0.1"));
    for (const char* host : {"localhost", "127.0.0.1", "127.0.0.3"}) {
        const Socket socket = listen_at(host + port);
        EXPECT_TRUE(is_loopback(local_endpoint(socket))) << host << ": " << to_string(local_endpoint(socket));
        EXPECT_EQ(listening_ports().size(), 1u);
    }
    const Endpoint own = own_address(nullptr);
    if (!is_loopback(own) && own.family == AF_INET) {
        const std::string text = to_string(own);
        const Endpoint bound = local_endpoint(listen_at(text.substr(0, text.find(' ')) + port));
        EXPECT_EQ(std::memcmp(bound.ip, own.ip, sizeof(own.ip)), 0) << to_string(bound);
    }
    // No address of this host: a name that stands for several, or one behind a translation of addresses.
    constexpr uint8_t kEverywhere[16] = {};
    const Endpoint bound = local_endpoint(listen_at("192.0.2.1" + port));
    EXPECT_EQ(std::memcmp(bound.ip, kEverywhere, sizeof(kEverywhere)), 0) << to_string(bound);
}

// Ranks that meet at localhost are reached there alone.
TEST(Rendezvous, RanksAtLocalhostListenThere) {
    const std::string address = "localhost" + free_address().substr(std::strlen("127.0.0.1"));
    auto second = start(meeting(address, 1, 2));
    const Outcome first = start(meeting(address, 0, 2)).get();
    expect_all(second.get(), 2);
    for (const RankInfo& info : first.ranks)
        EXPECT_TRUE(is_loopback(info.address.endpoint)) << to_string(info.address.endpoint);
}

TEST(Rendezvous, AddressesAreChecked) {
    for (const char* address :
         {"", "host", "host:", ":5", "host:0", "host:65536", "host:5x", "no.such.host.invalid:5"}) {
        EXPECT_THROW(resolve(address), Error) << address;
    }
    EXPECT_EQ(to_string(resolve("127.0.0.1:5").front()), "127.0.0.1 port 5");
    EXPECT_EQ(to_string(resolve("[::1]:5").front()), "::1 port 5");
}

}  // namespace
}  // namespace crossdock::network
