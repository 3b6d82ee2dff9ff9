// SPDX-License-Identifier: Apache-2.0
// How fast SMs load and store rows: between shared memory and the GPU's own memory or a peer's, by bulk copies, by
// ordinary loads and stores, or by both. High throughput cannot move rows faster inside a GPU (docs/performance.md).
//
// Usage: sm_rates [SMS], 24 by default. The device needs bulk copies (compute capability 9.0).
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "device/platform.h"
#include "device/ptx.cuh"

namespace crossdock::bench {
namespace {

using namespace ptx;

constexpr uint32_t kWarps = 14;  // a stage of 14 KiB each fits into shared memory
constexpr uint32_t kBarriersBytes = 1024;
constexpr uint64_t kMemoryBytes = uint64_t{2} << 30;  // far more than the L2 cache
constexpr int kRepetitions = 5;
constexpr int kDefaultSms = 24;

enum class By { kNothing, kBulk, kLanes, kHalfEach };
constexpr const char* kNames[] = {"-", "bulk", "lanes", "half each"};

struct Mix {
    uint32_t row_bytes;
    uint32_t loads;  // rows in each round of a warp
    By load;
    uint32_t stores;
    By store;
    uint32_t rounds;
};

struct Memory {
    const std::byte* source;
    std::byte* target;
};

void check(cudaError_t result, const char* call) {
    if (result == cudaSuccess) return;
    std::fprintf(stderr, "sm_rates: %s: %s\n", call, cudaGetErrorString(result));
    std::exit(1);
}

__device__ void load_by_lanes(std::byte* stage, const std::byte* row, uint32_t bytes) {
    for (uint32_t at = threadIdx.x % 32 * 16; at < bytes; at += 32 * 16)
        *reinterpret_cast<uint4*>(stage + at) = *reinterpret_cast<const uint4*>(row + at);
    fence_proxy_async_shared();
    __syncwarp();
}

__device__ void store_by_lanes(std::byte* row, const std::byte* stage, uint32_t bytes) {
    for (uint32_t at = threadIdx.x % 32 * 16; at < bytes; at += 32 * 16)
        *reinterpret_cast<uint4*>(row + at) = *reinterpret_cast<const uint4*>(stage + at);
}

__device__ void move_rows_of_warp(const Memory& memory, const Mix& mix) {
    extern __shared__ __align__(128) std::byte shared[];
    const uint32_t warp = threadIdx.x / 32;
    const bool is_leader = threadIdx.x % 32 == 0;
    std::byte* const stage = shared + kBarriersBytes + warp * mix.row_bytes;
    auto* const barrier = reinterpret_cast<uint64_t*>(shared) + warp;
    if (is_leader) mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    __syncwarp();
    const uint64_t rows = kMemoryBytes / mix.row_bytes;
    uint64_t row = (uint64_t{blockIdx.x} * kWarps + warp) * 977;
    uint32_t num_loads = 0;
    const bool stores_by_lanes = mix.store == By::kLanes || (mix.store == By::kHalfEach && warp % 2 == 1);
    for (uint32_t round = 0; round < mix.rounds; ++round) {
        if (is_leader) bulk_wait_group_read<0>();
        __syncwarp();
        for (uint32_t i = 0; i < mix.loads; ++i) {
            row = (row + 7919) % rows;
            const std::byte* const source = memory.source + row * mix.row_bytes;
            if (mix.load == By::kLanes) {
                load_by_lanes(stage, source, mix.row_bytes);
                continue;
            }
            if (is_leader) {
                mbarrier_arrive_expect_bytes(barrier, mix.row_bytes);
                bulk_load(stage, source, mix.row_bytes, barrier);
            }
            while (!mbarrier_try_wait(barrier, num_loads & 1)) {
            }
            ++num_loads;
        }
        for (uint32_t i = 0; i < mix.stores; ++i) {
            row = (row + 7919) % rows;
            std::byte* const target = memory.target + row * mix.row_bytes;
            if (stores_by_lanes) {
                store_by_lanes(target, stage, mix.row_bytes);
            } else if (is_leader) {
                bulk_store(target, stage, mix.row_bytes);
            }
        }
        if (is_leader) bulk_commit_group();
        __syncwarp();
    }
    if (is_leader) bulk_wait_group<0>();
}

__global__ void move_rows(Memory memory, Mix mix) {
    if constexpr (kHasBulkCopies) move_rows_of_warp(memory, mix);
}

// In seconds, the best of several.
double time_of(const Memory& memory, const Mix& mix, int sms) {
    cudaEvent_t begin = nullptr, end = nullptr;
    check(cudaEventCreate(&begin), "cudaEventCreate");
    check(cudaEventCreate(&end), "cudaEventCreate");
    float best_ms = 0;
    for (int i = 0; i < kRepetitions; ++i) {
        check(cudaEventRecord(begin), "cudaEventRecord");
        move_rows<<<sms, kWarps * 32, kBarriersBytes + kWarps * mix.row_bytes>>>(memory, mix);
        check(cudaEventRecord(end), "cudaEventRecord");
        check(cudaDeviceSynchronize(), "move_rows");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
        best_ms = i == 0 ? ms : std::min(best_ms, ms);
    }
    check(cudaEventDestroy(begin), "cudaEventDestroy");
    check(cudaEventDestroy(end), "cudaEventDestroy");
    return best_ms / 1e3;
}

void measure(const char* where, const Memory& memory, const Mix& mix, int sms) {
    const double rows = static_cast<double>(mix.rounds) * kWarps * mix.row_bytes / time_of(memory, mix, sms) / 1e9;
    std::printf("%-5s %5u %6u %-10s %6u %-10s %8.1f %8.1f\n", where, mix.row_bytes, mix.loads,
                kNames[static_cast<int>(mix.load)], mix.stores, kNames[static_cast<int>(mix.store)], rows * mix.loads,
                rows * mix.stores);
}

std::byte* allocate(int device) {
    void* memory = nullptr;
    check(cudaSetDevice(device), "cudaSetDevice");
    check(cudaMalloc(&memory, kMemoryBytes), "cudaMalloc");
    check(cudaMemset(memory, 1, kMemoryBytes), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaMemset");
    return static_cast<std::byte*>(memory);
}

int run(int argc, char** argv) {
    int major = 0, most = 0, devices = 0, reaches_peer = 0;
    check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
    const int sms = argc > 1 ? std::atoi(argv[1]) : kDefaultSms;
    if (major < 9 || argc > 2 || sms < 1 || sms > most) {
        std::fprintf(stderr, "sm_rates: usage: sm_rates [SMS], SMS from 1 to %d, on compute capability 9.0 and newer\n",
                     most);
        return 2;
    }
    if (devices > 1) check(cudaDeviceCanAccessPeer(&reaches_peer, 0, 1), "cudaDeviceCanAccessPeer");
    std::byte* const far = reaches_peer != 0 ? allocate(1) : nullptr;
    std::byte* const source = allocate(0);
    std::byte* const near = allocate(0);
    if (far != nullptr) check(cudaDeviceEnablePeerAccess(1, 0), "cudaDeviceEnablePeerAccess");
    check(cudaFuncSetAttribute(move_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024),
          "cudaFuncSetAttribute");
    std::printf("%d SMs, %u warps each, GB/s of an SM\n", sms, kWarps);
    std::printf("%-5s %5s %6s %-10s %6s %-10s %8s %8s\n", "to", "bytes", "loads", "by", "stores", "by", "load",
                "store");
    for (const uint32_t bytes : {14336u, 7168u}) {
        for (const Mix& mix : {Mix{bytes, 0, By::kNothing, 1, By::kBulk, 400},
                               {bytes, 0, By::kNothing, 1, By::kLanes, 400},
                               {bytes, 1, By::kBulk, 0, By::kNothing, 400},
                               {bytes, 1, By::kLanes, 0, By::kNothing, 400},
                               {bytes, 1, By::kBulk, 4, By::kBulk, 100},
                               {bytes, 2, By::kBulk, 9, By::kBulk, 50},
                               {bytes, 1, By::kLanes, 4, By::kBulk, 100},
                               {bytes, 1, By::kBulk, 4, By::kLanes, 100},
                               {bytes, 1, By::kBulk, 4, By::kHalfEach, 100}})
            measure("here", {source, near}, mix, sms);
        if (far != nullptr) measure("peer", {source, far}, {bytes, 1, By::kBulk, 1, By::kBulk, 200}, sms);
    }
    return 0;
}

}  // namespace
}  // namespace crossdock::bench

int main(int argc, char** argv) { return crossdock::bench::run(argc, argv); }
