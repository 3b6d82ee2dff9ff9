// SPDX-License-Identifier: Apache-2.0
// What tests of a rank that writes garbage into another's memory share: whatever it writes, the other one's operations
// end, with an error or right, and nothing outside its tensors is written.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "fabric/cpu/in_process_communicator.h"
#include "fabric/cpu/process_communicator.h"
#include "fabric/cpu/rendezvous.h"
#include "nccl_ep.h"

namespace crossdock {

inline constexpr int kHostileRanks = 3;
inline constexpr int kHostile = 1;
inline constexpr int kVictim = 2;

// A tensor between two guard zones.
class GuardedTensor {
  public:
    GuardedTensor(ncclDataType_t type, size_t element_bytes, std::initializer_list<size_t> sizes) : sizes_(sizes) {
        size_t bytes = element_bytes;
        for (const size_t size : sizes_) bytes *= size;
        bytes_.assign(bytes + 2 * kGuardBytes + 256, kGuard);
        const auto address = reinterpret_cast<uintptr_t>(bytes_.data() + kGuardBytes);
        first_ = bytes_.data() + kGuardBytes + (256 - address % 256);
        num_bytes_ = bytes;
        std::memset(first_, 0, bytes);
        tensor_.ndim = static_cast<unsigned>(sizes_.size());
        tensor_.datatype = type;
        tensor_.data = first_;
        tensor_.sizes = sizes_.data();
    }
    GuardedTensor(const GuardedTensor&) = delete;
    GuardedTensor& operator=(const GuardedTensor&) = delete;

    ncclEpTensor_t* get() { return &tensor_; }
    template <typename T>
    T* as() {
        return reinterpret_cast<T*>(first_);
    }
    bool is_intact() const {
        for (const std::byte* at = bytes_.data(); at < bytes_.data() + bytes_.size(); ++at) {
            if (at >= first_ && at < first_ + num_bytes_) continue;
            if (*at != kGuard) return false;
        }
        return true;
    }

  private:
    static constexpr size_t kGuardBytes = 4096;
    static constexpr std::byte kGuard{0xA5};

    std::vector<size_t> sizes_;
    std::vector<std::byte> bytes_;
    std::byte* first_;
    size_t num_bytes_;
    ncclEpTensor_t tensor_ = NCCL_EP_TENSOR_INIT;
};

// What a rank's calls have answered; after the first error there are no more.
struct Answers {
    int errors = 0;
    int successes = 0;
    std::string message;  // the error's

    bool accept(const std::function<void()>& call) {
        try {
            call();
            ++successes;
            return true;
        } catch (const Error& error) {
            ++errors;
            message = error.what();
            return false;
        }
    }
};

// Where this rank is the hostile one, calls write(random) again and again until it is stopped.
class HostileWriter {
  public:
    HostileWriter(int rank, uint64_t seed, std::function<void(std::mt19937_64&)> write) {
        if (rank != kHostile) return;
        thread_ = std::thread([this, seed, write = std::move(write)] {
            std::mt19937_64 random(seed);
            while (!is_over_.load(std::memory_order_relaxed)) {
                write(random);
                ++num_written_;
                std::this_thread::yield();
            }
        });
    }
    ~HostileWriter() { stop(); }
    HostileWriter(const HostileWriter&) = delete;
    HostileWriter& operator=(const HostileWriter&) = delete;
    // Before each operation, in which the others wait for this rank: on a busy machine all of them can be over before
    // the writer's thread first runs.
    void wait_for_some() {
        constexpr uint64_t kSome = 20;
        const uint64_t end = num_written_ + kSome;
        while (thread_.joinable() && num_written_ < end) std::this_thread::yield();
    }
    void stop() {
        is_over_ = true;
        if (thread_.joinable()) thread_.join();
    }

  private:
    std::atomic<bool> is_over_{false};
    std::atomic<uint64_t> num_written_{0};
    std::thread thread_;
};

using HostileProgram = std::function<Answers(const std::shared_ptr<Communicator>&, uint64_t seed)>;

inline std::vector<Answers> answers_of_threads(uint64_t seed, const HostileProgram& program) {
    auto communicators = cpu::make_thread_communicators(kHostileRanks);
    std::vector<Answers> answers(kHostileRanks);
    std::vector<std::thread> ranks;
    for (size_t rank = 0; rank < kHostileRanks; ++rank)
        ranks.emplace_back([&, rank] { answers[rank] = program(communicators[rank], seed); });
    for (std::thread& rank : ranks) rank.join();
    return answers;
}

// Some rank sees garbage, and all survive.
inline void survive_in_threads(uint64_t seeds, const HostileProgram& program) {
    int errors = 0;
    for (uint64_t seed = 0; seed < seeds; ++seed) {
        for (const Answers& of_rank : answers_of_threads(seed, program)) errors += of_rank.errors;
    }
    EXPECT_GT(errors, 0) << "no rank saw garbage in " << seeds << " runs";
}

inline void survive_in_processes(uint64_t seeds, const HostileProgram& program) {
    for (uint64_t seed = 0; seed < seeds; ++seed) {
        const ncclUniqueId id = cpu::make_unique_id();
        std::vector<pid_t> children;
        for (int rank = 0; rank < kHostileRanks; ++rank) {
            const pid_t child = fork();
            if (child == 0) {
                program(cpu::join_processes(id, kHostileRanks, rank), seed);
                _exit(::testing::Test::HasFailure() ? 1 : 0);
            }
            children.push_back(child);
        }
        for (const pid_t child : children) {
            int status = 0;
            ASSERT_EQ(waitpid(child, &status, 0), child);
            EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "seed " << seed << ", status " << status;
        }
    }
}

}  // namespace crossdock
