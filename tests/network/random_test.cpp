// SPDX-License-Identifier: Apache-2.0
// Random operations against a model: when its signals arrive, a rank's memory holds what the model says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "fake_device.h"
#include "session.h"

namespace crossdock::network {
namespace {

constexpr int kRanks = 3;
constexpr int kContexts = 3;
constexpr uint64_t kPart = 300'000;  // of a source and context, in a target's memory
constexpr int kRounds = 25;

// What a source puts into its part of a target in one round: derived from the seed at both ends.
struct Plan {
    struct Put {
        uint64_t offset, bytes;
        bool has_signal, is_strong;
    };
    std::vector<Put> puts;
    uint64_t weak_signals = 0;

    Plan(uint64_t seed, int source, int target, int context, int round) {
        std::seed_seq all{seed, static_cast<uint64_t>(source), static_cast<uint64_t>(target),
                          static_cast<uint64_t>(context), static_cast<uint64_t>(round)};
        std::mt19937_64 random(all);
        uint64_t offset = 0;
        for (;;) {
            const uint64_t scale = uint64_t{1} << (random() % 18);
            const uint64_t bytes = 1 + random() % scale;
            offset += random() % 50;
            if (offset + bytes > kPart) break;
            const bool has_signal = random() % 3 == 0;
            puts.push_back({offset, bytes, has_signal, random() % 2 == 0});
            weak_signals += has_signal ? 1 : 0;
            offset += bytes;
            if (random() % 20 == 0) break;
        }
    }
};

std::byte pattern(uint64_t place, int source, int round) {
    return static_cast<std::byte>(place * 31 + static_cast<uint64_t>(source) * 7 + static_cast<uint64_t>(round) * 13 +
                                  (place >> 9));
}

class Random : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, Random, testing::Range(1, 5));

TEST_P(Random, OperationsMatchTheModel) {
    run_ranks(kRanks, [](TestRank& rank) {
        const auto seed = static_cast<uint64_t>(GetParam());
        set_fake_device_seed(seed + static_cast<uint64_t>(rank.rank()));
        set_fake_staging_bytes(uint64_t{1} << (20 + seed % 2));
        std::mt19937_64 random(seed * 100 + static_cast<uint64_t>(rank.rank()));
        const auto kind = [&] { return random() % 2 == 0 ? plugin::kPointerHost : plugin::kPointerCuda; };

        const uint64_t bytes = kPart * kRanks * kContexts;
        std::vector<std::byte> source(bytes), target(bytes), model(bytes);
        std::vector<uint64_t> words(2 * kRanks * kContexts);
        Session session(rank, kContexts);
        void* from = session.add_memory(source.data(), bytes, kind());
        void* to = session.add_memory(target.data(), bytes, kind());
        // Every other rank's signals in device memory are written by signals only, so adding to them reads no word.
        const uint64_t flags = rank.rank() % 2 == 0 ? plugin::kFlagOrdered | plugin::kFlagNeverReset : 0;
        void* signals = session.add_memory(words.data(), words.size() * 8, kind(), flags);
        const auto part = [](int source_rank, int context) {
            return (static_cast<uint64_t>(source_rank) * kContexts + static_cast<uint64_t>(context)) * kPart;
        };
        const auto word = [](int source_rank, int context) {
            return 2 * (static_cast<uint64_t>(source_rank) * kContexts + static_cast<uint64_t>(context));
        };
        std::vector<uint64_t> awaited(words.size());

        for (int round = 1; round <= kRounds; ++round) {
            for (uint64_t i = 0; i < bytes; ++i) source[i] = pattern(i, rank.rank(), round);
            rank.barrier();
            std::vector<void*> requests;
            for (int context = 0; context < kContexts; ++context) {
                for (int peer = 0; peer < kRanks; ++peer) {
                    const Plan plan(seed, rank.rank(), peer, context, round);
                    const uint64_t base = part(rank.rank(), context);
                    for (const auto& put : plan.puts) {
                        const uint64_t place = base + put.offset;
                        if (put.has_signal) {
                            requests.push_back(session.put_signal(peer, from, place, put.bytes, to, place, signals,
                                                                  8 * word(rank.rank(), context), 1, put.is_strong,
                                                                  context));
                        } else {
                            requests.push_back(session.put(peer, from, place, put.bytes, to, place, context));
                        }
                        if (random() % 8 == 0) session.progress();
                    }
                    requests.push_back(
                        session.signal(peer, signals, 8 * word(rank.rank(), context) + 8, 1, true, context));
                }
            }
            for (int context = 0; context < kContexts; ++context) {
                for (int peer = 0; peer < kRanks; ++peer) {
                    const Plan plan(seed, peer, rank.rank(), context, round);
                    const uint64_t base = part(peer, context);
                    session.await_word(words[word(peer, context) + 1], static_cast<uint64_t>(round));
                    // The strong signal is last: all earlier signals and bytes have landed.
                    uint64_t& count = awaited[word(peer, context)];
                    count += plan.weak_signals;
                    rank.expect(words[word(peer, context)] == count, "a signal is missing, or there are too many");
                    for (const auto& put : plan.puts) {
                        for (uint64_t i = put.offset; i < put.offset + put.bytes; ++i) {
                            model[base + i] = pattern(base + i, peer, round);
                        }
                    }
                    const auto same = std::memcmp(&target[base], &model[base], kPart) == 0;
                    rank.expect(same, "bytes differ from the model in round " + std::to_string(round));
                }
            }
            for (void* request : requests) session.finish(request);
            rank.barrier();
        }
    });
}

}  // namespace
}  // namespace crossdock::network
