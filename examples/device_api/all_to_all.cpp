// SPDX-License-Identifier: Apache-2.0
// Every rank sends a piece to every rank: first by puts alone, then with stores to the ranks of its LSA team and puts
// to the others. NCCL_LSA_TEAM_SIZE=2 makes LSA teams of two ranks.
#include "ranks.h"

constexpr int kWords = 32;  // of a piece
constexpr size_t kBytes = kWords * sizeof(int);

// The window holds a piece for each rank, then room for one of each rank.
__global__ void pure_gin(ncclDevComm comm, ncclWindow_t window) {
    const ncclCoopCta block;
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    const size_t target = (comm.nRanks + comm.rank) * kBytes;
    for (int peer = threadIdx.x; peer < comm.nRanks; peer += blockDim.x) {
        gin.put(world, peer, window, target, window, peer * kBytes, kBytes, ncclGin_WeakSignalInc{0});
    }
    // One signal counts the pieces of all ranks: each brings its own, whichever comes first.
    gin.waitSignal(block, 0, comm.nRanks);
    gin.flush(block);
}

__global__ void hybrid(ncclDevComm comm, ncclWindow_t window) {
    const ncclCoopCta block;
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    const ncclTeam lsa = ncclTeamLsa(comm);
    ncclLsaBarrierSession<ncclCoopCta> barrier(block, comm, ncclTeamTagLsa(), blockIdx.x);
    const size_t target = (comm.nRanks + comm.rank) * kBytes;
    const int num_far = comm.nRanks - lsa.nRanks;
    for (int i = threadIdx.x; i < num_far; i += blockDim.x) {
        const int peer = ncclTeamRankInDifference(world, lsa, i);
        gin.put(world, peer, window, target, window, peer * kBytes, kBytes, ncclGin_WeakSignalInc{1});
    }
    for (int near = 0; near < lsa.nRanks; ++near) {
        const int peer = ncclTeamRankToWorld(comm, lsa, near);
        const int* source = static_cast<const int*>(ncclGetLocalPointer(window, peer * kBytes));
        int* words = static_cast<int*>(ncclGetLsaPointer(window, target, near));
        for (int i = threadIdx.x; i < kWords; i += blockDim.x) words[i] = source[i];
    }
    barrier.sync(block, cuda::memory_order_acq_rel);
    gin.waitSignal(block, 1, num_far);
    gin.flush(block);
}

bool program(const Rank& self) {
    ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    reqs.lsaBarrierCount = 1;
    reqs.ginSignalCount = 2;
    reqs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    Session session;
    const size_t bytes = self.num_ranks * kBytes;
    if (!session.open(self, 2 * bytes, reqs)) return false;

    bool passed = true;
    for (const auto kernel : {pure_gin, hybrid}) {
        const int first = kernel == hybrid ? 5000 : 0;
        std::vector<int> sent, expected;
        for (int peer = 0; peer < self.num_ranks; ++peer) {
            for (int i = 0; i < kWords; ++i) {
                sent.push_back(first + 100 * self.rank + 10 * peer + i);
                expected.push_back(first + 100 * peer + 10 * self.rank + i);
            }
        }
        if (!upload(session.memory, sent)) return false;
        CHECK(crossdockLaunch(self.comm, 1, 8, 0, nullptr, kernel, session.comm, session.window));
        if (cudaStreamSynchronize(nullptr) != cudaSuccess) return false;
        passed = passed && download<int>(static_cast<char*>(session.memory) + bytes, expected.size()) == expected;
        // A rank that is ahead writes into windows that the host of another still reads: all wait here.
        passed = passed && meet_on_host(self);
    }
    return session.close(self) && passed;
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
