// SPDX-License-Identifier: Apache-2.0
// Launches kernels: on a GPU's stream, or on the calling thread.
//
// A kernel is a type with its arguments (Args) and its name in messages (kName), listed in its mode's launch.h. Its
// code is in a .cpp of the mode for CPUs and a .cu for GPUs (kernels, or dispatch and combine). A kernel that accesses
// other ranks has `reach`, a function that returns the Reach in its arguments: it is compiled twice, for LSA peers only
// and for LSA and GIN peers, and launch() chooses.
#pragma once

#include "device/platform.h"
#include "runtime/runtime.h"

namespace crossdock {

// A kernel compiled for one kind of processor and peers. Both files instantiate it; in builds without
// CUDA a without_gpus.cpp replaces the second.
template <typename Kernel, Peers kReached>
struct OnCpu {
    static void launch(cpu::Executor& executor, const typename Kernel::Args& args, const LaunchShape& shape);
};
template <typename Kernel, Peers kReached>
struct OnGpu {
    static void launch(const typename Kernel::Args& args, const LaunchShape& shape, cudaStream_t stream);
};

// executor: null for the current CUDA device.
template <typename Kernel, Peers kReached = Peers::kLsa>
void launch(cpu::Executor* executor, const typename Kernel::Args& args, const LaunchShape& shape, cudaStream_t stream) {
    if (executor != nullptr) return OnCpu<Kernel, kReached>::launch(*executor, args, shape);
    OnGpu<Kernel, kReached>::launch(args, shape, stream);
}

// Throws if the launch fails.
template <typename Kernel>
void launch(Runtime& runtime, const typename Kernel::Args& args, const LaunchShape& shape, cudaStream_t stream) {
    cpu::Executor* const executor = runtime.cpu_executor();
    if constexpr (requires { Kernel::reach(args); }) {
        if (Kernel::reach(args).has_several_teams())
            return launch<Kernel, Peers::kLsaAndGin>(executor, args, shape, stream);
    }
    launch<Kernel, Peers::kLsa>(executor, args, shape, stream);
}

// One block, with gpu_warps warps on GPUs and one on CPUs.
inline LaunchShape one_block(Runtime& runtime, int gpu_warps, size_t shared_bytes) {
    return {1, runtime.cpu_executor() == nullptr ? gpu_warps : 1, shared_bytes};
}

}  // namespace crossdock
