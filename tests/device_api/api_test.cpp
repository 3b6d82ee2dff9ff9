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
ncclResult_t with_lists(World& world, ncclDevCommRequirements reqs, ncclDevResourceRequirements* list,
                        const std::function<ncclResult_t(const ncclDevComm&)>& launch) {
    reqs.resourceRequirementsList = list;
    reqs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    ncclDevComm comm;
    ncclResult_t result = ncclDevCommCreate(world.self.comm, &reqs, &comm);
    if (result == ncclSuccess) result = launch(comm);
    return result == ncclSuccess ? ncclDevCommDestroy(world.self.comm, &comm) : result;
}

TEST(Api, BarriersOfAllKinds) {
    expect_success({.ranks = 4, .lsa_team = 2}, [](World& world) {
        ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
        reqs.barrierCount = reqs.lsaBarrierCount = reqs.worldGinBarrierCount = reqs.railGinBarrierCount = 2;
        reqs.ginContextCount = 2;
        ncclLsaBarrierHandle lsa;
        ncclGinBarrierHandle rail;
        ncclGinSignal_t own_signal = 0;
        ncclDevResourceRequirements of_lsa, of_rail, of_signal = {};
        of_signal.ginSignalCount = 1;
        of_signal.outGinSignalStart = &own_signal;
        ncclResult_t result = ncclLsaBarrierCreateRequirement(ncclTeamLsa(world.self.comm), 2, &lsa, &of_lsa);
        if (result != ncclSuccess) return result;
        // Wide enough for the whole world, which the kernel's last barrier is of.
        result = ncclGinBarrierCreateRequirement(world.self.comm, ncclTeamWorld(world.self.comm), 2, &rail, &of_rail);
        if (result != ncclSuccess) return result;
        of_lsa.next = &of_rail;
        of_rail.next = &of_signal;
        return with_lists(world, reqs, &of_lsa, [&](const ncclDevComm& comm) {
            return crossdockLaunch(world.self.comm, 1, 3, 0, nullptr, barriers, comm, world.window, lsa, rail,
                                   own_signal);
        });
    });
}

TEST(Api, BuffersOfRequirementLists) {
    expect_success({.ranks = 4, .lsa_team = 2}, [](World& world) {
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
        return with_lists(world, reqs, &first, [&](const ncclDevComm& comm) {
            return crossdockLaunch(world.self.comm, 1, 1, 0, nullptr, resources, comm, world.window, buffers[0],
                                   buffers[1]);
        });
    });
}

TEST(Api, SmallAllToAlls) {
    expect_success({.ranks = 3}, [](World& world) {
        ncclLLA2AHandle handle;
        ncclDevResourceRequirements list;
        const int slots = ncclLLA2ACalcSlots(6, sizeof(Triple));
        const ncclResult_t result = ncclLLA2ACreateRequirement(2, slots, &handle, &list);
        if (result != ncclSuccess) return result;
        return with_lists(world, NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER, &list, [&](const ncclDevComm& comm) {
            return crossdockLaunch(world.self.comm, 2, 2, 0, nullptr, small_all_to_alls, comm, world.window, handle);
        });
    });
}

TEST(Api, SumsAndCopiesOverTheLsaTeam) {
    for (const bool multimem : {false, true}) {
        expect_success({.ranks = 4, .lsa_team = 2}, [multimem](World& world) {
            ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
            reqs.lsaBarrierCount = 1;
            reqs.lsaMultimem = multimem;
            ncclMultimemHandle handle = {};
            ncclTeamRequirements team = {nullptr, ncclTeamLsa(world.self.comm), multimem, &handle};
            reqs.teamRequirementsList = &team;
            return with_lists(world, reqs, nullptr, [&](const ncclDevComm& comm) {
                return crossdockLaunch(world.self.comm, 1, 5, 0, nullptr, reductions, comm, world.window, handle,
                                       multimem);
            });
        });
    }
}

TEST(Api, PropertiesTellWhatIsThere) {
    EXPECT_EQ(on_threads({.ranks = 4, .lsa_team = 2},
                         [](World& world) {
                             ncclCommProperties props = NCCL_COMM_PROPERTIES_INITIALIZER;
                             const ncclResult_t result = ncclCommQueryProperties(world.self.comm, &props);
                             if (result != ncclSuccess) return result;
                             EXPECT_TRUE(props.rank == world.self.rank && props.nRanks == 4 && props.nLsaTeams == 2);
                             EXPECT_TRUE(props.deviceApiSupport && props.multimemSupport);
                             EXPECT_NE(props.ginType, NCCL_GIN_TYPE_NONE);
                             const ncclTeam rail = ncclTeamRail(world.self.comm);
                             EXPECT_EQ(ncclTeamRankToWorld(world.self.comm, rail, 1), 2 + world.self.rank % 2);
                             EXPECT_EQ(ncclTeamRankToLsa(world.self.comm, ncclTeamLsa(world.self.comm), 1), 1);
                             return ncclSuccess;
                         }),
              "");
}

}  // namespace
