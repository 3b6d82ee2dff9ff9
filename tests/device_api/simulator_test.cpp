// SPDX-License-Identifier: Apache-2.0
// The simulator finds planted bugs of kernels, within 100 seeds and with the line, and leaves correct kernels alone.
// This file is compiled so that it sees every load and store (crossdock/device/watch.hpp).
#include <gtest/gtest.h>

#include "run.h"

namespace {

constexpr uint64_t kSeedsOfBugs = 100;
constexpr uint64_t kSeedsOfCorrectKernels = 2000;

// What a kernel does wrong.
enum Bug {
    kNone,
    kNoFlush,         // the source of a put is overwritten with no flush before
    kNoCounterWait,   // the same, without a wait for the counter
    kNoWait,          // data is read with no wait for its signal
    kWeakForTwo,      // two puts, and a weak signal on the second one only
    kRelaxedWait,     // a wait that acquires nothing
    kTwoWriters,      // two ranks put to the same place
    kMixed,           // Inc and Add of one signal
    kNoBarrier,       // data of an LSA peer is read without a barrier
    kBarrierTwice,    // two blocks use one barrier
    kTooFew,          // waits for one signal more than comes
    kEarlyOverwrite,  // a put to what the peer may still read
    kGetTooEarly,     // a get before its owner's signal
    kOtherPeer,       // a flushAsync for a get from another peer
    kNoWaitForIt,     // a flushAsync without a wait
};

void expect_found(const Setup& setup, const Body& body, const std::string& what) {
    for (uint64_t seed = 0; seed < kSeedsOfBugs; ++seed) {
        const std::string failure = in_simulation(setup, seed, body);
        if (failure.empty()) continue;
        EXPECT_NE(failure.find(what), std::string::npos) << failure;
        EXPECT_NE(failure.find("seed " + std::to_string(seed)), std::string::npos) << failure;
        EXPECT_EQ(in_simulation(setup, seed, body), failure) << "a seed is not one run";
        return;
    }
    FAIL() << kSeedsOfBugs << " seeds have not found: " << what;
}

void expect_clean(const Setup& setup, const Body& body) {
    for (uint64_t seed = 0; seed < kSeedsOfCorrectKernels; ++seed) {
        ASSERT_EQ(in_simulation(setup, seed, body), "") << "seed " << seed;
    }
}

constexpr int kWords = 16;
constexpr size_t kBytes = kWords * sizeof(int);

// Rank 0 puts twice from the same place to rank 1, which reads both.
__global__ void two_puts(ncclDevComm comm, ncclWindow_t window, Bug bug) {
    ncclCoopCta block;
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    int* words = static_cast<int*>(ncclGetLocalPointer(window, 0));
    if (comm.rank == 0) {
        for (int round = 0; round < 2; ++round) {
            words[threadIdx.x] = round + 1;
            const size_t target = kBytes * static_cast<size_t>(1 + round);
            if (bug == kWeakForTwo && round == 0) {
                gin.put(world, 1, window, target, window, 0, kBytes, ncclGin_None{}, ncclGin_None{}, block);
            } else if (bug == kNoCounterWait) {
                gin.put(world, 1, window, target, window, 0, kBytes, ncclGin_WeakSignalInc{0},
                        ncclGin_WeakCounterInc{0}, block);
            } else {
                gin.put(world, 1, window, target, window, 0, kBytes, ncclGin_WeakSignalInc{0}, ncclGin_None{}, block);
            }
            if (bug != kNoFlush && bug != kNoCounterWait) gin.flush(block);
        }
    } else if (comm.rank == 1) {
        const uint64_t least = bug == kTooFew ? 3 : bug == kWeakForTwo ? 1 : 2;
        if (bug == kRelaxedWait) {
            gin.waitSignal(block, 0, least, 64, cuda::memory_order_relaxed);
        } else if (bug != kNoWait) {
            gin.waitSignal(block, 0, least);
        }
        for (int round = 0; round < 2; ++round) {
            const int seen = words[kWords * (1 + round) + static_cast<int>(threadIdx.x)];
            if (seen != round + 1 && bug == kNone) __trap();
        }
    }
}

TEST(Simulator, PutsThatSignalAndFlushAreClean) { expect_clean({}, launching(1, kWords, two_puts, kNone)); }
TEST(Simulator, ASourceThatChangesBeforeTheFlushIsFound) {
    expect_found({}, launching(1, kWords, two_puts, kNoFlush), "source changed before a flush or a counter");
}
TEST(Simulator, ASourceThatChangesBeforeTheCounterIsFound) {
    expect_found({}, launching(1, kWords, two_puts, kNoCounterWait), "source changed before a flush or a counter");
}
TEST(Simulator, DataReadWithoutAWaitIsFound) {
    expect_found({}, launching(1, kWords, two_puts, kNoWait), "data read without waiting for a signal");
}
TEST(Simulator, AWeakSignalDoesNotCoverEarlierPuts) {
    expect_found({}, launching(1, kWords, two_puts, kWeakForTwo), "data read without waiting for a signal");
}
TEST(Simulator, ARelaxedWaitCoversNothing) {
    expect_found({}, launching(1, kWords, two_puts, kRelaxedWait), "data read without waiting for a signal");
}
TEST(Simulator, ReportsNameTheLinesOfBothSides) {
    const std::string report = in_simulations({}, kSeedsOfBugs, launching(1, kWords, two_puts, kNoWait));
    const size_t first = report.find("simulator_test.cpp:");
    ASSERT_NE(first, std::string::npos) << report;
    EXPECT_NE(report.find("simulator_test.cpp:", first + 1), std::string::npos) << report;
    EXPECT_NE(report.find("rank 1, block 0, thread"), std::string::npos) << report;
}
// A wait without a signal is a deadlock: reported without a timeout, with the expected and the seen value.
TEST(Simulator, AWaitWithoutASignalIsADeadlock) {
    const std::string report = in_simulation({}, 0, launching(1, kWords, two_puts, kTooFew));
    EXPECT_NE(report.find("deadlock"), std::string::npos) << report;
    EXPECT_NE(report.find("rank 1, block 0, thread 0 waits for signal 0 of context 0 at simulator_test.cpp:"),
              std::string::npos)
        << report;
    EXPECT_NE(report.find("expected 3, seen 2"), std::string::npos) << report;
}

// A lock that is never released is found, too, although the waiting threads do more than load.
__global__ void taken_lock(ncclDevComm, ncclWindow_t) {
    __shared__ int lock;
    if (threadIdx.x == 0) lock = 0;
    __syncthreads();
    while (atomicCAS(&lock, 0, 1) != 0) {
    }
}
TEST(Simulator, ALockThatIsNotReleasedIsFound) {
    const std::string report = in_simulation({}, 0, launching(1, 2, taken_lock));
    EXPECT_NE(report.find("no end in sight"), std::string::npos) << report;
    EXPECT_NE(report.find("rank 1, block 0, thread"), std::string::npos) << report;
    EXPECT_NE(report.find("waits in a loop of its own, by atomic loads or pauses"), std::string::npos) << report;
}

// The source may be overwritten once the counter has been incremented, and a strong signal covers all earlier puts.
__global__ void counted_puts(ncclDevComm comm, ncclWindow_t window) {
    ncclGin gin(comm, 1);
    const ncclTeam world = ncclTeamWorld(comm);
    ncclSymPtr<int> source(window, 0);
    if (comm.rank == 0 && threadIdx.x == 0) {
        for (int round = 0; round < 3; ++round) {
            for (int i = 0; i < kWords; ++i) source.localPtr()[i] = 10 * round + i;
            gin.put(world, 1, source + kWords * (1 + round), source, kWords, ncclGin_None{}, ncclGin_WeakCounterInc{1});
            gin.waitCounter(ncclCoopThread(), 1, static_cast<uint64_t>(round + 1));
        }
        gin.putValue(world, 1, source + kWords * 4, 7);
        gin.signal(world, 1, ncclGin_StrongSignalAdd{2, 5});
    }
    if (comm.rank == 1) {
        gin.waitSignal(ncclCoopCta(), 2, 5);
        for (int i = 0; i < 3 * kWords; ++i) {
            if (source.localPtr()[kWords + i] != 10 * (i / kWords) + i % kWords) __trap();
        }
        if (source.localPtr()[kWords * 4] != 7) __trap();
    }
}
TEST(Simulator, CountersAndStrongSignalsAreClean) { expect_clean({}, launching(1, 4, counted_puts)); }

__global__ void two_writers(ncclDevComm comm, ncclWindow_t window, Bug bug) {
    ncclGin gin(comm, 0);
    if (comm.rank < 2) {
        const size_t place = bug == kTwoWriters ? 64 : 64 + 8 * static_cast<size_t>(comm.rank);
        gin.putValue(ncclTeamWorld(comm), 2, window, place, uint64_t{1}, ncclGin_WeakSignalInc{0});
        if (bug == kMixed && comm.rank == 1) gin.signal(ncclTeamWorld(comm), 2, ncclGin_WeakSignalAdd{0, 1});
    } else {
        gin.waitSignal(ncclCoopThread(), 0, bug == kMixed ? 3 : 2);
    }
}
TEST(Simulator, TwoRanksThatWriteBesideEachOtherAreClean) {
    expect_clean({.ranks = 3}, launching(1, 1, two_writers, kNone));
}
TEST(Simulator, TwoUnorderedWritesToOnePlaceAreFound) {
    expect_found({.ranks = 3}, launching(1, 1, two_writers, kTwoWriters), "two unordered writes to one place");
}
TEST(Simulator, IncMixedWithAddIsFound) {
    expect_found({.ranks = 3}, launching(1, 1, two_writers, kMixed), "Inc mixed with Add without a reset");
}

// Every rank stores its number at all LSA peers, and reads theirs.
__global__ void lsa_exchange(ncclDevComm comm, ncclWindow_t window, Bug bug) {
    ncclCoopCta block;
    const uint32_t index = bug == kBarrierTwice ? 0 : blockIdx.x;
    ncclLsaBarrierSession<ncclCoopCta> barrier(block, comm, ncclTeamTagLsa(), index);
    const size_t place = 64 * blockIdx.x;
    for (int peer = static_cast<int>(threadIdx.x); peer < comm.lsaSize; peer += static_cast<int>(blockDim.x)) {
        static_cast<int*>(ncclGetLsaPointer(window, place, peer))[comm.lsaRank] = comm.rank + 1;
    }
    if (bug != kNoBarrier) barrier.sync(block, cuda::memory_order_acq_rel);
    const int* words = static_cast<const int*>(ncclGetLocalPointer(window, place));
    const int first = comm.rank - comm.lsaRank;
    for (int peer = 0; peer < comm.lsaSize; ++peer) {
        if (words[peer] != first + peer + 1) {
            if (bug == kNone) __trap();
        }
    }
    // No rank leaves before all have read.
    if (bug != kNoBarrier) barrier.sync(block, cuda::memory_order_acq_rel);
}
TEST(Simulator, LsaBarriersOrderLoadsAndStores) {
    expect_clean({.ranks = 4, .lsa_team = 2}, launching(2, 2, lsa_exchange, kNone));
}
TEST(Simulator, AMissingLsaBarrierIsFound) {
    expect_found({.ranks = 2}, launching(1, 2, lsa_exchange, kNoBarrier),
                 "data read and written by two threads that nothing orders");
}
TEST(Simulator, ABarrierUsedTwiceAtOnceIsFound) {
    expect_found({.ranks = 2}, launching(2, 2, lsa_exchange, kBarrierTwice), "is in use by other threads");
}

// An all-to-all in rounds: each rank puts its words, all meet, all read, all meet again.
template <typename Barrier>
__device__ void exchange_rounds(ncclGin gin, Barrier& barrier, ncclTeam team, ncclWindow_t window) {
    ncclCoopCta block;
    int* words = static_cast<int*>(ncclGetLocalPointer(window, 0));
    for (int round = 0; round < 2; ++round) {
        for (int i = static_cast<int>(threadIdx.x); i < team.nRanks; i += static_cast<int>(blockDim.x)) {
            words[i] = 100 * round + 10 * team.rank + i;
            gin.put(team, i, window, 256 + 4 * static_cast<size_t>(team.rank), window, 4 * static_cast<size_t>(i), 4);
        }
        gin.flush(block);
        barrier.sync(block, cuda::memory_order_acq_rel);
        for (int i = 0; i < team.nRanks; ++i) {
            if (words[64 + i] != 100 * round + 10 * i + team.rank) __trap();
        }
        barrier.sync(block, cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
    }
}
__global__ void gin_barriers(ncclDevComm comm, ncclWindow_t window) {
    ncclGin gin(comm, 0);
    ncclGinBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), gin, ncclTeamTagWorld(), 1);
    exchange_rounds(gin, barrier, ncclTeamWorld(comm), window);
}
__global__ void rail_barriers(ncclDevComm comm, ncclWindow_t window) {
    ncclGin gin(comm, 0);
    ncclBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), ncclTeamTagRail(), gin, 0);
    exchange_rounds(gin, barrier, ncclTeamRail(comm), window);
}
__global__ void hybrid_barriers(ncclDevComm comm, ncclWindow_t window) {
    ncclGin gin(comm, 0);
    ncclBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), ncclTeamTagWorld(), gin, 0);
    exchange_rounds(gin, barrier, ncclTeamWorld(comm), window);
}
TEST(Simulator, GinBarriersBringThePutsBeforeThem) { expect_clean({.ranks = 3}, launching(1, 3, gin_barriers)); }
TEST(Simulator, RailBarriersAreClean) { expect_clean({.ranks = 4, .lsa_team = 2}, launching(1, 2, rail_barriers)); }
TEST(Simulator, HybridBarriersAreClean) { expect_clean({.ranks = 4, .lsa_team = 2}, launching(1, 2, hybrid_barriers)); }

// Rank 1 lets rank 0 overwrite what it has read.
__global__ void overwrite(ncclDevComm comm, ncclWindow_t window, Bug bug) {
    ncclCoopCta block;
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    const int* words = static_cast<const int*>(ncclGetLocalPointer(window, 0));
    if (comm.rank == 0 && threadIdx.x == 0) {
        for (int round = 0; round < 2; ++round) {
            if (round > 0) gin.waitSignal(ncclCoopThread(), 1, 1);
            gin.putValue(world, 1, window, 4, 7 + round, ncclGin_WeakSignalInc{0});
        }
    }
    if (comm.rank == 1) {
        gin.waitSignal(block, 0, 1);
        if (bug == kEarlyOverwrite) gin.signal(world, 0, ncclGin_WeakSignalInc{1}, block);
        __syncthreads();
        const int seen = words[1];
        if (seen != 7 && (bug == kNone || seen != 8)) __trap();
        if (bug == kNone) gin.signal(world, 0, ncclGin_WeakSignalInc{1}, block);
        gin.waitSignal(block, 0, 2);
        if (words[1] != 8) __trap();
    }
}
TEST(Simulator, DataOverwrittenAfterItsReadersConsentIsClean) { expect_clean({}, launching(1, 4, overwrite, kNone)); }
TEST(Simulator, DataOverwrittenBeforeItsReaderIsDoneIsFound) {
    expect_found({}, launching(1, 4, overwrite, kEarlyOverwrite), "overwritten before its reader was done");
}

// Rank 0 gets what rank 1 has stored, and lets it store there again.
__global__ void get_from_one(ncclDevComm comm, ncclWindow_t window, Bug bug) {
    ncclCoopThread thread;
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    int* words = static_cast<int*>(ncclGetLocalPointer(window, 0));
    if (comm.rank == 1) {
        words[0] = 5;
        gin.signal(world, 0, ncclGin_WeakVASignalInc{window, 64});
        if (bug == kNoWaitForIt || bug == kOtherPeer) return;
        if (bug != kEarlyOverwrite) gin.waitSignal(thread, window, 64, 1);
        words[0] = 6;
    } else if (comm.rank == 0) {
        if (bug != kGetTooEarly) gin.waitSignal(thread, window, 64, 1);
        gin.get(world, 1, window, 0, window, 4, 4);
        ncclGinRequest_t request;
        gin.flushAsync(world, bug == kOtherPeer ? 2 : 1, &request);
        if (bug == kNoFlush) {
            gin.signal(world, 1, ncclGin_WeakVASignalInc{window, 64});
        } else if (bug != kNoWaitForIt) {
            gin.wait(request);
        }
        words[2] = words[1];
        if (bug == kNone && words[2] != 5) __trap();
        if (bug != kNoFlush) gin.signal(world, 1, ncclGin_WeakVASignalInc{window, 64});
    }
}
TEST(Simulator, AGetBetweenSignalsIsClean) { expect_clean({}, launching(1, 1, get_from_one, kNone)); }
TEST(Simulator, AGetOfWhatIsNotThereIsFound) {
    expect_found({}, launching(1, 1, get_from_one, kGetTooEarly), "source of a get changed before the get was done");
}
TEST(Simulator, AGetsSourceThatChangesIsFound) {
    expect_found({}, launching(1, 1, get_from_one, kEarlyOverwrite), "source of a get changed before the get was done");
    expect_found({}, launching(1, 1, get_from_one, kNoFlush), "get was done");
}
TEST(Simulator, AGetReadBeforeItsFlushIsFound) {
    expect_found({}, launching(1, 1, get_from_one, kNoWaitForIt), "read before a flush said that the get was done");
    expect_found({.ranks = 3}, launching(1, 1, get_from_one, kOtherPeer),
                 "read before a flush said that the get was done");
}

__global__ void wrong_signal(ncclDevComm comm, ncclWindow_t) {
    ncclGin gin(comm, 0);
    gin.signal(ncclTeamWorld(comm), 0, ncclGin_WeakSignalInc{4});
}
TEST(Simulator, ASignalOutOfRangeIsFound) {
    expect_found({}, launching(1, 1, wrong_signal), "signal 4 is out of range: the device communicator has 4");
}

// A flag of the program's own, between blocks: by release and acquire, and by fences around relaxed atomics.
__global__ void own_flags(ncclDevComm, ncclWindow_t window, bool fences) {
    int* words = static_cast<int*>(ncclGetLocalPointer(window, 0));
    unsigned* flag = static_cast<unsigned*>(ncclGetLocalPointer(window, 128));
    if (blockIdx.x == 0) {
        words[threadIdx.x] = 5;
        __syncthreads();
        if (threadIdx.x == 0 && fences) {
            __threadfence();
            atomicAdd(flag, 1);
        } else if (threadIdx.x == 0) {
            cuda::atomic_ref<unsigned>(*flag).store(1, cuda::memory_order_release);
        }
    } else {
        const auto order = fences ? cuda::memory_order_relaxed : cuda::memory_order_acquire;
        while (cuda::atomic_ref<unsigned>(*flag).load(order) == 0) {
        }
        if (fences) __threadfence();
        if (words[threadIdx.x] != 5) __trap();
    }
}
TEST(Simulator, FlagsOfTheProgramsOwnAreClean) {
    for (const bool fences : {false, true}) {
        EXPECT_EQ(in_simulations({.ranks = 1}, 200, launching(2, 4, own_flags, fences)), "");
    }
}

}  // namespace
