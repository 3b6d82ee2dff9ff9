// SPDX-License-Identifier: Apache-2.0
// Ranks meet whatever strangers do: connect and say nothing, send rubbish, pretend to be a rank, come twice.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/error.h"
#include "network/handshake.h"
#include "network/peer_watch.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;

std::vector<std::byte> bytes_of(const char* text) {
    const auto* first = reinterpret_cast<const std::byte*>(text);
    return {first, first + std::strlen(text)};
}

struct Place {
    std::vector<Listener> listeners;
    std::vector<RankAddress> addresses;
    explicit Place(int num_ranks) {
        for (int rank = 0; rank < num_ranks; ++rank) listeners.emplace_back("=lo");
        for (const Listener& listener : listeners) addresses.push_back(listener.address());
    }
};

Socket dial(const RankAddress& address) {
    Socket socket = start_connect(address.endpoint);
    pollfd writable{socket.fd(), POLLOUT, 0};
    poll(&writable, 1, 5000);
    return socket;
}

void send_all(const Socket& socket, std::span<const std::byte> bytes) {
    (void)!send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

// All meet; each link carries what its peer said.
void expect_met(Place& place) {
    std::vector<std::thread> ranks;
    for (uint32_t rank = 0; rank < place.addresses.size(); ++rank) {
        ranks.emplace_back([&, rank] {
            const auto blob = bytes_of(("I am " + std::to_string(rank)).c_str());
            const auto links = meet(place.listeners[rank], place.addresses, rank, blob, 30 * kSecond);
            for (uint32_t peer = 0; peer < links.size(); ++peer) {
                EXPECT_EQ(links[peer].blob, bytes_of(("I am " + std::to_string(peer)).c_str()));
                EXPECT_EQ(links[peer].socket.is_open(), peer != rank);
            }
        });
    }
    for (auto& rank : ranks) rank.join();
}

TEST(Handshake, RanksMeet) {
    for (const int num_ranks : {1, 2, 5, 16}) {
        Place place(num_ranks);
        expect_met(place);
    }
}

TEST(Handshake, StrangersAreTurnedAway) {
    Place place(4);
    std::mt19937 random(5);
    std::vector<Socket> strangers;
    for (int i = 0; i < 100; ++i) {
        strangers.push_back(dial(place.addresses[random() % 4]));
        std::vector<std::byte> rubbish(random() % 3000);
        for (auto& each : rubbish) each = static_cast<std::byte>(random());
        switch (i % 4) {
            case 0:
                break;  // says nothing
            case 1:
                send_all(strangers.back(), rubbish);
                break;
            case 2:
                send_all(strangers.back(), bytes_of("GET / HTTP/1.1\r\n\r\n"));
                break;
            case 3:
                strangers.back().close();
                break;
        }
    }
    expect_met(place);
}

// Who does not know the secret is no rank, and a rank's greeting to another cannot be used again here.
TEST(Handshake, GreetingsNeedTheSecret) {
    Place place(3);
    Place other(3);
    const auto stranger = make_greeting(other.addresses, 0, 1, bytes_of("me"));
    const auto for_another = make_greeting(place.addresses, 0, 2, bytes_of("me"));
    const auto genuine = make_greeting(place.addresses, 0, 1, bytes_of("me"));
    uint32_t source = 9;
    std::span<const std::byte> blob;
    EXPECT_EQ(read_greeting(stranger, place.addresses, 1, source, blob), Greeting::kBad);
    EXPECT_EQ(read_greeting(for_another, place.addresses, 1, source, blob), Greeting::kBad);
    EXPECT_EQ(read_greeting(genuine, place.addresses, 1, source, blob), Greeting::kGood);
    EXPECT_EQ(source, 0u);
    for (size_t length = 0; length < genuine.size(); ++length) {
        EXPECT_EQ(read_greeting(std::span(genuine).first(length), place.addresses, 1, source, blob), Greeting::kMore);
    }
    for (size_t changed = 0; changed < genuine.size(); ++changed) {
        auto wrong = genuine;
        wrong[changed] ^= std::byte{4};
        EXPECT_NE(read_greeting(wrong, place.addresses, 1, source, blob), Greeting::kGood) << changed;
    }
}

// What a rank says behind its greeting is left for whoever has the link.
TEST(Handshake, AGoodbyeMayFollowAtOnce) {
    Place place(2);
    std::thread other([&] {
        Socket dialled;
        for (pollfd caller{place.listeners[1].socket().fd(), POLLIN, 0}; !dialled.is_open(); poll(&caller, 1, 1000))
            dialled = Socket(accept(place.listeners[1].socket().fd(), nullptr, nullptr));
        auto words = make_greeting(place.addresses, 1, 0, bytes_of("hello"));
        const auto goodbye = bytes_of("goodbye!");
        words.insert(words.end(), goodbye.begin(), goodbye.end());
        send_all(dialled, words);
        char rest[1000];
        while (recv(dialled.fd(), rest, sizeof(rest), 0) > 0) continue;
    });
    {
        const auto links = meet(place.listeners[0], place.addresses, 0, bytes_of("me"), 10 * kSecond);
        EXPECT_EQ(links[1].blob, bytes_of("hello"));
        char rest[100] = {};
        pollfd readable{links[1].socket.fd(), POLLIN, 0};
        poll(&readable, 1, 1000);
        EXPECT_EQ(recv(links[1].socket.fd(), rest, sizeof(rest), 0), 8);
        EXPECT_STREQ(rest, "goodbye!");
    }
    other.join();
}

// A second connection of the same rank is refused; the first counts.
TEST(Handshake, NobodyComesTwice) {
    Place place(2);
    const auto genuine = make_greeting(place.addresses, 0, 1, bytes_of("first"));
    const auto again = make_greeting(place.addresses, 0, 1, bytes_of("second"));
    Socket first = dial(place.addresses[1]);
    send_all(first, genuine);
    Socket second = dial(place.addresses[1]);
    send_all(second, again);
    const auto links = meet(place.listeners[1], place.addresses, 1, bytes_of("answer"), 10 * kSecond);
    EXPECT_EQ(links[0].blob, bytes_of("first"));
}

TEST(Handshake, WhoDoesNotComeIsNamed) {
    Place place(3);
    try {
        meet(place.listeners[2], place.addresses, 2, {}, kSecond / 5);
        FAIL() << "it met nobody";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ncclRemoteError);
        EXPECT_STREQ(error.what(), "rank 2 waited 200 ms to be connected with ranks 0, 1");
    }
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

TEST(PeerWatch, TellsWhoLeavesHow) {
    int pairs[3][2];
    std::vector<Link> links(4);
    for (int i = 0; i < 3; ++i) {
        ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pairs[i]), 0);
        links[static_cast<size_t>(i)].socket = Socket(pairs[i][0]);
    }
    Socket others[3] = {Socket(pairs[0][1]), Socket(pairs[1][1]), Socket(pairs[2][1])};
    PeerWatch watch(std::move(links));
    EXPECT_TRUE(watch.poll().empty());
    // A rank that has lost rank 2 says goodbye.
    std::vector<Link> own(1);
    own[0].socket = std::move(others[0]);
    PeerWatch(std::move(own)).say_goodbye(2);
    others[1].close();
    send_all(others[2], bytes_of("?"));
    std::vector<Departure> left = watch.poll();
    ASSERT_EQ(left.size(), 3u);
    for (const Departure& each : left) {
        EXPECT_EQ(each.in_order, each.rank == 0) << each.rank;
        EXPECT_EQ(each.because_of, each.rank == 0 ? 2 : kNoRank) << each.rank;
    }
    EXPECT_TRUE(watch.poll().empty());
}

}  // namespace
}  // namespace crossdock::network
