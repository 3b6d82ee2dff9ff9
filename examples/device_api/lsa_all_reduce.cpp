// SPDX-License-Identifier: Apache-2.0
// The sum of all ranks' vectors, for ranks that load and store each other's memory: each adds up a part and stores it
// at all of them. Then the same by multimem, where the communicator has it: one load sums up, one store reaches all.
#include "ranks.h"

constexpr int kWords = 256;
constexpr int kBlocks = 2;

// The window holds the vector, which becomes the sum.
__global__ void all_reduce(ncclDevComm comm, ncclWindow_t window) {
    const ncclCoopCta block;
    ncclLsaBarrierSession<ncclCoopCta> barrier(block, comm, ncclTeamTagLsa(), blockIdx.x);
    // All vectors are there.
    barrier.sync(block, cuda::memory_order_acq_rel);
    const int num_threads = comm.nRanks * gridDim.x * blockDim.x;
    const int thread = (comm.rank * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
    for (int i = thread; i < kWords; i += num_threads) {
        float sum = 0;
        for (int rank = 0; rank < comm.nRanks; ++rank) {
            sum += *static_cast<const float*>(ncclGetLsaPointer(window, i * sizeof(float), rank));
        }
        for (int rank = 0; rank < comm.nRanks; ++rank) {
            *static_cast<float*>(ncclGetLsaPointer(window, i * sizeof(float), rank)) = sum;
        }
    }
    // All parts of the sum are there.
    barrier.sync(block, cuda::memory_order_acq_rel);
}

__global__ void all_reduce_multimem(ncclDevComm comm, ncclWindow_t window) {
    const ncclCoopCta block;
    ncclLsaBarrierSession<ncclCoopCta> barrier(block, comm, ncclTeamTagLsa(), blockIdx.x);
    barrier.sync(block, cuda::memory_order_acq_rel);
    const size_t part = (kWords - 1) / (comm.nRanks * gridDim.x) + 1;
    const size_t first = (comm.rank * gridDim.x + blockIdx.x) * part;
    if (first < kWords) {
        float* words = static_cast<float*>(ncclGetLsaMultimemPointer(window, first * sizeof(float), comm));
        ncclMultimemReduceSumCopy<float>(block, words, words, first + part < kWords ? part : kWords - first);
    }
    barrier.sync(block, cuda::memory_order_acq_rel);
}

bool sum_up(const Rank& self, void (*kernel)(ncclDevComm, ncclWindow_t), bool multimem) {
    ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    reqs.lsaBarrierCount = kBlocks;
    reqs.lsaMultimem = multimem;
    Session session;
    if (!session.open(self, kWords * sizeof(float), reqs)) return false;
    if (session.comm.lsaSize != self.num_ranks) {
        std::fprintf(stderr, "rank %d: the LSA team has %d of %d ranks, and this program needs all in one\n", self.rank,
                     session.comm.lsaSize, self.num_ranks);
        return session.close(self) && false;
    }

    std::vector<float> vector, sum;
    for (int i = 0; i < kWords; ++i) {
        vector.push_back(static_cast<float>(i + self.rank));
        sum.push_back(static_cast<float>(i * self.num_ranks + self.num_ranks * (self.num_ranks - 1) / 2));
    }
    if (!upload(session.memory, vector)) return false;
    CHECK(crossdockLaunch(self.comm, kBlocks, 8, 0, nullptr, kernel, session.comm, session.window));
    if (cudaStreamSynchronize(nullptr) != cudaSuccess) return false;
    const bool passed = download<float>(session.memory, kWords) == sum;
    return session.close(self) && passed;
}

bool program(const Rank& self) {
    ncclCommProperties props = NCCL_COMM_PROPERTIES_INITIALIZER;
    CHECK(ncclCommQueryProperties(self.comm, &props));
    return sum_up(self, all_reduce, false) && (!props.multimemSupport || sum_up(self, all_reduce_multimem, true));
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
