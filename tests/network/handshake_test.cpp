// SPDX-License-Identifier: Apache-2.0
// Ranks connect, whatever unauthenticated connections send: nothing, garbage, or a recording.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/error.h"
#include "flood.h"
#include "network/frame_stream.h"
#include "network/greeting.h"
#include "network/handshake.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kNever = 3600 * kSecond;  // ctest ends the test before

std::vector<std::byte> bytes_of(const char* text) {
    const auto* first = reinterpret_cast<const std::byte*>(text);
    return {first, first + std::strlen(text)};
}

// Ranks of one process, which share memory, or whose addresses say that they are of different networks.
enum class Reach { kLocal, kRemote };
struct Place {
    std::vector<Listener> listeners;
    std::vector<RankAddress> addresses;
    explicit Place(int num_ranks, Reach reach = Reach::kRemote) {
        for (int rank = 0; rank < num_ranks; ++rank) listeners.emplace_back("=lo");
        for (const Listener& listener : listeners) {
            addresses.push_back(listener.address());
            if (reach == Reach::kRemote) addresses.back().network += addresses.size();
        }
    }
    std::vector<Link> meet_as(uint32_t rank, uint64_t timeout_ns = 100 * kSecond) const {
        const auto blob = bytes_of(("I am " + std::to_string(rank)).c_str());
        return meet(listeners[rank], addresses, rank, blob, timeout_ns);
    }
    // The message with which it fails.
    std::string fail_as(uint32_t rank, uint64_t timeout_ns) const {
        try {
            meet_as(rank, timeout_ns);
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ncclRemoteError);
            return error.what();
        }
        return "it met all";
    }
};

// To a port that opens within 20 s.
Socket dial(const RankAddress& address) {
    for (int attempt = 0; attempt < 20'000; ++attempt) {
        Socket socket = start_connect(address.endpoint);
        pollfd writable{socket.fd(), POLLOUT, 0};
        if (poll(&writable, 1, 5000) == 1 && connect_error(socket) == 0) return socket;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ADD_FAILURE() << "nobody listens";
    return Socket();
}

void send_all(const Socket& socket, std::span<const std::byte> bytes) {
    (void)!send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

// At most 20 s for each part.
bool receive_all(const Socket& socket, std::span<std::byte> bytes) {
    while (!bytes.empty()) {
        pollfd readable{socket.fd(), POLLIN, 0};
        if (poll(&readable, 1, 20'000) != 1) return false;
        const ssize_t got = recv(socket.fd(), bytes.data(), bytes.size(), MSG_DONTWAIT);
        if (got <= 0) return false;
        bytes = bytes.subspan(static_cast<size_t>(got));
    }
    return true;
}

// The greeting of rank 0 to rank 1, or rank 1's answer to rank 0.
Greeting greeting_of(const Place& place, uint32_t rank, ByteSpan blob) {
    return Greeting(place.listeners[rank].identity(), place.addresses, rank,
                    rank == 0 ? std::optional<uint32_t>(1) : std::nullopt, blob);
}

// Until all has been said and received, or the other end is refused or leaves: false. recorded: what was sent.
bool greet(const Socket& socket, Greeting& greeting, std::vector<std::byte>* recorded = nullptr) {
    for (;;) {
        const std::vector<std::byte> out = greeting.take_output();
        send_all(socket, out);
        if (recorded != nullptr) recorded->insert(recorded->end(), out.begin(), out.end());
        if (greeting.is_done()) return true;
        std::vector<std::byte> in(greeting.wanted());
        if (!receive_all(socket, in) || greeting.take(in) != nullptr) return false;
    }
}

Socket accept_on(const Socket& listening) {
    for (pollfd caller{listening.fd(), POLLIN, 0}; poll(&caller, 1, 20'000) == 1;) {
        if (Socket socket(accept(listening.fd(), nullptr, nullptr)); socket.is_open()) return socket;
    }
    ADD_FAILURE() << "nobody dialled";
    return Socket();
}

// What a rank puts before a frame, or alone.
std::vector<std::byte> record(const char* kind, uint32_t value) {
    std::vector<std::byte> bytes = bytes_of(kind);
    const auto word = std::as_bytes(std::span(&value, 1));
    bytes.insert(bytes.end(), word.begin(), word.end());
    return bytes;
}

// Plays a rank that links with the first one that dials it, sends these bytes and ends.
void play(Place& place, uint32_t rank, std::span<const std::byte> bytes) {
    const Listener& listener = place.listeners[rank];
    const bool is_local = place.addresses[rank].network == place.addresses[0].network;
    if (!is_local) start_to_listen(listener.remote());
    {
        const Socket dialled = accept_on(is_local ? listener.local() : listener.remote());
        Greeting greeting(listener.identity(), place.addresses, rank, std::nullopt, {});
        EXPECT_TRUE(greet(dialled, greeting));
        send_all(dialled, bytes);
    }
    stop_listening(listener.remote());
    stop_listening(listener.local());
}

// All meet; each link carries what its peer said.
void expect_met(const Place& place) {
    std::vector<std::thread> ranks;
    std::vector<std::vector<Link>> all_links(place.addresses.size());  // a link that ends is a rank's end
    for (uint32_t rank = 0; rank < place.addresses.size(); ++rank) {
        ranks.emplace_back([&, rank] {
            const auto& links = all_links[rank] = place.meet_as(rank);
            for (uint32_t peer = 0; peer < links.size(); ++peer) {
                EXPECT_EQ(links[peer].blob, bytes_of(("I am " + std::to_string(peer)).c_str()));
                EXPECT_EQ(links[peer].socket.is_open(), peer != rank);
            }
        });
    }
    for (auto& rank : ranks) rank.join();
}

TEST(Handshake, RanksMeet) {
    for (const Reach reach : {Reach::kLocal, Reach::kRemote}) {
        for (const int num_ranks : {1, 2, 5, 16}) expect_met(Place(num_ranks, reach));
    }
}

TEST(Handshake, ClosesUnauthenticatedConnections) {
    Place place(4);
    // The others' ports are open from here on.
    std::vector<std::thread> ranks;
    std::vector<std::vector<Link>> links(4);
    for (uint32_t rank = 1; rank < 4; ++rank) ranks.emplace_back([&, rank] { links[rank] = place.meet_as(rank); });
    std::mt19937 random(5);
    std::vector<Socket> connections;
    for (int i = 0; i < 100; ++i) {
        connections.push_back(dial(place.addresses[1 + random() % 3]));
        std::vector<std::byte> rubbish(random() % 3000);
        for (auto& each : rubbish) each = static_cast<std::byte>(random());
        switch (i % 4) {
            case 0:
                break;  // says nothing
            case 1:
                send_all(connections.back(), rubbish);
                break;
            case 2:
                send_all(connections.back(), bytes_of("GET / HTTP/1.1\r\n\r\n"));
                break;
            case 3:
                connections.back().close();
                break;
        }
    }
    links[0] = place.meet_as(0);
    for (auto& rank : ranks) rank.join();
}

// Several hundred connections that are opened again whenever they are closed keep no rank out.
TEST(Handshake, RanksConnectDuringAFlood) {
    Place place(2);
    std::thread accepting([&] { place.meet_as(1); });
    {
        Flood flood(place.addresses[1].endpoint, 400);
        EXPECT_TRUE(flood.await_closed(1));  // all places are taken
        EXPECT_EQ(place.meet_as(0)[1].blob, bytes_of("I am 1"));
    }
    accepting.join();
}

// A process that accepts the connection and stays silent is named as the reason.
TEST(Handshake, NamesASilentListener) {
    Place place(2);
    start_to_listen(place.listeners[1].remote());
    EXPECT_NE(place.fail_as(0, 2 * kSecond).find("it says nothing"), std::string::npos);
}

// Of this process.
int64_t processor_ms() {
    rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000 +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000;
}

// Whoever waits for ranks sleeps: one that ranks of other hosts dial, and one whose port stays closed.
TEST(Handshake, WaitingTakesNoProcessor) {
    for (const Reach reach : {Reach::kRemote, Reach::kLocal}) {
        const Place place(2, reach);
        for (const uint32_t rank : {0u, 1u}) {
            const int64_t before_ms = processor_ms();
            place.fail_as(rank, kSecond);
            EXPECT_LE(processor_ms() - before_ms, 500) << "rank " << rank;
        }
    }
}

// A process without free descriptors reports that, and does not spin.
TEST(Handshake, ReportsMissingDescriptors) {
    Place place(2);
    const pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        const Flood flood(place.addresses[1].endpoint, 100);
        for (;;) pause();
    }
    rlimit before = {};
    getrlimit(RLIMIT_NOFILE, &before);
    const int next_fd = dup(0);
    const rlimit few{static_cast<rlim_t>(next_fd) + 10, before.rlim_max};
    close(next_fd);
    setrlimit(RLIMIT_NOFILE, &few);
    std::string message;
    // The child may come late.
    for (int i = 0; i < 50 && message.find("Too many open files") == std::string::npos; ++i) {
        const int64_t before_ms = processor_ms();
        message = place.fail_as(1, 2 * kSecond);
        EXPECT_LE(processor_ms() - before_ms, 1000);
    }
    setrlimit(RLIMIT_NOFILE, &before);
    EXPECT_NE(message.find("Too many open files"), std::string::npos) << message;
    EXPECT_NE(message.find("ulimit -n"), std::string::npos) << message;
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
}

// What a process that listened at a rank's address has recorded, up to the last byte, is worth nothing afterwards.
TEST(Handshake, RecordedGreetingsAreRefused) {
    Place place(2);
    std::vector<std::byte> recorded;
    {
        start_to_listen(place.listeners[1].remote());
        std::thread relayed([&] {
            const Socket dialled = accept_on(place.listeners[1].remote());
            auto answers = greeting_of(place, 1, bytes_of("I am 1"));
            EXPECT_TRUE(greet(dialled, answers));
        });
        const Socket socket = dial(place.addresses[1]);
        auto greeting = greeting_of(place, 0, bytes_of("I am 0"));
        EXPECT_TRUE(greet(socket, greeting, &recorded));
        relayed.join();
    }
    std::thread attacker([&] {
        const Socket socket = dial(place.addresses[1]);
        send_all(socket, recorded);
        std::vector<std::byte> answer(greeting_of(place, 0, {}).wanted());
        EXPECT_TRUE(receive_all(socket, answer));  // to the opening, which alone proves nothing
        std::byte next;
        EXPECT_FALSE(receive_all(socket, std::span(&next, 1)));
    });
    EXPECT_EQ(place.fail_as(1, 3 * kSecond), "rank 1 timed out after 3000 ms connecting to ranks 0");
    attacker.join();
}

// If another process answers at a rank's address, the rank is dialled again.
TEST(Handshake, RanksAreDialledAgain) {
    Place place(2), other(2);
    std::thread rank_0([&] { EXPECT_EQ(place.meet_as(0)[1].blob, bytes_of("I am 1")); });
    start_to_listen(place.listeners[1].remote());
    for (int attempt = 0; attempt < 4; ++attempt) {
        const Socket dialled = accept_on(place.listeners[1].remote());
        auto answers = greeting_of(attempt == 3 ? other : place, 1, {});  // 3: a rank of another communicator
        std::vector<std::byte> hello(answers.wanted());
        ASSERT_TRUE(attempt == 0 || receive_all(dialled, hello));
        if (attempt == 1) send_all(dialled, std::vector<std::byte>(56, std::byte{7}));
        if (attempt == 2) send_all(dialled, hello);  // its own greeting
        EXPECT_TRUE(attempt != 3 || answers.take(hello) != nullptr);
    }
    EXPECT_EQ(place.meet_as(1)[0].blob, bytes_of("I am 0"));
    rank_0.join();
}

// Bytes behind a greeting are left in the socket for the owner of the link.
TEST(Handshake, BytesMayFollowTheGreeting) {
    Place place(2);
    std::thread other([&] {
        start_to_listen(place.listeners[1].remote());
        const Socket dialled = accept_on(place.listeners[1].remote());
        const auto blob = bytes_of("hello");
        auto answers = greeting_of(place, 1, blob);
        std::vector<std::byte> last;
        while (!answers.is_done()) {
            send_all(dialled, answers.take_output());
            std::vector<std::byte> in(answers.wanted());
            ASSERT_TRUE(receive_all(dialled, in));
            ASSERT_EQ(answers.take(in), nullptr);
        }
        auto words = answers.take_output();
        const auto goodbye = bytes_of("goodbye!");
        words.insert(words.end(), goodbye.begin(), goodbye.end());
        send_all(dialled, words);
        char rest[1000];
        while (recv(dialled.fd(), rest, sizeof(rest), 0) > 0) continue;
    });
    {
        const auto links = place.meet_as(0);
        EXPECT_EQ(links[1].blob, bytes_of("hello"));
        char rest[9] = {};
        EXPECT_TRUE(receive_all(links[1].socket, std::as_writable_bytes(std::span(rest, 8))));
        EXPECT_STREQ(rest, "goodbye!");
    }
    other.join();
}

// A rank whose connection broke dials again: its latest one counts.
TEST(Handshake, TheLatestConnectionOfARankCounts) {
    Place place(2);
    std::vector<Link> links;
    std::thread rank_1([&] { links = place.meet_as(1); });
    const Socket first = dial(place.addresses[1]);
    const auto first_blob = bytes_of("first"), second_blob = bytes_of("second");
    auto broken = greeting_of(place, 0, first_blob);
    send_all(first, broken.take_output());
    std::vector<std::byte> answer(broken.wanted());
    EXPECT_TRUE(receive_all(first, answer));
    EXPECT_EQ(broken.take(answer), nullptr);
    const auto letter = broken.take_output();
    send_all(first, std::span(letter).first(letter.size() - 1));
    const Socket second = dial(place.addresses[1]);
    auto greeting = greeting_of(place, 0, second_blob);
    EXPECT_TRUE(greet(second, greeting));
    rank_1.join();
    EXPECT_EQ(links[0].blob, bytes_of("second"));
}

TEST(Handshake, NamesMissingRanks) {
    Place place(3);
    EXPECT_EQ(place.fail_as(2, kSecond), "rank 2 timed out after 1000 ms connecting to ranks 0, 1");
    const std::string where = to_string(place.addresses[2].endpoint);
    EXPECT_EQ(place.fail_as(1, kSecond),
              "rank 1 timed out after 1000 ms connecting to ranks 0, 2; rank 2 (" + where + "): Connection refused");
}

// A rank that ends while ranks meet is named at once, whether it was met already or not.
TEST(Handshake, NamesTheProcessThatEnded) {
    Place gone(2, Reach::kLocal);
    gone.listeners.pop_back();
    EXPECT_NE(gone.fail_as(0, kNever).find("rank 0 lost rank 1 ("), std::string::npos);

    Place place(3);
    std::thread rank_1([&] { play(place, 1, {}); });
    EXPECT_NE(place.fail_as(0, kNever).find("rank 0 lost rank 1 ("), std::string::npos);
    rank_1.join();
}

// A rank that ends is named by all others, also by those that only meet the one that it was linked with.
TEST(Handshake, TheLostRankIsNamedByAll) {
    for (const Reach reach : {Reach::kLocal, Reach::kRemote}) {
        Place place(4, reach);
        std::vector<std::string> messages(3);
        // Rank 0 links with rank 3 while it has nobody else to link with, so that it cannot have met all.
        std::vector<std::thread> ranks;
        const auto start = [&](uint32_t rank) {
            ranks.emplace_back([&, rank] { messages[rank] = place.fail_as(rank, kNever); });
        };
        start(0);
        play(place, 3, {});
        start(1);
        start(2);
        for (auto& rank : ranks) rank.join();
        for (const std::string& message : messages)
            EXPECT_NE(message.find(" lost rank 3 ("), std::string::npos) << message;
        // Those that share memory with rank 3 can also see by themselves that nobody listens.
        for (uint32_t rank = 1; rank < 3 && reach == Reach::kRemote; ++rank)
            EXPECT_NE(messages[rank].find("reported it"), std::string::npos) << messages[rank];
    }
}

// A rank that times out reports the missing one; those that have more time fail at once, and name the same.
TEST(Handshake, TimeoutsAreReported) {
    Place place(3);
    std::thread rank_1([&] { place.fail_as(1, 2 * kSecond); });
    const std::string message = place.fail_as(0, kNever);
    EXPECT_NE(message.find("rank 0 lost rank 2 ("), std::string::npos) << message;
    EXPECT_NE(message.find("rank 1 reported it"), std::string::npos) << message;
    rank_1.join();
}

// A report behind frames is found. One of a rank that cannot be lost counts as the end of the rank that made it.
TEST(Handshake, ReportsAreChecked) {
    const auto named = [](std::initializer_list<std::vector<std::byte>> records) {
        Place place(3);
        std::vector<std::byte> bytes;
        for (const auto& record : records) bytes.insert(bytes.end(), record.begin(), record.end());
        std::thread rank_1([&] { play(place, 1, bytes); });
        const std::string message = place.fail_as(0, 2 * kSecond);
        rank_1.join();
        const size_t found = message.find("lost rank ");
        return found == std::string::npos ? message : message.substr(found, 11);
    };
    std::vector<std::byte> frame = record("fram", 100);
    frame.resize(frame.size() + sizeof(FrameHeader) + 100);
    EXPECT_EQ(named({record("lost", 2)}), "lost rank 2");
    EXPECT_EQ(named({frame, frame, record("lost", 2)}), "lost rank 2");
    EXPECT_EQ(named({record("lost", 0)}), "lost rank 1");
    EXPECT_EQ(named({record("lost", 3)}), "lost rank 1");
    EXPECT_EQ(named({record("lost", kNoRank - 1)}), "lost rank 1");
    // Without one, frames may be all that the rank wanted to say.
    for (const auto& last : {record("lost", kNoRank), record("fram", kNoRank), record("what", 2), record("fram", 2)})
        EXPECT_NE(named({frame, last}).find("connecting to ranks 2"), std::string::npos);
}

// A port is open while ranks of other hosts may dial, on the one address that they know; never between ranks that
// share memory.
TEST(Handshake, PortsAreOpenWhileRanksOfOtherHostsDial) {
    const auto during = [](const Place& place, uint64_t timeout_ns) {
        std::vector<std::string> ports;
        std::atomic<bool> is_over{false};
        std::thread meeting([&] {
            place.fail_as(1, timeout_ns);
            is_over = true;
        });
        while (!is_over && ports.empty()) ports = listening_ports();
        meeting.join();
        return ports;
    };
    const Place local(2, Reach::kLocal);
    EXPECT_EQ(during(local, kSecond / 2), std::vector<std::string>{});
    const Place remote(2);
    EXPECT_EQ(listening_ports(), std::vector<std::string>{});
    EXPECT_EQ(during(remote, 2 * kSecond), std::vector<std::string>{to_string(remote.addresses[1].endpoint)});
    EXPECT_TRUE(is_loopback(remote.addresses[1].endpoint));
    EXPECT_EQ(listening_ports(), std::vector<std::string>{});
}

TEST(Handshake, AddressesAreChecked) {
    char rubbish[128] = "no address";
    EXPECT_THROW(read_address(rubbish), Error);
    Place place(1);
    RankAddress newer = place.addresses[0];
    newer.version = 77;
    std::memcpy(rubbish, &newer, sizeof(newer));
    EXPECT_THROW(read_address(rubbish), Error);
    EXPECT_THROW(own_address("nosuchinterface"), Error);
}

}  // namespace
}  // namespace crossdock::network
