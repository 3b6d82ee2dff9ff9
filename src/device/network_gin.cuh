// SPDX-License-Identifier: Apache-2.0
// Puts and signals by NCCL's GPU-initiated networking (GIN). The one file of the kernels that includes NCCL.
//
// A context orders only itself, so each peer has one of them for all that goes there. Signals are words of the window
// itself (VA signals): no number of them has to be asked for beforehand.
#pragma once

#include <nccl_device.h>

#include "device/network_handle.h"

namespace crossdock::gpu_gin::gin {

__device__ __forceinline__ const ncclDevComm& comm_of(const NetworkHandle& network) {
    return *static_cast<const ncclDevComm*>(network.device_comm);
}
__device__ __forceinline__ ncclWindow_t window_of(const NetworkHandle& network) {
    return static_cast<ncclWindow_t>(network.window);
}
__device__ __forceinline__ int context_of(const NetworkHandle& network, int peer) {
    return peer % static_cast<int>(comm_of(network).ginContextCount);
}

// Not inlined: a call costs little beside a message, and the kernels have few registers to spare.
inline __device__ __noinline__ void put(const NetworkHandle& network, int peer, uint64_t target, uint64_t source,
                                        uint64_t bytes) {
    const ncclDevComm& comm = comm_of(network);
    const ncclGin gin(comm, context_of(network, peer));
    gin.put(ncclTeamWorld(comm), peer, window_of(network), target, window_of(network), source, bytes);
}

inline __device__ __noinline__ void put_value(const NetworkHandle& network, int peer, uint64_t target, uint64_t value) {
    const ncclDevComm& comm = comm_of(network);
    const ncclGin gin(comm, context_of(network, peer));
    gin.putValue(ncclTeamWorld(comm), peer, window_of(network), target, value);
}

// With the signal in the same message, strong as the one that goes alone.
inline __device__ __noinline__ void put_with_signal(const NetworkHandle& network, int peer, uint64_t target,
                                                    uint64_t source, uint64_t bytes, uint64_t word, uint64_t increase) {
    const ncclDevComm& comm = comm_of(network);
    const ncclGin gin(comm, context_of(network, peer));
    gin.put(ncclTeamWorld(comm), peer, window_of(network), target, window_of(network), source, bytes,
            ncclGin_StrongVASignalAdd{window_of(network), word, increase});
}

inline __device__ __noinline__ void put_value_with_signal(const NetworkHandle& network, int peer, uint64_t target,
                                                          uint64_t value, uint64_t word, uint64_t increase) {
    const ncclDevComm& comm = comm_of(network);
    const ncclGin gin(comm, context_of(network, peer));
    gin.putValue(ncclTeamWorld(comm), peer, window_of(network), target, value,
                 ncclGin_StrongVASignalAdd{window_of(network), word, increase});
}

inline __device__ __noinline__ void signal(const NetworkHandle& network, int peer, uint64_t word, uint64_t increase) {
    const ncclDevComm& comm = comm_of(network);
    const ncclGin gin(comm, context_of(network, peer));
    gin.signal(ncclTeamWorld(comm), peer, ncclGin_StrongVASignalAdd{window_of(network), word, increase});
}

inline __device__ __noinline__ void flush(const NetworkHandle& network) {
    const ncclDevComm& comm = comm_of(network);
    for (int context = 0; context < static_cast<int>(comm.ginContextCount); ++context) {
        const ncclGin gin(comm, context);
        gin.flush(ncclCoopThread{});
    }
}

}  // namespace crossdock::gpu_gin::gin
