// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "crossdock/communicator.hpp"

namespace crossdock {
namespace {

// Every rank runs once, with a communicator that all ranks share.
TEST(RunThreads, CallsEachRankOnce) {
    std::atomic<int> ranks(0);
    run_threads(3, [&](const Communicator& comm) {
        EXPECT_EQ(comm.num_ranks(), 3);
        comm.barrier();
        ranks += 1 << (4 * comm.rank());
    });
    EXPECT_EQ(ranks, 0x111);
}

// The exception of the first rank that failed reaches the caller, after all ranks have returned.
TEST(RunThreads, ThrowsTheFirstExceptionOfARank) {
    std::atomic<int> returned(0);
    try {
        run_threads(3, [&](const Communicator& comm) {
            ++returned;
            if (comm.rank() > 0) throw std::runtime_error(std::to_string(comm.rank()));
        });
        FAIL() << "no exception";
    } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "1");
    }
    EXPECT_EQ(returned, 3);
}

// What ranks report of the one that failed does not hide why it failed.
TEST(RunThreads, PrefersTheCauseToItsReports) {
    const auto program = [](const Communicator& comm) {
        if (comm.rank() == 2) throw std::runtime_error("the cause");
        throw Error(ncclRemoteError, std::to_string(comm.rank()));
    };
    EXPECT_THROW(
        try { run_threads(3, program); } catch (const std::runtime_error& error) {
            EXPECT_STREQ(error.what(), "the cause");
            throw;
        },
        std::runtime_error);
    EXPECT_THROW(
        try { run_threads(2, program); } catch (const Error& error) {
            EXPECT_STREQ(error.what(), "0");
            throw;
        },
        Error);
}

// An id's owner keeps a descriptor for it, wherever the owner moves.
TEST(UniqueIds, AreReleasedByTheirOwner) {
    const auto num_descriptors = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); };
    const auto num_before = num_descriptors();
    {
        UniqueId first;
        UniqueId second;
        EXPECT_EQ(num_descriptors(), num_before + 2);
        const UniqueId moved = std::move(first);
        second = UniqueId();
        EXPECT_EQ(num_descriptors(), num_before + 2);
    }
    EXPECT_EQ(num_descriptors(), num_before);
}

}  // namespace
}  // namespace crossdock
