// SPDX-License-Identifier: Apache-2.0
// NCCL's Device API over threads: what each call does, and that bad input ends a kernel with a message.
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>

#include "ways.h"

namespace {

constexpr uint64_t kSimulatedSeeds = DEVICE_API_SEEDS;

void expect_success(const Setup& setup, const Body& body) {
    for (const Way& way : kWays) EXPECT_EQ(on(way, setup, body), "") << way.name();
    EXPECT_EQ(in_simulations(setup, kSimulatedSeeds, body), "");
}
void expect_message(const Setup& setup, const Body& body, const std::string& message) {
    const std::string failure = on_threads(setup, body);
    EXPECT_NE(failure.find(message), std::string::npos) << "threads: " << failure;
    const std::string simulated = in_simulation(setup, 1, body);
    EXPECT_NE(simulated.find(message), std::string::npos) << "simulation: " << simulated;
}

#define EXPECT_IN_KERNEL(condition) \
    do {                            \
        if (!(condition)) __trap(); \
    } while (false)

// Threads know their indices, and each block has its own shared variables.
__global__ void vocabulary(ncclDevComm, ncclWindow_t) {
    __shared__ int sums[4];
    __shared__ int total;
    CROSSDOCK_DYNAMIC_SHARED(int, scratch);
    const int tid = static_cast<int>(threadIdx.x + blockDim.x * threadIdx.y);
    EXPECT_IN_KERNEL(blockDim.x == 16 && blockDim.y == 4 && gridDim.x == 3);
    if (tid < 4) sums[tid] = 0;
    if (tid == 0) total = 0, scratch[0] = static_cast<int>(blockIdx.x);
    __syncthreads();
    EXPECT_IN_KERNEL(scratch[0] == static_cast<int>(blockIdx.x));

    int value = tid % 32;
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    EXPECT_IN_KERNEL(value == 31 * 32 / 2);
    EXPECT_IN_KERNEL(__ballot_sync(~0u, tid % 2) == 0xaaaaaaaau);
    EXPECT_IN_KERNEL(__any_sync(~0u, tid % 32 == 3) && !__all_sync(~0u, tid % 32 == 3));
    EXPECT_IN_KERNEL(__shfl_sync(~0u, tid, 5) == tid / 32 * 32 + 5);
    EXPECT_IN_KERNEL(__shfl_up_sync(~0u, tid % 32, 1) == std::max(tid % 32 - 1, 0));
    EXPECT_IN_KERNEL(__shfl_down_sync(~0u, tid % 32, 1) == std::min(tid % 32 + 1, 31));
    EXPECT_IN_KERNEL(__shfl_sync(~0u, tid % 32, 1, 8) == tid % 32 / 8 * 8 + 1);
    EXPECT_IN_KERNEL(__reduce_max_sync(~0u, static_cast<unsigned>(tid % 32)) == 31);

    ncclCoopTile<8> tile;
    EXPECT_IN_KERNEL(tile.thread_rank() == tid % 8 && tile.size() == 8);
    tile.sync();
    atomicAdd(&sums[blockIdx.x], tid);
    atomicAdd(&total, 1);
    __syncthreads();
    EXPECT_IN_KERNEL(sums[blockIdx.x] == 63 * 64 / 2 && total == 64);
    for (int other = 0; other < 4; ++other) {
        EXPECT_IN_KERNEL(other == static_cast<int>(blockIdx.x) || sums[other] == 0);
    }
    // Threads that have returned are not waited for.
    if (tid % 32 >= 30) return;
    __syncthreads();
    EXPECT_IN_KERNEL(__activemask() == 0x3fffffffu);
    __syncwarp();
}
TEST(DeviceApi, ThreadsOfABlockShareAndMeet) {
    expect_success({.ranks = 2}, [](TestRank& rank) {
        return crossdockLaunch(rank.self.comm, 3, dim3(16, 4), 64, nullptr, vocabulary, rank.comm, rank.window);
    });
}

// Ranks of a team, and of one team in another.
__global__ void teams(ncclDevComm comm, ncclWindow_t window) {
    const ncclTeam world = ncclTeamWorld(comm), lsa = ncclTeamLsa(comm), rail = ncclTeamRail(comm);
    EXPECT_IN_KERNEL(world.nRanks == 6 && lsa.nRanks == 3 && rail.nRanks == 2);
    EXPECT_IN_KERNEL(lsa.rank == comm.rank % 3 && rail.rank == comm.rank / 3 && rail.stride == 3);
    for (int rank = 0; rank < 2; ++rank) {
        EXPECT_IN_KERNEL(ncclTeamRankToWorld(comm, rail, rank) == 3 * rank + comm.rank % 3);
        EXPECT_IN_KERNEL(ncclTeamRankIsMember(lsa, rail, rank) == (rank == rail.rank));
    }
    EXPECT_IN_KERNEL(ncclTeamRankToTeam(world, rail, 1 - rail.rank) == (comm.rank + 3) % 6);
    EXPECT_IN_KERNEL(ncclTeamRankInDifference(world, lsa, 0) == (comm.rank < 3 ? 3 : 0));
    char* own = static_cast<char*>(ncclGetLocalPointer(window, 8));
    EXPECT_IN_KERNEL(ncclGetLsaPointer(window, 8, comm.lsaRank) == own);
    EXPECT_IN_KERNEL(ncclGetPeerPointer(window, 8, comm.rank) == own);
    EXPECT_IN_KERNEL(ncclGetPeerPointer(window, 8, lsa, lsa.rank) == own);
}
TEST(DeviceApi, TeamsNumberTheirRanks) { expect_success({.ranks = 6, .lsa_team = 3}, launching(1, 1, teams)); }

// Signals compare rolling, shadows follow, and a reset begins anew.
__global__ void signals(ncclDevComm comm, ncclWindow_t window) {
    ncclGin gin(comm, 1);
    const ncclTeam world = ncclTeamWorld(comm);
    const int peer = (comm.rank + 1) % comm.nRanks;
    ncclCoopThread thread;
    gin.signal(world, peer, ncclGin_WeakSignalAdd{1, ~uint64_t{0} - 2});
    while (gin.readSignal(1) == 0) {
    }
    gin.waitSignal(thread, 1, ~uint64_t{0} - 3);  // -3 is at least -4
    ncclGinBarrierSession<ncclCoopThread>(thread, gin, ncclTeamTagWorld(), 0).sync(thread, cuda::memory_order_acq_rel);
    gin.signal(world, peer, ncclGin_WeakSignalAdd{1, 5});
    gin.waitSignal(thread, 1, 2);
    EXPECT_IN_KERNEL(gin.readSignal(1) == 2 && gin.readSignal(1, 1) == 0);

    gin.signal(world, peer, ncclGin_StrongSignalAdd{2, 3});
    uint32_t before = 9, delta = 9;
    gin.waitSignalFollowShadow(thread, 2, 1u, &before, &delta, 32);
    EXPECT_IN_KERNEL(before == 0 && delta == 3 && *gin.getSignalShadowPtr(2) == 3);
    gin.waitSignalMeetShadow(thread, 2);
    gin.resetSignal(2);
    EXPECT_IN_KERNEL(gin.readSignal(2) == 0 && *gin.getSignalShadowPtr(2) == 0);

    int* words = static_cast<int*>(ncclGetLocalPointer(window, 0));
    words[0] = 40 + comm.rank;
    gin.put(world, peer, window, 64, window, 0, 4, ncclGin_WeakSignalInc{0}, ncclGin_WeakCounterInc{0});
    gin.waitCounter(thread, 0, 1);
    EXPECT_IN_KERNEL(gin.readCounter(0) == 1);
    words[0] = 0;
    gin.resetCounter(0);
    EXPECT_IN_KERNEL(gin.readCounter(0) == 0);
    gin.waitSignal(thread, 0, 1);
    EXPECT_IN_KERNEL(words[16] == 40 + (comm.rank + comm.nRanks - 1) % comm.nRanks);
    // The other context has signals of its own.
    EXPECT_IN_KERNEL(ncclGin(comm, 0).readSignal(0) == 0);
}
TEST(DeviceApi, SignalsCountersAndShadows) { expect_success({.ranks = 3}, launching(1, 1, signals)); }

// Counts may have any type, also one that does not hold the sum of count and threads; none or less means nothing.
__global__ void narrow_counts(ncclDevComm, ncclWindow_t window) {
    ncclCoopCta block;
    auto* bytes = static_cast<uint8_t*>(ncclGetLocalPointer(window, 0));
    for (int i = static_cast<int>(threadIdx.x); i < 512; i += 64) bytes[i] = static_cast<uint8_t>(i % 100);
    block.sync();
    ncclLocalReduceSum<uint8_t>(block, 2, bytes, 256, bytes + 512, uint8_t{200});
    ncclLocalReduceSum<uint8_t>(block, 2, bytes, 256, bytes + 1024, 0);
    ncclLocalReduceSum<uint8_t>(block, 2, bytes, 256, bytes + 1024, -1);
    block.sync();
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += 64) {
        EXPECT_IN_KERNEL(bytes[512 + i] == (i < 200 ? i % 100 + (i + 256) % 100 : 0));
        EXPECT_IN_KERNEL(bytes[1024 + i] == 0);
    }
}
TEST(DeviceApi, CountsOfAnyType) { expect_success({.ranks = 1}, launching(1, 64, narrow_counts)); }

// A frame of that many bytes, of which the far end is touched first.
template <size_t kBytes>
__global__ void large_frame(ncclDevComm, ncclWindow_t) {
    volatile char frame[kBytes];
    volatile char* volatile far_end = frame;  // or the compiler would leave out the rest
    *far_end = 7;
    __syncthreads();
    EXPECT_IN_KERNEL(*far_end == 7);
}
int depth_of(volatile int* depth) {
    *depth = *depth + 1;
    return *depth > 0 ? depth_of(depth) + *depth : 0;
}
__global__ void endless_recursion(ncclDevComm, ncclWindow_t) {
    volatile int depth = 0;
    if (threadIdx.x + 1 == blockDim.x) depth_of(&depth);
}

// What a GPU's thread may have as local memory, 512 KiB, fits, and CROSSDOCK_GIN_STACK_KIB makes room for more.
TEST(DeviceApi, LargeFramesFit) {
    for (const unsigned threads : {1, 3}) {
        expect_success({.ranks = 1}, launching(2, threads, large_frame<(512 << 10)>));
        setenv("CROSSDOCK_GIN_STACK_KIB", "4096", 1);
        expect_success({.ranks = 1}, launching(2, threads, large_frame<(3 << 20)>));
        unsetenv("CROSSDOCK_GIN_STACK_KIB");
    }
}

// A thread that needs more ends the process with a message, however far it jumps, and writes to no other's stack.
TEST(DeviceApiDeathTest, AStackThatOverflowsIsNamed) {
    const auto message = [](unsigned last_thread) {
        return "stack overflow at .*: rank 0, block [01], thread [0-" + std::to_string(last_thread) +
               "] of a kernel needs more than the 1024 KiB of its stack; raise CROSSDOCK_GIN_STACK_KIB";
    };
    for (const unsigned threads : {1u, 3u}) {
        for (const Body& body :
             {launching(2, threads, large_frame<(1100 << 10)>), launching(2, threads, large_frame<(8 << 20)>),
              launching(2, threads, endless_recursion)}) {
            EXPECT_DEATH(on_threads({.ranks = 1}, body), message(threads - 1));
        }
    }
    EXPECT_DEATH(in_simulation({.ranks = 1}, 1, launching(2, 3, endless_recursion)), message(2));
    EXPECT_DEATH(in_simulation({.ranks = 1}, 1,
                               [](TestRank&) {
                                   volatile int depth = 0;
                                   return depth_of(&depth) == 1 ? ncclSuccess : ncclInternalError;
                               }),
                 "stack overflow at .*: a rank's program in the simulation");
}

// The program's own handler of faults goes on after the message, and alone after other faults.
TEST(DeviceApiDeathTest, AProgramsHandlerGoesOn) {
    const auto set_handler = [] {
        struct sigaction own = {};
        own.sa_handler = [](int) {
            [[maybe_unused]] const auto written = write(STDERR_FILENO, "then this", 9);
            _exit(3);
        };
        sigaction(SIGSEGV, &own, nullptr);
    };
    const testing::ExitedWithCode by_handler(3);
    EXPECT_EXIT((set_handler(), on_threads({.ranks = 1}, launching(1, 3, endless_recursion))), by_handler,
                "stack overflow at .*\nthen this");
    const auto stray_store = +[](ncclDevComm, ncclWindow_t) {
        volatile uintptr_t nowhere = 8;
        *reinterpret_cast<volatile int*>(nowhere) = 1;
    };
    EXPECT_EXIT((set_handler(), on_threads({.ranks = 1}, launching(1, 3, stray_store))), by_handler, "^then this");
}

// More threads than the system allows stacks for: the message has the limit and the way to raise it, and the process
// can go on.
TEST(DeviceApi, TooManyThreadsNameTheLimit) {
    long most = 0;
    std::ifstream("/proc/sys/vm/max_map_count") >> most;
    if (most > 150'000) GTEST_SKIP() << "vm.max_map_count is " << most;
    const auto kernel = +[](ncclDevComm, ncclWindow_t) {};
    for (const std::string& failure : {on_threads({.ranks = 1}, launching(100, 1000, kernel)),
                                       in_simulation({.ranks = 1}, 1, launching(100, 1000, kernel))}) {
        EXPECT_NE(failure.find("the stacks of 100000 more threads"), std::string::npos) << failure;
        EXPECT_NE(failure.find("allowed: " + std::to_string(most) + " (vm.max_map_count)"), std::string::npos)
            << failure;
    }
    EXPECT_EQ(on_threads({.ranks = 1}, launching(2, 100, kernel)), "");
}

// Bad input: each kind ends the kernel with a message that names the value and what is allowed.
enum Mistake {
    kWindow,
    kOffset,
    kBytes,
    kPeer,
    kRank,
    kSignal,
    kCounter,
    kContext,
    kBarrier,
    kLsaPeer,
    kBits,
    kReadBits,
    kMask,
    kGetBytes,
    kGetPeer,
    kGetWindow,
    kFlushPeer,
    kRequest,
    kForeignRequest,
    kVaWindow,
    kVaOffset,
    kVaEnd,
    kNoMultimem,
    kNoWindowThere,
};
__global__ void mistaken(ncclDevComm comm, ncclWindow_t window, Mistake mistake) {
    const ncclTeam world = ncclTeamWorld(comm);
    ncclGin gin(comm, mistake == kContext ? 2 : 0);
    switch (mistake) {
        case kWindow:
            return gin.put(world, 0, reinterpret_cast<ncclWindow_t>(64), 0, window, 0, 8);
        case kOffset:
            return gin.put(world, 0, window, 4100, window, 0, 8);
        case kBytes:
            return gin.put(world, 0, window, 0, window, 4000, ~size_t{0});
        case kPeer:
            return gin.put(world, 2, window, 0, window, 0, 8);
        case kRank:
            return gin.put(ncclTeam{5, 0, 1}, 4, window, 0, window, 0, 8);
        case kSignal:
            return gin.waitSignal(ncclCoopThread(), 4, 1);
        case kCounter:
            return gin.waitCounter(ncclCoopThread(), 2, 1);
        case kBits:
            return gin.waitSignal(ncclCoopThread(), 0, 1, 65);
        case kReadBits:
            gin.readSignal(0, 0);
            return;
        case kBarrier:
            ncclGinBarrierSession<ncclCoopCta>(ncclCoopCta(), gin, ncclTeamTagWorld(), blockIdx.x)
                .sync(ncclCoopCta(), cuda::memory_order_acq_rel);
            return;
        case kLsaPeer:
            ncclGetLsaPointer(window, 0, 2);
            return;
        case kMask:
            return __syncwarp(2);
        case kContext:
            return;
        case kGetBytes:
            return gin.get(world, 0, window, 4096, window, 0, 4);
        case kGetPeer:
            return gin.get(world, -1, window, 0, window, 0, 8);
        case kGetWindow:
            return gin.get(world, 0, window, 0, nullptr, 0, 8);
        case kFlushPeer: {
            ncclGinRequest_t request;
            return gin.flushAsync(world, 2, &request);
        }
        case kRequest: {
            ncclGinRequest_t request = {};
            return gin.wait(request);
        }
        case kForeignRequest: {
            ncclGinRequest_t request;
            ncclGin(comm, 1).flushAsync(world, 0, &request);
            return gin.wait(request);
        }
        case kVaWindow:
            return gin.signal(world, 0, ncclGin_StrongVASignalInc{nullptr, 0});
        case kVaOffset:
            return gin.waitSignal(ncclCoopThread(), window, 12, 1);
        case kVaEnd:
            return gin.put(world, 0, window, 0, window, 0, 8, ncclGin_WeakVASignalAdd{window, 4092, 1});
        case kNoMultimem:
            ncclGetLsaMultimemPointer(window, 0, comm);
            return;
        case kNoWindowThere:
            ncclFindWindow(ncclCoopThread(), comm, &comm);
            return;
    }
}
TEST(DeviceApi, BadInputEndsTheKernelWithAMessage) {
    const std::pair<Mistake, const char*> mistakes[] = {
        {kWindow, "is not a window registered with this communicator"},
        {kOffset, "offset 4100 and 8 bytes, allowed: within the window's 4096 bytes"},
        {kBytes, "offset 0 and 18446744073709551615 bytes"},
        {kPeer, "peer 2 is outside of the team of 2 ranks"},
        {kRank, "is not a rank of the communicator"},
        {kSignal, "signal 4 is out of range: the device communicator has 4"},
        {kCounter, "counter 2 is out of range: the device communicator has 2"},
        {kContext, "context 2, allowed: 0..1"},
        {kBarrier, "barrier 2, but the device communicator has 2 of them"},
        {kLsaPeer, "peer 2 is outside of the LSA team of ranks 0..1"},
        {kBits, "65 bits, allowed: 1..64"},
        {kReadBits, "a read of a number of bits that is not 1..64 at threads_test.cpp:"},
        {kMask, "expected a mask that includes the calling lane"},
        {kGetBytes, "get at threads_test.cpp:"},
        {kGetBytes, "offset 4096 and 4 bytes, allowed: within the window's 4096 bytes"},
        {kGetPeer, "peer -1 is outside of the team of 2 ranks"},
        {kGetWindow, "is not a window registered with this communicator"},
        {kFlushPeer, "peer 2 is outside of the team of 2 ranks"},
        {kRequest, "the request is not one that flushAsync of context 0 has made"},
        {kForeignRequest, "the request is not one that flushAsync of context 0 has made"},
        {kVaWindow, "is not a window registered with this communicator"},
        {kVaOffset, "a VA signal at offset 12, allowed: multiples of 8"},
        {kNoMultimem, "made without multimem"},
        {kNoWindowThere, "no window of this rank contains"},
        {kVaEnd, "offset 4092 and 8 bytes, allowed: within the window's 4096 bytes"},
    };
    setenv("CROSSDOCK_GIN_TIMEOUT_MS", "20000", 1);
    for (const auto& [mistake, message] : mistakes) {
        expect_message({}, launching(3, 1, mistaken, mistake), message);
    }
    unsetenv("CROSSDOCK_GIN_TIMEOUT_MS");
}

// Resources that the requirements exclude cannot be used.
TEST(DeviceApi, SignalsThatWereNotRequiredAreRefused) {
    expect_message({.strong_signals = false},
                   launching(
                       1, 1,
                       +[](ncclDevComm comm, ncclWindow_t) {
                           ncclGin(comm, 0).signal(ncclTeamWorld(comm), 0, ncclGin_StrongSignalInc{0});
                       }),
                   "a strong signal, but ginStrongSignalsRequired");
    expect_message({.va_signals = false},
                   launching(
                       1, 1, +[](ncclDevComm comm, ncclWindow_t window) { ncclGin(comm, 0).readSignal(window, 0); }),
                   "a VA signal, but ginVaSignalsRequired");
}

TEST(DeviceApi, RailsReachNoOtherRails) {
    expect_message({.ranks = 4, .lsa_team = 2, .connection = NCCL_GIN_CONNECTION_RAIL},
                   launching(
                       1, 1,
                       +[](ncclDevComm comm, ncclWindow_t window) {
                           ncclGin(comm, 0).put(ncclTeamWorld(comm), 3 - comm.rank, window, 0, window, 0, 8);
                       }),
                   "is on another rail");
}

// Without GIN, or without a device communicator at all, there is a message.
TEST(DeviceApi, ADeviceCommunicatorWithoutGinIsNamed) {
    const auto kernel = +[](ncclDevComm comm, ncclWindow_t) { ncclGin gin(comm, 0); };
    expect_message({.signals = 0, .counters = 0, .connection = NCCL_GIN_CONNECTION_NONE}, launching(1, 1, kernel),
                   "ginConnectionType was NCCL_GIN_CONNECTION_NONE");
    expect_message(
        {},
        [&](TestRank& rank) {
            return crossdockLaunch(rank.self.comm, 1, 1, 0, nullptr, kernel, ncclDevComm{}, rank.window);
        },
        "was not made by ncclDevCommCreate");
}

TEST(DeviceApi, RequirementsAreChecked) {
    const auto create = [](auto change) {
        return on_threads({.ranks = 2}, [&](TestRank& rank) {
            ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
            change(reqs, rank.self.rank);
            ncclDevComm comm;
            const ncclResult_t result = ncclDevCommCreate(rank.self.comm, &reqs, &comm);
            return result;
        });
    };
    using Reqs = ncclDevCommRequirements&;
    EXPECT_NE(create([](Reqs reqs, int) { reqs.ginSignalCount = 1; }).find("expected FULL or RAIL"), std::string::npos);
    EXPECT_NE(create([](Reqs reqs, int) { reqs.lsaBarrierCount = -1; }).find("lsaBarrierCount is -1, allowed: 0.."),
              std::string::npos);
    EXPECT_NE(create([](Reqs reqs, int rank) { reqs.lsaBarrierCount = rank; }).find("rank 1 and rank 0 differ"),
              std::string::npos);
    static ncclDevResourceRequirements misaligned = {};
    misaligned.bufferAlign = 96 * 2;
    EXPECT_NE(create([](Reqs reqs, int) {
                  reqs.resourceRequirementsList = &misaligned;
              }).find("bufferAlign of a requirement is 192, allowed: powers of two"),
              std::string::npos);
    static ncclDevResourceRequirements many[3] = {};
    for (int i = 0; i < 3; ++i) many[i].next = i < 2 ? &many[i + 1] : nullptr, many[i].ginSignalCount = INT_MAX;
    const auto of_list = [&] {
        return create([](Reqs reqs, int) {
            reqs.resourceRequirementsList = many;
            reqs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
        });
    };
    EXPECT_NE(of_list().find("ginSignalCount is 2147483647, allowed: 0..65536"), std::string::npos) << of_list();
    many[0].ginSignalCount = 5, many[1].ginSignalCount = -3, many[2].ginSignalCount = 0;
    EXPECT_NE(of_list().find("ginSignalCount is -1, allowed: 0..65536"), std::string::npos) << of_list();
    many[1].ginSignalCount = 0;
    for (ncclDevResourceRequirements& each : many) each.bufferSize = SIZE_MAX / 2 + 1;
    EXPECT_NE(of_list().find("bytes or more, allowed: at most 549755813760"), std::string::npos) << of_list();
    static ncclTeamRequirements too_wide = {nullptr, ncclTeam{3, 0, 1}, true, nullptr};
    EXPECT_NE(create([](Reqs reqs, int) { reqs.teamRequirementsList = &too_wide; }).find("of an LSA team"),
              std::string::npos);
    EXPECT_NE(create([](Reqs reqs, int) { reqs.lsaLLA2ABlockCount = 1; }).find("use ncclLLA2ACreateRequirement"),
              std::string::npos);
    EXPECT_NE(create([](Reqs reqs, int) { reqs.magic = 0; }).find("NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER"),
              std::string::npos);
}

// Without requirements, without a pointer for the result, and with a deregistered window.
TEST(DeviceApi, MissingAndDestroyedObjectsAreNamed) {
    const auto create = [](const ncclDevCommRequirements* reqs, bool has_place) {
        return on_threads({.ranks = 1}, [=](TestRank& rank) {
            ncclDevComm comm;
            return ncclDevCommCreate(rank.self.comm, reqs, has_place ? &comm : nullptr);
        });
    };
    const ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    EXPECT_NE(create(nullptr, true).find("reqs or outDevComm is NULL"), std::string::npos);
    EXPECT_NE(create(&reqs, false).find("reqs or outDevComm is NULL"), std::string::npos);
    expect_message(
        {.ranks = 1},
        [](TestRank& rank) {
            const ncclWindow_t gone = rank.window;
            const ncclResult_t result = ncclCommWindowDeregister(rank.self.comm, gone);
            if (result != ncclSuccess) return result;
            return crossdockLaunch(
                rank.self.comm, 1, 1, 0, nullptr,
                +[](ncclDevComm comm, ncclWindow_t window) {
                    ncclGin(comm, 0).put(ncclTeamWorld(comm), 0, window, 0, window, 8, 8);
                },
                rank.comm, gone);
        },
        "is not a window registered with this communicator");
}

// A device communicator belongs to its process, and is destroyed once.
TEST(DeviceApi, AForkedChildIsRefused) {
    ncclComm_t comm = nullptr;
    ncclDevComm device;
    const ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    ASSERT_EQ(crossdockCommInitAll(&comm, 1), ncclSuccess);
    ASSERT_EQ(ncclDevCommCreate(comm, &reqs, &device), ncclSuccess);
    const pid_t child = fork();
    if (child == 0) {
        const bool is_refused = ncclDevCommDestroy(comm, &device) == ncclInvalidUsage &&
                                std::string(crossdockGetLastError()).find("before fork()") != std::string::npos;
        _exit(is_refused ? 0 : 1);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(ncclDevCommDestroy(comm, &device), ncclSuccess);
    EXPECT_EQ(ncclDevCommDestroy(comm, &device), ncclInvalidUsage);
    EXPECT_EQ(crossdockCommDestroy(comm), ncclSuccess);
}

// A wait is bounded, and names rank, block, signal, what was expected and what was seen.
TEST(DeviceApi, AWaitThatExpiresEndsTheKernel) {
    setenv("CROSSDOCK_GIN_TIMEOUT_MS", "50", 1);
    const std::string failure = on_threads({.ranks = 1}, launching(
                                                             1, 32, +[](ncclDevComm comm, ncclWindow_t) {
                                                                 ncclGin gin(comm, 0);
                                                                 gin.waitSignal(ncclCoopCta(), 3, 7);
                                                             }));
    EXPECT_NE(
        failure.find(
            "rank 0, block 0, thread 0 timed out after 50 ms waiting for signal 3 of context 0 at threads_test.cpp:"),
        std::string::npos)
        << failure;
    EXPECT_NE(failure.find("expected 7, seen 0"), std::string::npos) << failure;
    // So are loops of the kernel's own.
    const std::string own =
        on_threads({.ranks = 1}, launching(
                                     1, 1, +[](ncclDevComm, ncclWindow_t window) {
                                         int* word = static_cast<int*>(ncclGetLocalPointer(window, 0));
                                         while (cuda::atomic_ref<int>(*word).load(cuda::memory_order_acquire) == 0) {
                                         }
                                     }));
    EXPECT_NE(own.find("timed out after 50 ms waiting in a loop of its own"), std::string::npos) << own;
    unsetenv("CROSSDOCK_GIN_TIMEOUT_MS");
}

}  // namespace
