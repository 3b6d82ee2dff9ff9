// SPDX-License-Identifier: Apache-2.0
// Tokens go to the ranks of their experts, as in a dispatch of expert parallelism: each token by a put of its own, then
// their number by a strong signal, which follows them all.
#include "ranks.h"

constexpr int kTokens = 6;  // of a rank
constexpr int kWords = 16;  // of a token
constexpr size_t kBytes = kWords * sizeof(int);

__host__ __device__ inline int expert_of(int rank, int token, int num_ranks) {
    return (3 * rank + token * token) % num_ranks;
}

// The window holds the own tokens, then for each rank room for all of its tokens. num_received: [ranks].
__global__ void push(ncclDevComm comm, ncclWindow_t window, int* num_received) {
    const ncclCoopCta block;
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    __shared__ int num_sent[64];
    for (int peer = threadIdx.x; peer < comm.nRanks; peer += blockDim.x) num_sent[peer] = 0;
    __syncthreads();
    for (int token = threadIdx.x; token < kTokens; token += blockDim.x) {
        const int peer = expert_of(comm.rank, token, comm.nRanks);
        const int slot = atomicAdd(&num_sent[peer], 1);
        gin.put(world, peer, window, (kTokens * (1 + comm.rank) + slot) * kBytes, window, token * kBytes, kBytes);
    }
    __syncthreads();
    // A signal of each sender: 1 + its number of tokens. Strong, since it stands for all puts before it.
    for (int peer = threadIdx.x; peer < comm.nRanks; peer += blockDim.x) {
        gin.signal(world, peer,
                   ncclGin_StrongSignalAdd{static_cast<ncclGinSignal_t>(comm.rank), 1ull + num_sent[peer]});
    }
    for (int peer = threadIdx.x; peer < comm.nRanks; peer += blockDim.x) {
        gin.waitSignal(ncclCoopThread(), peer, 1);
        num_received[peer] = static_cast<int>(gin.readSignal(peer)) - 1;
    }
    gin.flush(block);
}

bool program(const Rank& self) {
    if (self.num_ranks > 64) return false;
    ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    reqs.ginSignalCount = self.num_ranks;
    reqs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    Session session;
    const size_t bytes = (1 + self.num_ranks) * kTokens * kBytes;
    if (!session.open(self, bytes, reqs, self.num_ranks * sizeof(int))) return false;

    std::vector<int> tokens;
    for (int i = 0; i < kTokens * kWords; ++i) tokens.push_back(1000 * self.rank + i);
    int* counts = static_cast<int*>(session.own);
    if (!upload(session.memory, tokens)) return false;
    CHECK(crossdockLaunch(self.comm, 1, 8, 0, nullptr, push, session.comm, session.window, counts));
    if (cudaStreamSynchronize(nullptr) != cudaSuccess) return false;

    // Each token for this rank has come once, from wherever, in any slot.
    const std::vector<int> num_received = download<int>(counts, self.num_ranks);
    const std::vector<int> rows = download<int>(session.memory, (1 + self.num_ranks) * kTokens * kWords);
    bool passed = true;
    for (int rank = 0; rank < self.num_ranks; ++rank) {
        std::vector<int> expected, received;
        for (int token = 0; token < kTokens; ++token) {
            if (expert_of(rank, token, self.num_ranks) == self.rank) expected.push_back(1000 * rank + token * kWords);
        }
        for (int slot = 0; slot < num_received[rank]; ++slot) {
            const int* row = &rows[(kTokens * (1 + rank) + slot) * kWords];
            received.push_back(row[0]);
            for (int i = 0; i < kWords; ++i) passed = passed && row[i] == row[0] + i;
        }
        std::sort(received.begin(), received.end());
        passed = passed && received == expected;
    }
    return session.close(self) && passed;
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
