// SPDX-License-Identifier: Apache-2.0
// Memory is registered and deregistered under traffic, communicators coexist, and any of them may end at any time.
#include <gtest/gtest.h>

#include <dirent.h>
#include <chrono>

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "session.h"

namespace crossdock::network {
namespace {

size_t num_descriptors() {
    size_t count = 0;
    DIR* folder = opendir("/proc/self/fd");
    while (readdir(folder) != nullptr) ++count;
    closedir(folder);
    return count;
}

TEST(Registration, MemoryComesAndGoesUnderTraffic) {
    run_ranks(2, [](TestRank& rank) {
        constexpr uint64_t kMostAhead = 20;
        std::vector<std::byte> steady(100'000);
        std::vector<uint64_t> words(8);
        Session session(rank);
        void* memory = session.add_memory(steady.data(), steady.size());
        void* signals = session.add_memory(words.data(), 64, plugin::kPointerCuda, 3);
        const int peer = 1 - rank.rank();
        std::atomic<bool> is_over{false};
        std::atomic<uint64_t> sent{0};
        // NCCL's progress thread, while the application's registers.
        std::thread traffic([&] {
            try {
                while (!is_over) {
                    session.finish(session.put_signal(peer, memory, 0, 30'000, memory, 50'000, signals, 0, 1, true));
                    ++sent;
                    // The device is slow, and copies to it wait in an unbounded queue.
                    while (!is_over && sent > std::atomic_ref(words[0]).load() + kMostAhead) session.progress();
                }
            } catch (const std::exception& error) {
                rank.fail(error.what());
            }
        });
        for (int turn = 0; turn < 20; ++turn) {
            std::vector<std::byte> passing(static_cast<size_t>(1000 + turn));
            const int kind = turn % 2 == 0 ? plugin::kPointerHost : plugin::kPointerCuda;
            void* added = session.add_memory(passing.data(), passing.size(), kind);
            session.finish(session.put_signal(peer, memory, 0, 500, added, 100, signals, 8, 1, true));
            session.await_word(words[1], static_cast<uint64_t>(turn) + 1);
            rank.barrier();
            session.remove_memory(added);
        }
        is_over = true;
        traffic.join();
        rank.barrier();
    });
}

// Bytes for deregistered memory are dropped, and so are signals in it; everything else continues.
TEST(Registration, LatePutsAreDropped) {
    run_ranks(2, [](TestRank& rank) {
        std::vector<std::byte> bytes(200'000);
        std::vector<uint64_t> words(8);
        Session session(rank);
        void* memory = session.add_memory(bytes.data(), bytes.size());
        void* passing = session.add_memory(bytes.data(), bytes.size());
        void* signals = session.add_memory(words.data(), 64);
        if (rank.rank() == 1) session.remove_memory(passing);
        rank.barrier();
        if (rank.rank() == 0) {
            std::memset(bytes.data(), 1, bytes.size());
            for (const size_t size : {size_t{8}, bytes.size()}) {
                session.finish(session.put(1, memory, 0, size, passing, 0));
                session.finish(session.signal(1, passing, 8, 1));
            }
            session.finish(session.signal(1, signals, 0, 1));
        } else {
            session.await_word(words[0], 1);
            for (const std::byte each : bytes) rank.expect(each == std::byte{0}, "a late put wrote");
        }
        rank.barrier();
    });
}

// A kernel's puts may arrive after its group was destroyed: they name memory that this rank has deregistered.
TEST(Registration, PutsFromDeregisteredMemoryAreDropped) {
    run_ranks(2, [](TestRank& rank) {
        std::vector<std::byte> bytes(100'000);
        std::vector<uint64_t> words(8);
        Session session(rank);
        void* memory = session.add_memory(bytes.data(), bytes.size());
        auto passing_bytes = std::make_unique<std::vector<std::byte>>(bytes.size(), std::byte{1});
        void* passing = session.add_memory(passing_bytes->data(), bytes.size());
        void* signals = session.add_memory(words.data(), 64);
        session.remove_memory(passing);
        passing_bytes.reset();
        rank.barrier();
        if (rank.rank() == 0) {
            for (const size_t size : {size_t{8}, bytes.size()}) {
                session.finish(session.put(1, passing, 0, size, memory, 0));
                session.finish(session.put_signal(1, passing, 0, size, memory, 0, signals, 0, 5, true));
                session.finish(session.put_signal(1, memory, 0, size, memory, 0, passing, 0, 5, true));
                session.finish(session.get(1, passing, 0, size, memory, 0));
                session.finish(session.get(1, memory, 0, size, passing, 0));
            }
            session.finish(session.signal(1, passing, 8, 1));
            session.finish(session.signal(1, signals, 0, 1));
        } else {
            session.await_word(words[0], 1);
            rank.expect(words[0] == 1, "a put from memory that is gone signalled");
        }
        rank.barrier();
        for (const std::byte each : bytes) rank.expect(each == std::byte{0}, "a put from memory that is gone wrote");
        rank.barrier();
        // This holds if the peer has left, too.
        if (rank.rank() == 1) session.close();
        rank.barrier();
        if (rank.rank() == 0) {
            const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
            while (std::chrono::steady_clock::now() < end) session.progress();  // its close notice arrives
            session.finish(session.put(1, passing, 0, 8, memory, 0));
            session.finish(session.get(1, memory, 0, 8, passing, 0));
            session.finish(session.signal(1, passing, 8, 1));
        }
        rank.barrier();
    });
}

// Operations that kernels posted before their memory was deregistered are sent, although NCCL's thread posts them
// later.
TEST(Registration, OperationsPostedBeforeTheEndAreSent) {
    run_ranks(2, [](TestRank& rank) {
        constexpr int kPosted = 20;
        Session session(rank);
        std::vector<uint64_t> words(8);
        std::vector<std::byte> bytes(64);
        void* signals = session.add_memory(words.data(), 64);
        void* memory = session.add_memory(bytes.data(), bytes.size());
        if (rank.rank() == 0) {
            std::atomic<bool> is_over = false, is_posted = false, has_begun = false;
            std::thread nccl([&] {
                std::vector<void*> requests;
                for (int left = kPosted; !is_over; has_begun = true) {
                    if (is_posted && left-- > 0)
                        requests.push_back(session.put_signal(1, memory, 0, 8, memory, 0, signals, 0, 1, true));
                    session.progress();
                }
                for (void* request : requests) session.finish(request);
            });
            while (!has_begun) std::this_thread::yield();
            is_posted = true;
            session.remove_memory(memory);
            rank.barrier();
            is_over = true;
            nccl.join();
        } else {
            session.await_word(words[0], kPosted);
            rank.barrier();
            session.remove_memory(memory);
        }
        rank.barrier();
    });
}

// Without contexts no more operations arrive, so destroying a group need not wait.
TEST(Registration, MemoryGoesAtOnceWithoutContexts) {
    run_ranks(2, [](TestRank& rank) {
        Session session(rank);
        std::vector<uint64_t> words(8);
        std::vector<void*> memory;
        for (int i = 0; i < 20; ++i) memory.push_back(session.add_memory(words.data(), 64));
        session.destroy_contexts();
        const auto start = std::chrono::steady_clock::now();
        for (void* each : memory) session.remove_memory(each);
        rank.expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(5), "deregistering waited");
        rank.barrier();
    });
}

TEST(Registration, ManyCommunicatorsAndNothingIsLeft) {
    run_ranks(2, [](TestRank& rank) {
        std::vector<uint64_t> words(64);
        size_t before = 0;
        for (int turn = 0; turn < 6; ++turn) {
            std::vector<std::unique_ptr<Session>> sessions;
            std::vector<void*> signals;
            for (int i = 0; i < 4; ++i) {
                sessions.push_back(std::make_unique<Session>(rank, 1 + i));
                signals.push_back(sessions.back()->add_memory(words.data(), words.size() * 8));
            }
            const int peer = 1 - rank.rank();
            for (size_t i = 0; i < 4; ++i) sessions[i]->finish(sessions[i]->signal(peer, signals[i], 8 * i, 1));
            for (size_t i = 0; i < 4; ++i) sessions[i]->await_word(words[i], static_cast<uint64_t>(turn) + 1);
            rank.barrier();
            sessions.clear();
            if (turn == 0) before = num_descriptors();
        }
        rank.expect(num_descriptors() <= before, "descriptors are left: " + std::to_string(num_descriptors()) +
                                                     ", before " + std::to_string(before));
    });
}

// A communicator may end with pending operations, its own and its peers'.
TEST(Registration, EndsWithWorkUnderWay) {
    run_ranks(3, [](TestRank& rank) {
        std::vector<std::byte> bytes(8 << 20);
        Session session(rank);
        void* host = session.add_memory(bytes.data(), bytes.size());
        void* device = session.add_memory(bytes.data(), bytes.size(), plugin::kPointerCuda);
        rank.barrier();
        for (int peer = 0; peer < 3; ++peer) {
            session.put(peer, host, 0, bytes.size() / 2, host, bytes.size() / 2);
            session.put(peer, device, 0, bytes.size() / 2, device, bytes.size() / 2);
            session.get(peer, host, 0, 1 << 20, host, 1 << 20);
        }
        session.close();
    });
}

}  // namespace
}  // namespace crossdock::network
