// SPDX-License-Identifier: Apache-2.0
// Ranks that share a file of memory: threads that gather through memory, as the ranks of GPUs do through NCCL.
#include "fabric/shared_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "core/error.h"

namespace crossdock {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr size_t kBytes = 100'000;

class FileMemory final : public SymmetricMemory {
  public:
    FileMemory(cpu::Mapping file, size_t piece_bytes, int rank) : file_(std::move(file)) {
        peers = {file_.data(), piece_bytes};
        local = peers.at(static_cast<uint32_t>(rank), 0);
        bytes = kBytes;
    }

  private:
    cpu::Mapping file_;
};

class Ranks {
  public:
    // Called with each gather's messages, all ranks' in order, and the gather's number, 0 or 1.
    std::function<void(int gather, std::byte* all, size_t bytes)> tamper;
    // Of a rank: throws instead of using the file.
    std::function<void(int rank)> before_use;
    int unwilling = -1;
    size_t bytes = kBytes;
    // Of each rank.
    std::vector<SharedHostMemory> shared = std::vector<SharedHostMemory>(kRanks);
    std::vector<std::string> errors = std::vector<std::string>(kRanks);

    void run() {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back([this, rank] { share(rank); });
        for (std::thread& thread : threads) thread.join();
    }

    void expect_none(const std::string& words_of_rank_0, const std::string& words_of_others) const {
        for (int rank = 0; rank < kRanks; ++rank) {
            const SharedHostMemory& own = shared[static_cast<size_t>(rank)];
            EXPECT_EQ(own.memory, nullptr) << rank;
            EXPECT_THAT(own.problem, HasSubstr(rank == 0 ? words_of_rank_0 : words_of_others)) << rank;
        }
    }

  private:
    // What share_file leaves behind on purpose, for LeakSanitizer.
    static std::vector<const void*>& never_freed() {
        static auto* memory = new std::vector<const void*>;
        return *memory;
    }

    void share(int rank) {
        int gathers = 0;
        const auto gather = [&](const void* own, void* all, size_t size) {
            {
                const std::lock_guard lock(mutex_);
                messages_.resize(size * kRanks);
                std::memcpy(messages_.data() + size * static_cast<size_t>(rank), own, size);
            }
            meeting_.arrive_and_wait();
            if (rank == 0 && tamper) tamper(gathers, messages_.data(), size);
            meeting_.arrive_and_wait();
            std::memcpy(all, messages_.data(), size * kRanks);
            meeting_.arrive_and_wait();
            ++gathers;
        };
        const auto use = [&](cpu::Mapping file, size_t piece_bytes) {
            if (before_use) before_use(rank);
            auto memory = std::make_unique<FileMemory>(std::move(file), piece_bytes, rank);
            const std::lock_guard lock(mutex_);
            never_freed().push_back(memory.get());
            return memory;
        };
        const auto index = static_cast<size_t>(rank);
        try {
            shared[index] = share_file(rank, kRanks, bytes, rank != unwilling, use, gather);
        } catch (const Error& error) {
            errors[index] = error.what();
        }
    }

    std::mutex mutex_;
    std::barrier<> meeting_{kRanks};
    std::vector<std::byte> messages_;
};

TEST(SharedFile, HasAZeroedPieceOfEachRank) {
    Ranks ranks;
    ranks.run();
    for (const SharedHostMemory& own : ranks.shared) ASSERT_NE(own.memory, nullptr) << own.problem;
    for (uint32_t owner = 0; owner < kRanks; ++owner) {
        std::byte* const piece = ranks.shared[owner].memory->local;
        EXPECT_TRUE(std::all_of(piece, piece + kBytes, [](std::byte byte) { return byte == std::byte{0}; }));
        std::memset(piece, static_cast<int>(owner + 1), kBytes);
    }
    for (const SharedHostMemory& own : ranks.shared) {
        for (uint32_t owner = 0; owner < kRanks; ++owner) {
            const std::byte* const piece = own.memory->peers.at(owner, 0);
            EXPECT_EQ(piece[0], std::byte(owner + 1));
            EXPECT_EQ(piece[kBytes - 1], std::byte(owner + 1));
        }
    }
}

TEST(SharedFile, OneRankThatDoesNotWantItDecides) {
    for (const int unwilling : {0, 2}) {
        Ranks ranks;
        ranks.unwilling = unwilling;
        ranks.run();
        const std::string words = fmt::format("rank {} does not want it (CROSSDOCK_HOST_MEMORY", unwilling);
        ranks.expect_none(words, words);
    }
}

TEST(SharedFile, MustFitIntoTheMachine) {
    Ranks ranks;
    ranks.bytes = size_t{1} << 50;
    ranks.run();
    ranks.expect_none("bytes of the host's memory are needed, and this machine or container has",
                      "rank 0 could not make the file");
}

TEST(SharedFile, NoRankHasItIfOneCannotUseIt) {
    Ranks ranks;
    ranks.before_use = [](int rank) { require(rank != 0, ncclUnhandledCudaError, "cudaHostRegister failed"); };
    ranks.run();
    ranks.expect_none("cudaHostRegister failed", "rank 0 could not map the file of rank 0");
}

// On another host, the process and descriptor of rank 0 may be another communicator's.
TEST(SharedFile, IsKnownByItsName) {
    Ranks ranks;
    ranks.tamper = [](int gather, std::byte* all, size_t) {
        constexpr size_t kNameAt = 3 * sizeof(uint64_t);  // of rank 0's message
        if (gather == 0) all[kNameAt] ^= std::byte{1};
    };
    ranks.run();
    ranks.expect_none("of this host is not that of rank 0", "of this host is not that of rank 0");
}

TEST(SharedFile, RanksThatAreOutOfStepNotice) {
    for (const int step : {0, 1}) {
        Ranks ranks;
        ranks.tamper = [step](int gather, std::byte* all, size_t bytes) {
            if (gather == step) all[bytes] = std::byte{9};  // rank 1's step
        };
        ranks.run();
        for (int rank = 0; rank < kRanks; ++rank) {
            EXPECT_THAT(ranks.errors[static_cast<size_t>(rank)], HasSubstr("is in another step of sharing")) << rank;
        }
    }
}

}  // namespace
}  // namespace crossdock
