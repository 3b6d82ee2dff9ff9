// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include "device/ptx.cuh"

namespace crossdock::plugin_test {
namespace {

constexpr int kThreads = 256;
constexpr uint64_t kTimeoutNs = 10'000'000'000;

__device__ uint64_t pattern(uint32_t round, uint32_t source, uint32_t target, uint64_t place) {
    return (place * 0x9e3779b97f4a7c15 + round * 1000003ull) ^ (static_cast<uint64_t>(source) << 56) ^
           (static_cast<uint64_t>(target) << 48);
}

__device__ void report(const Job& job, const Failure& failure) {
    if (atomicCAS(reinterpret_cast<uint32_t*>(&job.failure->step), 0u, static_cast<uint32_t>(failure.step)) != 0)
        return;
    *job.failure = failure;
}

__device__ bool has_failed(const Job& job) { return *reinterpret_cast<volatile uint32_t*>(&job.failure->step) != 0; }

// A bounded wait: GIN's own would wait for ever.
template <class Read>
__device__ void wait_for(const Job& job, Read read, uint64_t least, Step step, uint32_t peer, uint32_t round) {
    const uint64_t end = ptx::global_timer_ns() + kTimeoutNs;
    uint64_t seen = read();
    while (static_cast<int64_t>(seen - least) < 0 && !has_failed(job)) {
        if (ptx::global_timer_ns() > end) report(job, {step, 1, peer, round, 0, least, seen});
        seen = read();
    }
}

__device__ void fill(const Job& job, uint32_t round, uint32_t salt) {
    for (uint32_t peer = 0; peer < job.layout.num_ranks; ++peer) {
        auto* words = reinterpret_cast<uint64_t*>(job.local + job.layout.sent(peer));
        for (uint64_t i = threadIdx.x; i < job.bytes / 8; i += blockDim.x) {
            words[i] = pattern(round + salt, job.comm.rank, peer, i);
        }
    }
    __syncthreads();
}

__device__ void check(const Job& job, Step step, uint64_t offset, uint32_t source, uint32_t target, uint32_t round,
                      uint32_t salt, uint64_t bytes) {
    const auto* words = reinterpret_cast<const volatile uint64_t*>(job.local + offset);
    for (uint64_t i = threadIdx.x; i < bytes / 8; i += blockDim.x) {
        const uint64_t expected = pattern(round + salt, source, target, i);
        const uint64_t seen = words[i];
        if (seen != expected) report(job, {step, 0, source, round, i, expected, seen});
    }
}

struct Ids {
    uint32_t ranks;
    __device__ ncclGinSignal_t weak(uint32_t source) const { return source; }
    __device__ ncclGinSignal_t strong(uint32_t source) const { return ranks + source; }
    __device__ ncclGinSignal_t value(uint32_t source) const { return 2 * ranks + source; }
    __device__ ncclGinSignal_t acknowledged(uint32_t source) const { return 3 * ranks + source; }
};

// All ranks have checked what they received, so it may be overwritten.
__device__ void acknowledge(const Job& job, const ncclGin& gin, const Ids& ids, uint64_t turn, uint32_t round) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const ncclTeam world = ncclTeamWorld(job.comm);
        for (uint32_t peer = 0; peer < ids.ranks; ++peer) {
            gin.signal(world, peer, ncclGin_WeakSignalInc{ids.acknowledged(job.comm.rank)});
        }
        for (uint32_t peer = 0; peer < ids.ranks; ++peer) {
            wait_for(
                job, [&] { return gin.readSignal(ids.acknowledged(peer)); }, turn, Step::kAcknowledged, peer, round);
        }
    }
    __syncthreads();
}

__global__ void orders(Job job) {
    const uint32_t self = job.comm.rank;
    const auto ranks = static_cast<uint32_t>(job.layout.num_ranks);
    const Ids ids{ranks};
    const ncclTeam world = ncclTeamWorld(job.comm);
    ncclGin gin(job.comm, 0);
    const Layout& layout = job.layout;
    const bool leads = threadIdx.x == 0;
    for (uint32_t i = 1; i <= job.rounds && !has_failed(job); ++i) {
        const uint32_t round = job.first_round + i;
        const uint64_t turns = (round - 1) * 4ull;

        // A put with a weak signal; the counter says when its source may be reused, and it is, at once.
        fill(job, round, 0);
        if (leads) {
            for (uint32_t peer = 0; peer < ranks; ++peer) {
                gin.put(world, peer, job.window, layout.received(self), job.window, layout.sent(peer), job.bytes,
                        ncclGin_WeakSignalInc{ids.weak(self)}, ncclGin_WeakCounterInc{0});
            }
            wait_for(
                job, [&] { return gin.readCounter(0); }, uint64_t{round} * ranks, Step::kCounter, 0, round);
        }
        __syncthreads();
        fill(job, round, 7000);
        if (leads) {
            for (uint32_t peer = 0; peer < ranks; ++peer) {
                wait_for(
                    job, [&] { return gin.readSignal(ids.weak(peer)); }, round, Step::kWeakSignal, peer, round);
            }
        }
        __syncthreads();
        for (uint32_t peer = 0; peer < ranks; ++peer) {
            check(job, Step::kWeakSignal, layout.received(peer), peer, self, round, 0, job.bytes);
        }
        acknowledge(job, gin, ids, turns + 1, round);

        // Halves without a signal, then a strong one: it comes after both. A flush lets their source be reused.
        if (leads) {
            const uint64_t half = job.bytes / 16 * 8;
            for (uint32_t peer = 0; peer < ranks; ++peer) {
                gin.put(world, peer, job.window, layout.received(self), job.window, layout.sent(peer), half);
                gin.put(world, peer, job.window, layout.received(self) + half, job.window, layout.sent(peer) + half,
                        job.bytes - half);
                gin.signal(world, peer, ncclGin_StrongSignalInc{ids.strong(self)});
            }
            gin.flush(ncclCoopThread{});
        }
        __syncthreads();
        fill(job, round, 9000);
        if (leads) {
            for (uint32_t peer = 0; peer < ranks; ++peer) {
                wait_for(
                    job, [&] { return gin.readSignal(ids.strong(peer)); }, round, Step::kStrongSignal, peer, round);
            }
        }
        __syncthreads();
        for (uint32_t peer = 0; peer < ranks; ++peer) {
            check(job, Step::kStrongSignal, layout.received(peer), peer, self, round, 7000, job.bytes);
        }
        acknowledge(job, gin, ids, turns + 2, round);

        // A value in the descriptor, with a signal that adds; and a signal in a word of the window.
        if (leads) {
            for (uint32_t peer = 0; peer < ranks; ++peer) {
                gin.putValue(world, peer, job.window, layout.received(self), pattern(round, self, peer, 0),
                             ncclGin_StrongSignalAdd{ids.value(self), 3});
                gin.put(world, peer, job.window, layout.received(self) + 8, job.window, layout.sent(peer) + 8,
                        job.bytes - 8, ncclGin_StrongVASignalAdd{job.window, layout.word(self), 5});
            }
            for (uint32_t peer = 0; peer < ranks; ++peer) {
                wait_for(
                    job, [&] { return gin.readSignal(ids.value(peer)); }, 3ull * round, Step::kValue, peer, round);
                const uint64_t seen = *reinterpret_cast<volatile uint64_t*>(job.local + layout.received(peer));
                const uint64_t expected = pattern(round, peer, self, 0);
                if (seen != expected) report(job, {Step::kValue, 0, peer, round, 0, expected, seen});
                wait_for(
                    job, [&] { return gin.readSignal(job.window, layout.word(peer)); }, 5ull * round,
                    Step::kVirtualSignal, peer, round);
            }
        }
        __syncthreads();
        for (uint32_t peer = 0; peer < ranks; ++peer) {
            const auto* words = reinterpret_cast<const volatile uint64_t*>(job.local + layout.received(peer));
            for (uint64_t k = 1 + threadIdx.x; k < job.bytes / 8; k += blockDim.x) {
                const uint64_t expected = pattern(round + 9000, peer, self, k);
                const uint64_t seen = words[k];
                if (seen != expected) report(job, {Step::kVirtualSignal, 0, peer, round, k, expected, seen});
            }
        }
        acknowledge(job, gin, ids, turns + 3, round);

        // A get, there after a flush.
        if (leads) {
            for (uint32_t peer = 0; peer < ranks; ++peer) {
                gin.get(world, peer, job.window, layout.sent(self), job.window, layout.got(peer), job.bytes);
            }
            gin.flush(ncclCoopThread{});
        }
        __syncthreads();
        for (uint32_t peer = 0; peer < ranks; ++peer) {
            check(job, Step::kGet, layout.got(peer), peer, self, round, 9000, job.bytes);
        }
        acknowledge(job, gin, ids, turns + 4, round);
    }
}

__global__ void ping_pong(Job job) {
    const uint32_t self = job.comm.rank;
    const uint32_t peer = 1 - self;
    const Ids ids{static_cast<uint32_t>(job.layout.num_ranks)};
    const ncclTeam world = ncclTeamWorld(job.comm);
    ncclGin gin(job.comm, 0);
    const uint64_t begin = ptx::global_timer_ns();
    for (uint32_t i = 1; i <= job.rounds && !has_failed(job); ++i) {
        if (self == 1)
            wait_for(
                job, [&] { return gin.readSignal(ids.weak(peer)); }, job.signals_before + i, Step::kWeakSignal, peer,
                i);
        gin.put(world, peer, job.window, job.layout.received(self), job.window, job.layout.sent(peer), job.bytes,
                ncclGin_WeakSignalInc{ids.weak(self)});
        if (self == 0)
            wait_for(
                job, [&] { return gin.readSignal(ids.weak(peer)); }, job.signals_before + i, Step::kWeakSignal, peer,
                i);
    }
    job.times[0] = ptx::global_timer_ns() - begin;
}

// Rank 0 puts, rank 1 tells when everything has landed.
__global__ void stream_puts(Job job) {
    const uint32_t self = job.comm.rank;
    const uint32_t peer = 1 - self;
    const Ids ids{static_cast<uint32_t>(job.layout.num_ranks)};
    const ncclTeam world = ncclTeamWorld(job.comm);
    ncclGin gin(job.comm, 0);
    const uint64_t begin = ptx::global_timer_ns();
    if (self == 0) {
        for (uint32_t i = 0; i < job.rounds; ++i) {
            gin.put(world, peer, job.window, job.layout.received(self), job.window, job.layout.sent(peer), job.bytes);
        }
    } else {
        wait_for(
            job, [&] { return gin.readSignal(ids.strong(peer)); }, job.signals_before + 1, Step::kStrongSignal, peer,
            0);
    }
    gin.signal(world, peer, ncclGin_StrongSignalInc{ids.strong(self)});
    if (self == 0)
        wait_for(
            job, [&] { return gin.readSignal(ids.strong(peer)); }, job.signals_before + 1, Step::kStrongSignal, peer,
            1);
    job.times[0] = ptx::global_timer_ns() - begin;
}

}  // namespace

cudaError_t load_kernels() {
    for (void (*kernel)(Job) : {orders, ping_pong, stream_puts}) {
        cudaFuncAttributes attributes{};
        const cudaError_t result = cudaFuncGetAttributes(&attributes, kernel);
        if (result != cudaSuccess) return result;
    }
    return cudaSuccess;
}

void launch_orders(const Job& job, cudaStream_t stream) { orders<<<1, kThreads, 0, stream>>>(job); }
void launch_ping_pong(const Job& job, cudaStream_t stream) {
    if (job.comm.rank < 2) ping_pong<<<1, 1, 0, stream>>>(job);
}
void launch_stream(const Job& job, cudaStream_t stream) {
    if (job.comm.rank < 2) stream_puts<<<1, 1, 0, stream>>>(job);
}

}  // namespace crossdock::plugin_test
