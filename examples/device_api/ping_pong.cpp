// SPDX-License-Identifier: Apache-2.0
// Two ranks send a message back and forth: a put whose signal tells that it has arrived.
#include "ranks.h"

constexpr int kRounds = 8;
constexpr int kWords = 64;

// The window holds what is sent, then what is received: kWords each.
__global__ void ping_pong(ncclDevComm comm, ncclWindow_t window, int* num_wrong) {
    const ncclCoopCta block;
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    const int peer = 1 - comm.rank;
    int* sent = static_cast<int*>(ncclGetLocalPointer(window, 0));
    const int* received = sent + kWords;

    for (int round = 0; round < kRounds; ++round) {
        const bool is_first = comm.rank == round % 2;
        if (!is_first) {
            // Since signals grow, the next round waits for one more.
            gin.waitSignal(block, 0, round / 2 + 1);
            for (int i = threadIdx.x; i < kWords; i += blockDim.x) {
                if (received[i] != 100 * round + i) atomicAdd(num_wrong, 1);
            }
        } else {
            for (int i = threadIdx.x; i < kWords; i += blockDim.x) sent[i] = 100 * round + i;
            // The group meets in put: all of its stores come before it. No flush: the answer tells that the message has
            // arrived, and then its source may change.
            gin.put(world, peer, window, kWords * sizeof(int), window, 0, kWords * sizeof(int),
                    ncclGin_WeakSignalInc{0}, ncclGin_None{}, block);
        }
    }
}

bool program(const Rank& self) {
    ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    reqs.ginSignalCount = 1;
    reqs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    Session session;
    if (!session.open(self, 2 * kWords * sizeof(int), reqs, sizeof(int))) return false;

    int* num_wrong = static_cast<int*>(session.own);
    CHECK(crossdockLaunch(self.comm, 1, 32, 0, nullptr, ping_pong, session.comm, session.window, num_wrong));
    if (cudaStreamSynchronize(nullptr) != cudaSuccess) return false;
    const bool passed = download<int>(num_wrong, 1) == std::vector<int>{0};
    return session.close(self) && passed;
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program, {2, 2, 2}); }
