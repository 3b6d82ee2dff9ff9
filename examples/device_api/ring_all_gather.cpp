// SPDX-License-Identifier: Apache-2.0
// Every rank ends up with the pieces of all ranks: each hands on to its neighbour what it got last.
#include "ranks.h"

constexpr int kWords = 64;  // of a piece
constexpr size_t kBytes = kWords * sizeof(int);

// The window holds a piece for every rank; the own one is filled.
__global__ void ring_all_gather(ncclDevComm comm, ncclWindow_t window) {
    const ncclCoopCta block;
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    const int next = (comm.rank + 1) % comm.nRanks;
    for (int step = 0; step < comm.nRanks - 1; ++step) {
        // Pieces arrive in any order, so each has a signal of its own.
        const int piece = (comm.rank - step + comm.nRanks) % comm.nRanks;
        if (step > 0) gin.waitSignal(block, piece, 1);
        const size_t place = piece * kBytes;
        gin.put(world, next, window, place, window, place, kBytes,
                ncclGin_WeakSignalInc{static_cast<ncclGinSignal_t>(piece)}, ncclGin_None{}, block);
    }
    // The last piece is not handed on; the host reads it.
    gin.waitSignal(block, (comm.rank + 1) % comm.nRanks, comm.nRanks > 1 ? 1 : 0);
    // Nor may the host change a piece that is still being read.
    gin.flush(block);
}

bool program(const Rank& self) {
    ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    reqs.ginSignalCount = self.num_ranks;
    reqs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    Session session;
    if (!session.open(self, self.num_ranks * kBytes, reqs)) return false;

    std::vector<int> all;
    for (int i = 0; i < self.num_ranks * kWords; ++i) all.push_back(1000 + 7 * i);
    const std::vector<int> own(all.begin() + self.rank * kWords, all.begin() + (self.rank + 1) * kWords);
    if (!upload(static_cast<char*>(session.memory) + self.rank * kBytes, own)) return false;
    CHECK(crossdockLaunch(self.comm, 1, 32, 0, nullptr, ring_all_gather, session.comm, session.window));
    if (cudaStreamSynchronize(nullptr) != cudaSuccess) return false;
    const bool passed = download<int>(session.memory, all.size()) == all;
    return session.close(self) && passed;
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
