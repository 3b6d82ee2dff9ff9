// SPDX-License-Identifier: Apache-2.0
// Two hosts, as two network namespaces connected by a cable: ranks use the network only, and a cut cable is detected.
// Needs root and iproute2; skips without them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "network/mesh.h"
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

// Ranks of a host need no room in /dev/shm, and need not write there. As in containers, each may have its own.
TEST(Hosts, SharedMemoryNeedsNoFileSystem) {
    if (!can_make_hosts()) GTEST_SKIP() << "no root, or no network namespaces, or no iproute2";
    for (const bool is_read_only : {false, true}) {
        run_ranks(kMaxTestRanks, [&](TestRank& rank) {
            const bool is_small = unshare(CLONE_NEWNS) == 0 &&
                                  mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                                  mount("tmpfs", "/dev/shm", "tmpfs", is_read_only ? MS_RDONLY : 0, "size=64k") == 0;
            if (!is_small) throw std::runtime_error("no namespaces");
            const std::array<uint64_t, 16> host{host_identity()};
            for (const auto& each : rank.exchange(host.data()))
                rank.expect(std::memcmp(each.data(), host.data(), sizeof(host)) == 0, "it counts as another host");
            std::vector<std::byte> source(100'000, static_cast<std::byte>(rank.rank())), target(source.size());
            std::vector<uint64_t> words(8);
            Session session(rank);
            void* from = session.add_memory(source.data(), source.size());
            void* to = session.add_memory(target.data(), target.size());
            void* signals = session.add_memory(words.data(), 64);
            const int next = (rank.rank() + 1) % rank.num_ranks();
            const int before = (rank.rank() + rank.num_ranks() - 1) % rank.num_ranks();
            void* put = session.put_signal(next, from, 0, source.size(), to, 0, signals, 0, 1, true);
            session.await_word(words[0], 1);
            rank.expect(target == std::vector(target.size(), static_cast<std::byte>(before)), "other bytes came");
            session.finish(put);
            rank.barrier();
        });
    }
}

// Both ranks put a signal into each other.
void exchange_signals(TestRank& rank, Session& session) {
    std::vector<uint64_t> words(8);
    void* memory = session.add_memory(words.data(), 64);
    session.finish(session.put_signal(1 - rank.rank(), memory, 0, 0, memory, 0, memory, 8, 1, true));
    session.await_word(words[1], 1);
    rank.barrier();
}

// Sockets carry the frames of a rank that can offer no memory, which warns of it.
TEST(Hosts, MemoryForFramesIsOptional) {
    run_ranks(2, [](TestRank& rank) {
        int ends[2];
        if (pipe2(ends, O_NONBLOCK) != 0) throw std::runtime_error("no pipe");
        if (rank.rank() == 1) {
            // The limit is one of files, which may take what this process prints, too.
            dup2(ends[1], STDERR_FILENO);
            const rlimit page{4096, 4096};
            setrlimit(RLIMIT_FSIZE, &page);
        }
        Session session(rank);
        exchange_signals(rank, session);
        if (rank.rank() == 0) return;
        std::string warning(4096, '\0');
        warning.resize(static_cast<size_t>(std::max<ssize_t>(read(ends[0], warning.data(), warning.size()), 0)));
        for (const char* words : {"so sockets carry frames", "ulimit -f"})
            rank.expect(warning.find(words) != std::string::npos, warning);
    });
}

// A rank that runs out of descriptors while ranks connect says so, at whichever step it does.
TEST(Hosts, FewDescriptorsAreNamed) {
    run_ranks(2, [](TestRank& rank) {
        int num_good = 0;
        for (rlim_t more = 0; more < 12; ++more) {
            const Listener listener("=lo");
            char handle[128] = {};
            std::memcpy(handle, &listener.address(), sizeof(RankAddress));
            std::vector<RankAddress> addresses;
            for (auto& each : rank.exchange(handle)) addresses.push_back(read_address(each.data()));
            const int first = dup(0);  // the lowest that is free
            close(first);
            rlimit all = {};
            getrlimit(RLIMIT_NOFILE, &all);
            const rlimit few{static_cast<rlim_t>(first) + more, all.rlim_max};
            if (rank.rank() == 1) setrlimit(RLIMIT_NOFILE, &few);
            std::string message;
            try {
                const Mesh mesh(listener, addresses, static_cast<uint32_t>(rank.rank()),
                                {300'000'000, 20'000'000'000, nullptr});
                ++num_good;
            } catch (const std::exception& error) {
                message = error.what();
            }
            setrlimit(RLIMIT_NOFILE, &all);
            const bool is_named =
                message.find("Too many open files") != message.npos || message.find("ulimit -n") != message.npos;
            rank.expect(message.empty() || rank.rank() == 0 || is_named, "it said: " + message);
            rank.barrier();
        }
        rank.expect(num_good > 0 && num_good < 12, std::to_string(num_good) + " attempts were good");
    });
}

}  // namespace
}  // namespace crossdock::network
