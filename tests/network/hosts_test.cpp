// SPDX-License-Identifier: Apache-2.0
// Two hosts, as two network namespaces connected by a cable: ranks use the network only, and a cut cable is detected.
// Needs root and iproute2; skips without them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "session.h"

namespace crossdock::network {
namespace {

enum Flag : int { kApart = 10, kCable = 12, kCut = 13 };

bool run(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

// True if this machine allows network namespaces; tried in another process.
bool can_make_hosts() {
    return geteuid() == 0 && run("unshare --net --ipc --mount sh -c "
                                 "'mount -t sysfs none /sys && ip link add crossdock0 type veth peer name crossdock1'");
}

// Makes this rank a host: its own network and shared memory, and one end of the cable.
void become_host(TestRank& rank) {
    // UCX finds devices in /sys, which shows those of the network namespace in which it was mounted.
    const bool is_apart = unshare(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWNS) == 0 &&
                          mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                          mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0;
    if (!is_apart) throw std::runtime_error("no namespaces");
    rank.raise(kApart + rank.rank());
    if (rank.rank() == 0) {
        rank.await(kApart + 1);
        const std::string other = std::to_string(rank.process_of(1));
        if (!run("ip link add crossdock0 type veth peer name crossdock1 netns " + other))
            throw std::runtime_error("no cable");
        rank.raise(kCable);
    }
    rank.await(kCable);
    const std::string name = "crossdock" + std::to_string(rank.rank());
    const bool is_up = run("ip addr add 10.77.0." + std::to_string(rank.rank() + 1) + "/24 dev " + name) &&
                       run("ip link set " + name + " up") && run("ip link set lo up");
    if (!is_up) throw std::runtime_error("no address");
    rank.barrier();
    // The kernel needs a moment until both ends are up, and UCX ignores interfaces that are not.
    const std::string is_running = "grep -q up /sys/class/net/" + name + "/operstate";
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!run(is_running) && std::chrono::steady_clock::now() < end) {
    }
    rank.barrier();
}

// Bytes and signals cross between hosts that only the network connects.
TEST(Hosts, ReachEachOther) {
    if (!can_make_hosts()) GTEST_SKIP() << "no root, or no network namespaces, or no iproute2";
    run_ranks(2, [](TestRank& rank) {
        become_host(rank);
        const size_t bytes = 5 << 20;
        std::vector<std::byte> source(bytes, static_cast<std::byte>(rank.rank() + 1)), target(bytes);
        std::vector<uint64_t> words(8);
        Session session(rank);
        void* from = session.add_memory(source.data(), bytes);
        void* to = session.add_memory(target.data(), bytes, plugin::kPointerCuda);
        void* signals = session.add_memory(words.data(), 64, plugin::kPointerCuda, 3);
        const int peer = 1 - rank.rank();
        session.finish(session.put_signal(peer, from, 0, bytes, to, 0, signals, 8, 1, true));
        session.await_word(words[1], 1);
        for (const std::byte each : target) rank.expect(each == static_cast<std::byte>(peer + 1), "wrong bytes");
        rank.barrier();
    });
}

// With a cut cable nothing reports that the peer is gone. The timeout names it.
TEST(Hosts, ACutCableIsNamed) {
    if (!can_make_hosts()) GTEST_SKIP() << "no root, or no network namespaces, or no iproute2";
    run_ranks(2, [](TestRank& rank) {
        setenv("CROSSDOCK_NETWORK_TIMEOUT_MS", "3000", 1);
        become_host(rank);
        std::vector<std::byte> bytes(8 << 20);
        Session session(rank);
        void* memory = session.add_memory(bytes.data(), bytes.size());
        rank.barrier();
        const int peer = 1 - rank.rank();
        session.finish(session.put(peer, memory, 0, 1000, memory, 0));
        rank.barrier();
        if (rank.rank() == 0) {
            rank.expect(run("ip link set crossdock0 down"), "the cable cannot be cut");
            rank.raise(kCut);
        }
        rank.await(kCut);
        const auto begin = std::chrono::steady_clock::now();
        bool failed = false;
        std::vector<void*> requests;
        while (!failed && std::chrono::steady_clock::now() < begin + std::chrono::seconds(60)) {
            try {
                if (requests.size() < 8) requests.push_back(session.put(peer, memory, 0, bytes.size(), memory, 0));
                session.progress();
            } catch (const std::exception&) {
                failed = true;
            }
        }
        void* request = nullptr;
        const ncclResult_t result = session.table().put(session.contexts(), 0, 0, nullptr, 0, 0, nullptr, 0, &request);
        const std::string name = "rank " + std::to_string(peer);
        expect_refused(rank, result, ncclRemoteError, {name.c_str()});
    });
}

// If /dev/shm is too small, the message says how much is needed and what to do.
TEST(Hosts, SmallSharedMemoryIsNamed) {
    if (!can_make_hosts()) GTEST_SKIP() << "no root, or no network namespaces, or no iproute2";
    // Ranks of one host must share /dev/shm, so their parent makes it small.
    run_ranks(1, [](TestRank& parent) {
        const bool is_small = unshare(CLONE_NEWNS) == 0 &&
                              mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                              mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=2m") == 0;
        if (!is_small) throw std::runtime_error("no namespaces");
        run_ranks(2, [](TestRank& rank) {
            std::string message;
            try {
                Session session(rank);
            } catch (const std::exception& error) {
                message = error.what();
            }
            for (const char* words : {"/dev/shm has ", "of 2 MiB free", "each rank of a host needs 8", "--shm-size"})
                rank.expect(message.find(words) != std::string::npos, "it said: " + message);
        });
        parent.expect(!testing::Test::HasFailure(), "a rank did not name the small memory");
    });
}

}  // namespace
}  // namespace crossdock::network
