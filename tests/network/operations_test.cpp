// SPDX-License-Identifier: Apache-2.0
// Puts, signals, gets and flushes between processes: bytes arrive where they should and nowhere else, a signal is seen
// after its bytes, all sizes, host and device memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "fake_device.h"
#include "session.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kSignalFlags = plugin::kFlagOrdered | plugin::kFlagNeverReset;

struct Kinds {
    int source, target, signals;
};

class Operations : public testing::TestWithParam<Kinds> {};

constexpr int kHost = plugin::kPointerHost;
constexpr int kCuda = plugin::kPointerCuda;
INSTANTIATE_TEST_SUITE_P(Memory, Operations,
                         testing::Values(Kinds{kHost, kHost, kHost}, Kinds{kCuda, kCuda, kCuda},
                                         Kinds{kHost, kCuda, kHost}, Kinds{kCuda, kHost, kCuda}),
                         [](const auto& kinds) {
                             const auto name = [](int kind) { return kind == kHost ? "Host" : "Device"; };
                             return std::string(name(kinds.param.source)) + name(kinds.param.target) +
                                    name(kinds.param.signals);
                         });

std::byte pattern(uint64_t place, int seed) {
    return static_cast<std::byte>((place * 2654435761u + static_cast<uint64_t>(seed) * 97) >> 7);
}

void fill(std::vector<std::byte>& bytes, int seed) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = pattern(i, seed);
}

// A put of any size has landed when its signal arrives, and changes nothing beside its target.
TEST_P(Operations, PutsOfAllSizesArriveBeforeTheirSignals) {
    run_ranks(2, [](TestRank& rank) {
        const std::vector<size_t> sizes = {1, 7, 8, 8, 64, 1000, 4096, 8193, 65537, 1 << 20, (3 << 20) + 5};
        const size_t bytes = (4 << 20);
        std::vector<std::byte> source(bytes), target(bytes);
        std::vector<uint64_t> words(16);
        Session session(rank);
        void* from = session.add_memory(source.data(), bytes, GetParam().source);
        void* to = session.add_memory(target.data(), bytes, GetParam().target);
        void* signals = session.add_memory(words.data(), words.size() * 8, GetParam().signals, kSignalFlags);
        const int peer = 1 - rank.rank();
        uint64_t turn = 0;
        for (const size_t size : sizes) {
            ++turn;
            fill(source, rank.rank() + static_cast<int>(turn));
            std::fill(target.begin(), target.end(), std::byte{0xee});
            rank.barrier();
            const uint64_t offset = 100 + 4 * turn;  // 8 bytes to an aligned word and to another one
            session.finish(session.put_signal(peer, from, 3, size, to, offset, signals, 8, 1, turn % 2 == 0));
            session.await_word(words[1], turn);
            for (size_t i = 0; i < bytes; ++i) {
                const bool inside = i >= offset && i < offset + size;
                const std::byte wanted =
                    inside ? pattern(i - offset + 3, peer + static_cast<int>(turn)) : std::byte{0xee};
                if (target[i] == wanted) continue;
                rank.fail("byte " + std::to_string(i) + " of a put of " + std::to_string(size) + " is wrong");
                break;
            }
            rank.barrier();
        }
        session.remove_memory(from);
        session.remove_memory(to);
        session.remove_memory(signals);
    });
}

// A strong signal is seen after all earlier puts of its context, whatever their sizes.
TEST_P(Operations, StrongSignalsComeLast) {
    run_ranks(3, [](TestRank& rank) {
        const size_t part = 700'000;
        const int count = 6;
        const size_t bytes = part * count * 3;
        std::vector<std::byte> source(bytes), target(bytes);
        std::vector<uint64_t> words(8);
        Session session(rank, 2);
        void* from = session.add_memory(source.data(), bytes, GetParam().source);
        void* to = session.add_memory(target.data(), bytes, GetParam().target);
        void* signals = session.add_memory(words.data(), words.size() * 8, GetParam().signals, kSignalFlags);
        for (uint64_t round = 1; round <= 5; ++round) {
            fill(source, static_cast<int>(round));
            rank.barrier();
            std::vector<void*> requests;
            for (int peer = 0; peer < 3; ++peer) {
                for (int i = 0; i < count; ++i) {
                    const size_t size = i % 2 == 0 ? part : 16;  // small ones overtake large ones
                    const uint64_t offset = (static_cast<size_t>(rank.rank()) * count + static_cast<size_t>(i)) * part;
                    requests.push_back(session.put(peer, from, offset, size, to, offset, 1));
                }
                requests.push_back(session.signal(peer, signals, static_cast<uint64_t>(rank.rank()) * 8, 1, true, 1));
            }
            for (int peer = 0; peer < 3; ++peer) {
                session.await_word(words[static_cast<size_t>(peer)], round);
                for (int i = 0; i < count; ++i) {
                    const size_t size = i % 2 == 0 ? part : 16;
                    const size_t offset = (static_cast<size_t>(peer) * count + static_cast<size_t>(i)) * part;
                    const bool same = std::memcmp(&target[offset], &source[offset], size) == 0;
                    rank.expect(same, "put " + std::to_string(i) + " was not there when the strong signal was");
                }
            }
            for (void* request : requests) session.finish(request);
            rank.barrier();
        }
    });
}

TEST_P(Operations, GetsBringBytes) {
    run_ranks(2, [](TestRank& rank) {
        const size_t bytes = 3 << 20;
        std::vector<std::byte> remote(bytes), local(bytes);
        fill(remote, rank.rank());
        Session session(rank);
        void* there = session.add_memory(remote.data(), bytes, GetParam().source);
        void* here = session.add_memory(local.data(), bytes, GetParam().target);
        rank.barrier();
        for (int peer = 0; peer < 2; ++peer) {
            for (const size_t size : {size_t{1}, size_t{8}, size_t{5000}, size_t{2'500'000}}) {
                std::fill(local.begin(), local.end(), std::byte{0});
                void* get = session.get(peer, there, 77, size, here, 11);
                void* flush = session.flush(peer);
                session.finish(flush);
                rank.expect(local[11] == pattern(77, peer) && local[10 + size] == pattern(76 + size, peer),
                            "a flush ended before the get before it");
                session.finish(get);
                for (size_t i = 0; i < size; ++i) {
                    if (local[i + 11] == pattern(i + 77, peer)) continue;
                    rank.fail("byte " + std::to_string(i) + " of a get of " + std::to_string(size) + " is wrong");
                    break;
                }
                rank.expect(local[10] == std::byte{0} && local[11 + size] == std::byte{0}, "a get wrote beside");
            }
        }
        rank.barrier();
    });
}

// A rank that only receives need not call progress(): bytes and signals still arrive.
TEST(OperationsIdle, TheReceiverNeedNotCallProgress) {
    run_ranks(2, [](TestRank& rank) {
        std::vector<uint64_t> words(8);
        Session session(rank);
        void* signals = session.add_memory(words.data(), 64, kHost, kSignalFlags);
        if (rank.rank() == 0) {
            session.finish(session.signal(1, signals, 0, 5));
        } else {
            const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
            while (std::atomic_ref(words[0]).load() < 5 && std::chrono::steady_clock::now() < end) {
            }
            rank.expect(words[0] == 5, "a signal did not come by itself");
        }
        rank.barrier();
    });
}

// Version 13 of the table: the same, all signals strong.
TEST(OperationsVersion13, WorksAsVersion14) {
    run_ranks(2, [](TestRank& rank) {
        std::vector<uint64_t> words(8);
        std::vector<std::byte> data(1 << 20);
        Session session(rank);  // whose comm serves both tables
        plugin::Config13 config{4, 4, 1, 32, -1};
        void* contexts = nullptr;
        plugin::DeviceHandle* device = nullptr;
        rank.expect(ncclRmaPlugin_v13.create_context(session.comm(), &config, &contexts, &device) == ncclSuccess &&
                        device != nullptr && device->needs_progress == 1,
                    "createContext of version 13");
        void* memory = nullptr;
        void* device_memory = nullptr;
        void* signals = nullptr;
        rank.expect(ncclRmaPlugin_v13.register_memory(session.comm(), data.data(), data.size(), kHost, 0, &memory,
                                                      &device_memory) == ncclSuccess &&
                        memory == device_memory,
                    "regMrSym of version 13");
        ncclRmaPlugin_v13.register_memory(session.comm(), words.data(), 64, kHost, 1, &signals, nullptr);
        const auto peer = static_cast<uint32_t>(1 - rank.rank());
        fill(data, rank.rank());
        void* request = nullptr;
        rank.barrier();
        const ncclResult_t result = ncclRmaPlugin_v13.put_signal(contexts, 0, 0, memory, 1000, 500'000, memory, peer,
                                                                 16, signals, 9, plugin::kSignalIncrement, &request);
        rank.expect(result == ncclSuccess, "iputSignal of version 13");
        session.await_word(words[2], 1);
        rank.expect(words[2] == 1, "an increment adds 1, whatever the value");
        rank.expect(data[500'000] == pattern(0, static_cast<int>(peer)), "the bytes were not there");
        session.finish(request);
        rank.barrier();
        ncclRmaPlugin_v13.destroy_context(contexts);
    });
}

// Adding to a word of device memory reads it, unless only signals write it: then the plugin knows its value.
TEST(OperationsSign, WordsThatOnlySignalsWriteAreReadOnce) {
    run_ranks(2, [](TestRank& rank) {
        const int peer = 1 - rank.rank();
        std::vector<uint64_t> words(16);
        std::vector<uint64_t> values = {0, 0x0123456789abcdef, 0};
        Session session(rank);
        void* memory = session.add_memory(words.data(), words.size() * 8, kCuda);
        void* from = session.add_memory(values.data(), values.size() * 8, kHost);
        const auto set = [](uint64_t& word, uint64_t value) { std::atomic_ref(word).store(value); };
        const auto add_one = [&](uint64_t number, uint64_t sum) {
            rank.barrier();
            session.finish(session.signal(peer, memory, number * 8, 1));
            session.await_word(words[number], sum);
            rank.expect(words[number] == sum, "word " + std::to_string(number) + " is " +
                                                  std::to_string(words[number]) + ", not " + std::to_string(sum));
            rank.barrier();
        };
        add_one(2, 1);
        set(words[2], 100);
        add_one(2, 101);
        rank.expect(crossdockRmaPluginSignalWords(&words[2], 3 * 8) == 1, "the words were not found");
        rank.expect(crossdockRmaPluginSignalWords(values.data(), 8) == 0, "these are no words of device memory");
        rank.expect(crossdockRmaPluginSignalWords(&words[15], 16) == 0, "these words end behind the memory");
        add_one(2, 102);
        add_one(2, 103);
        set(words[2], 7);  // breaks the promise
        add_one(2, 104);
        for (const uint64_t number : {1, 5}) {  // beside the words
            set(words[number], 50);
            add_one(number, 51);
        }
        add_one(4, 1);

        // Many at once, with a word that is put between them.
        rank.barrier();
        for (int i = 0; i < 20; ++i) {
            for (const uint64_t number : {1, 2, 3})
                session.finish(session.put_signal(peer, from, 8, 8, memory, 8 * 8, memory, number * 8, 1, true));
        }
        session.await_word(words[1], 71);
        session.await_word(words[2], 124);
        session.await_word(words[3], 20);
        rank.expect(words[8] == values[1], "the word that was put is wrong");
        rank.barrier();
        session.remove_memory(memory);
        rank.expect(crossdockRmaPluginSignalWords(&words[2], 8) == 0, "the memory is no longer registered");
    });
}

TEST(OperationsSign, ContextsAreCounted) {
    run_ranks(1, [](TestRank& rank) {
        rank.expect(crossdockRmaPluginContexts() == 0, "there are contexts before the first");
        {
            Session session(rank);
            rank.expect(crossdockRmaPluginContexts() == 1, "a block of contexts was not counted");
        }
        rank.expect(crossdockRmaPluginContexts() == 0, "a destroyed one is still counted");
        char message[16];
        void* comm = nullptr;
        rank.expect(ncclRmaPlugin_v14.connect(nullptr, nullptr, 2, 7, nullptr, &comm) == ncclInvalidArgument,
                    "rank 7 of 2");
        crossdockRmaPluginLastError(message, sizeof(message));
        rank.expect(std::string(message) == "rank 7 of 2 ran", std::string("the last error is: ") + message);
    });
}

}  // namespace
}  // namespace crossdock::network
