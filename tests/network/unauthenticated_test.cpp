// SPDX-License-Identifier: Apache-2.0
// Unauthenticated connections do not affect a job: while ranks connect, what they send is ignored, and afterwards no
// port is open. The job's results are right.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "flood.h"
#include "network/mesh.h"
#include "session.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;

using Bytes = std::vector<std::byte>;

template <class Value>
void append(Bytes& bytes, const Value& value) {
    const auto* first = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), first, first + sizeof(value));
}

// What UCX's TCP transport accepts from any connection: its magic number, then a put of a word to an address.
Bytes ucx_put(void* address, uint64_t word) {
    Bytes bytes;
    append(bytes, uint64_t{0xcafebabe12345678});
    struct [[gnu::packed]] {
        uint8_t id;
        uint32_t length;
        uint64_t address, bytes;
        uint32_t number;
    } const put = {33, 20, reinterpret_cast<uint64_t>(address), sizeof(word), 0};
    append(bytes, put);
    append(bytes, word);
    return bytes;
}

void say(const Endpoint& endpoint, const Bytes& bytes) {
    Socket socket;
    try {
        socket = start_connect(endpoint);
    } catch (const Error&) {
        return;
    }
    for (int i = 0; i < 50; ++i) {
        if (send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    char answer[64];
    for (int i = 0; i < 20 && recv(socket.fd(), answer, sizeof(answer), MSG_DONTWAIT) != 0; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Both ranks put into each other and compare the result.
void work(TestRank& rank, Mesh& mesh) {
    const uint32_t peer = 1 - mesh.rank();
    mesh.add_contexts(1);
    std::vector<uint64_t> own(40'000, 7 + mesh.rank()), other(40'001);
    Region* source = mesh.register_memory(own.data(), own.size() * 8, MemoryKind::kHost, false, 60 * kSecond);
    Region* target = mesh.register_memory(other.data(), other.size() * 8, MemoryKind::kHost, false, 60 * kSecond);
    Operation* put = mesh.put(0, peer, {source, 0, 320'000}, {target, 0, 320'000}, {target, 320'000, 1, true});
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::atomic_ref(other.back()).load() == 0 && std::chrono::steady_clock::now() < end) mesh.progress();
    for (size_t i = 0; i < own.size(); ++i) rank.expect(other[i] == 7 + peer, "a wrong word came");
    while (!mesh.test(put)) {
    }
    rank.barrier();
}

TEST(Unauthenticated, AreIgnoredWhileRanksConnect) {
    run_ranks(2, [](TestRank& rank) {
        setenv("CROSSDOCK_HOST", std::to_string(rank.rank()).c_str(), 1);
        const Listener listener("=lo");
        char handle[128] = {};
        std::memcpy(handle, &listener.address(), sizeof(RankAddress));
        std::vector<RankAddress> addresses;
        for (auto& each : rank.exchange(handle)) addresses.push_back(read_address(each.data()));
        static uint64_t canary = 0x1234;
        std::atomic<bool> is_over = false;
        std::thread attacker;
        if (rank.rank() == 1) {
            // Rank 0 dials, so this is the rank that listens.
            attacker = std::thread([&] {
                const Endpoint& endpoint = addresses[1].endpoint;
                Flood flood(endpoint, 200);
                std::mt19937 random(5);
                for (int turn = 0; turn < 20 || !is_over; ++turn) {
                    Bytes rubbish(1 + random() % 300);
                    for (std::byte& each : rubbish) each = static_cast<std::byte>(random());
                    say(endpoint, rubbish);
                    say(endpoint, ucx_put(&canary, 0xbad));
                    if (turn == 10) rank.raise(1);
                }
            });
        } else {
            rank.await(1);
        }
        {
            Mesh mesh(listener, addresses, static_cast<uint32_t>(rank.rank()), {60 * kSecond, 60 * kSecond, nullptr});
            rank.expect(listening_ports().empty(), "a port is open after ranks have met");
            is_over = true;
            work(rank, mesh);
        }
        is_over = true;
        if (attacker.joinable()) attacker.join();
        rank.expect(canary == 0x1234, "an unauthenticated connection wrote");
    });
}

// Also if ranks share memory, and with any transports that the user selects.
TEST(Unauthenticated, FindNoOpenPortOfARunningJob) {
    for (const char* transports : {"", "tcp", "tcp,self,posix", "^ib"}) {
        for (const bool plays_hosts : {false, true}) {
            run_ranks(2, [&](TestRank& rank) {
                if (*transports != '\0') setenv("UCX_TLS", transports, 1);
                if (plays_hosts) setenv("CROSSDOCK_HOST", std::to_string(rank.rank()).c_str(), 1);
                std::vector<uint64_t> words(8);
                Session session(rank);
                void* memory = session.add_memory(words.data(), 64);
                rank.expect(listening_ports().empty(), std::string("a port is open with UCX_TLS=") + transports);
                session.finish(session.put_signal(1 - rank.rank(), memory, 0, 0, memory, 0, memory, 8, 1, true));
                session.await_word(words[1], 1);
                rank.barrier();
            });
        }
    }
}

// UCX is not loaded if no transport needs it: the links carry everything.
TEST(Unauthenticated, RanksReachEachOtherWithoutUcx) {
    run_ranks(2, [](TestRank& rank) {
        setenv("UCX_TLS", "tcp", 1);
        std::vector<uint64_t> words(8);
        Session session(rank);
        void* memory = session.add_memory(words.data(), 64);
        session.finish(session.put_signal(1 - rank.rank(), memory, 0, 0, memory, 0, memory, 8, 1, true));
        session.await_word(words[1], 1);
        std::ifstream maps("/proc/self/maps");
        for (std::string line; std::getline(maps, line);)
            rank.expect(line.find("libucp") == std::string::npos, "UCX was opened: " + line);
        rank.barrier();
    });
}

}  // namespace
}  // namespace crossdock::network
