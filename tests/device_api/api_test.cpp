// SPDX-License-Identifier: Apache-2.0
// NCCL's Device API, call by call: the kernels of api_kernels.h end without a message over threads, processes and
// hosts, posted directly and by the proxy, and with many seeds of the simulator, which here sees every load and store.
#include "api_kernels.h"

#include <gtest/gtest.h>

#include "ways.h"

namespace {

constexpr uint64_t kSeeds = 200;

void expect_success(const Setup& setup, const Body& body, uint64_t num_seeds = kSeeds) {
    for (const Way& way : kWays) EXPECT_EQ(on(way, setup, body), "") << way.name();
    EXPECT_EQ(in_simulations(setup, num_seeds, body), "");
}

TEST(Api, GetsArriveBeforeTheirFlushReturns) { expect_success({.ranks = 3}, launching(1, 4, gets)); }
TEST(Api, GetsArriveBeforeABarriersFence) {
    expect_success({.ranks = 4, .lsa_team = 2}, launching(1, 32, fenced_gets));
}
TEST(Api, VaSignalsCountInWindows) { expect_success({.ranks = 3}, launching(1, 2, va_signals)); }
TEST(Api, GroupsOfThreads) { expect_success({.ranks = 2}, launching(2, 64, groups), 10); }

// A device communicator of the body's own, with a requirement list.
ncclResult_t with_lists(TestRank& rank, ncclDevCommRequirements reqs, ncclDevResourceRequirements* list,
                        const std::function<ncclResult_t(const ncclDevComm&)>& launch) {
    reqs.resourceRequirementsList = list;
    reqs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    ncclDevComm comm;
    ncclResult_t result = ncclDevCommCreate(rank.self.comm, &reqs, &comm);
    if (result == ncclSuccess) result = launch(comm);
    return result == ncclSuccess ? ncclDevCommDestroy(rank.self.comm, &comm) : result;
}

TEST(Api, BarriersOfAllKinds) {
    expect_success({.ranks = 4, .lsa_team = 2}, [](TestRank& rank) {
        ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
        reqs.barrierCount = reqs.lsaBarrierCount = reqs.worldGinBarrierCount = reqs.railGinBarrierCount = 2;
        reqs.ginContextCount = 2;
        ncclLsaBarrierHandle lsa;
        ncclGinBarrierHandle rail;
        ncclGinSignal_t own_signal = 0;
        ncclDevResourceRequirements of_lsa, of_rail, of_signal = {};
        of_signal.ginSignalCount = 1;
        of_signal.outGinSignalStart = &own_signal;
        ncclResult_t result = ncclLsaBarrierCreateRequirement(ncclTeamLsa(rank.self.comm), 2, &lsa, &of_lsa);
        if (result != ncclSuccess) return result;
        // Sized for all ranks, which the kernel's last barrier needs.
        result = ncclGinBarrierCreateRequirement(rank.self.comm, ncclTeamWorld(rank.self.comm), 2, &rail, &of_rail);
        if (result != ncclSuccess) return result;
        of_lsa.next = &of_rail;
        of_rail.next = &of_signal;
        return with_lists(rank, reqs, &of_lsa, [&](const ncclDevComm& comm) {
            return crossdockLaunch(rank.self.comm, 1, 3, 0, nullptr, barriers, comm, rank.window, lsa, rail,
                                   own_signal);
        });
    });
}

TEST(Api, BuffersOfRequirementLists) {
    expect_success({.ranks = 4, .lsa_team = 2}, [](TestRank& rank) {
        ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
        reqs.lsaBarrierCount = 1;
        ncclDevResourceHandle buffers[2];
        ncclDevResourceRequirements first = {}, second = {};
        first.next = &second;
        first.bufferSize = 20;
        first.outBufferHandle = &buffers[0];
        second.bufferSize = 100;
        second.bufferAlign = 512;
        second.outBufferHandle = &buffers[1];
        return with_lists(rank, reqs, &first, [&](const ncclDevComm& comm) {
            return crossdockLaunch(rank.self.comm, 1, 1, 0, nullptr, resources, comm, rank.window, buffers[0],
                                   buffers[1]);
        });
    });
}

// From the first epoch on, and where the epochs' 32 bits wrap around.
TEST(Api, SmallAllToAlls) {
    for (const uint32_t first_epoch : {2u, ~0u - 4, ~0u - 1, ~0u}) {
        SCOPED_TRACE(first_epoch);
        const int slots = ncclLLA2ACalcSlots(4 * 3, sizeof(Triple));
        expect_success({.ranks = 3, .all_to_all_slots = slots}, [first_epoch](TestRank& rank) {
            return crossdockLaunch(rank.self.comm, 2, 2, 0, nullptr, small_all_to_alls, rank.comm, rank.window,
                                   rank.all_to_all, first_epoch);
        });
    }
}

TEST(Api, SumsAndCopiesOverTheLsaTeam) {
    for (const bool multimem : {false, true}) {
        expect_success({.ranks = 4, .lsa_team = 2}, [multimem](TestRank& rank) {
            ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
            reqs.lsaBarrierCount = 1;
            reqs.lsaMultimem = multimem;
            ncclMultimemHandle handle = {};
            ncclTeamRequirements team = {nullptr, ncclTeamLsa(rank.self.comm), multimem, &handle};
            reqs.teamRequirementsList = &team;
            return with_lists(rank, reqs, nullptr, [&](const ncclDevComm& comm) {
                return crossdockLaunch(rank.self.comm, 1, 5, 0, nullptr, reductions, comm, rank.window, handle,
                                       multimem);
            });
        });
    }
}

TEST(Api, PropertiesAreThoseOfTheCommunicator) {
    EXPECT_EQ(on_threads({.ranks = 4, .lsa_team = 2},
                         [](TestRank& rank) {
                             ncclCommProperties props = NCCL_COMM_PROPERTIES_INITIALIZER;
                             const ncclResult_t result = ncclCommQueryProperties(rank.self.comm, &props);
                             if (result != ncclSuccess) return result;
                             EXPECT_TRUE(props.rank == rank.self.rank && props.nRanks == 4 && props.nLsaTeams == 2);
                             EXPECT_TRUE(props.deviceApiSupport && props.multimemSupport);
                             EXPECT_NE(props.ginType, NCCL_GIN_TYPE_NONE);
                             const ncclTeam rail = ncclTeamRail(rank.self.comm);
                             EXPECT_EQ(ncclTeamRankToWorld(rank.self.comm, rail, 1), 2 + rank.self.rank % 2);
                             EXPECT_EQ(ncclTeamRankToLsa(rank.self.comm, ncclTeamLsa(rank.self.comm), 1), 1);
                             return ncclSuccess;
                         }),
              "");
}

}  // namespace
