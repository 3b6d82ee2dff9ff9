// SPDX-License-Identifier: Apache-2.0
// Launches users' kernels, written against NCCL's Device API.
#include <algorithm>
#include <cstring>

#include "core/boundary.h"
#include "core/environment_value.h"
#include "core/log.h"
#include "device_api/kernel_thread.h"
#include "fabric/communicator.h"
#include "runtime/cpu/idle_backoff.h"
#include "runtime/cpu/stack_overflow.h"

using namespace crossdock;

namespace {

constexpr unsigned kMaxThreads = 1024;  // of a block
constexpr unsigned kMaxBlocks = 65'535;
constexpr uint64_t kDefaultTimeoutNs = 60'000'000'000;
constexpr uint64_t kDefaultStackKib = 1024;  // twice the local memory of a GPU's thread
constexpr uint64_t kMaxStackKib = 1 << 20;
constexpr int kStaleByte = 0xcd;  // a GPU's shared memory is not zeroed either

unsigned product(const unsigned (&size)[3], unsigned max, const char* what) {
    const uint64_t product = uint64_t{size[0]} * size[1] * size[2];
    require(size[0] <= max && size[1] <= max && size[2] <= max && product >= 1 && product <= max, ncclInvalidArgument,
            "a launch with {} ({} x {} x {}), allowed: 1..{}", what, size[0], size[1], size[2], max);
    return static_cast<unsigned>(product);
}

void place(unsigned (&index)[3], const unsigned (&size)[3], unsigned linear) {
    index[0] = linear % size[0];
    index[1] = linear / size[0] % size[1];
    index[2] = linear / size[0] / size[1];
}

size_t describe_overflow(char* text, size_t bytes, size_t stack_bytes) {
    const device_api::KernelThread* thread = device_api::KernelThread::current_or_null();
    if (thread == nullptr) return 0;
    const device_api::Who& who = thread->who();
    const auto written =
        fmt::format_to_n(text, bytes,
                         "rank {}, block {}, thread {} of a kernel needs more than the {} KiB of its stack; raise "
                         "CROSSDOCK_GIN_STACK_KIB",
                         who.rank, who.block, who.thread, stack_bytes >> 10);
    return std::min(written.size, bytes);
}

}  // namespace

ncclResult_t crossdockLaunchKernel(ncclComm_t comm, const crossdockLaunchArguments* arguments) {
    return boundary([&] {
        const auto communicator = std::dynamic_pointer_cast<cpu::CpuCommunicator>(communicator_of(comm));
        require(communicator != nullptr, ncclInvalidUsage, "comm is an NCCL communicator; its kernels come from nvcc");
        const unsigned num_threads = product(arguments->block, kMaxThreads, "threads per block");
        const unsigned num_blocks = product(arguments->grid, kMaxBlocks, "blocks");
        require(device_api::KernelThread::current_or_null() == nullptr, ncclInvalidUsage,
                "crossdockLaunchKernel was called in a kernel, allowed: host code");

        cpu::Executor& executor = *communicator->runtime().cpu_executor();
        const uint64_t timeout_ns =
            environment_timeout_ns("CROSSDOCK_GIN_TIMEOUT_MS", warn).value_or(kDefaultTimeoutNs);
        device_api::Launch launch{
            communicator, arguments->enter, timeout_ns, executor.scheduler(), nullptr, {}, false, 0};
        if (launch.scheduler != nullptr) launch.simulated = device_api::SimulatedGin::of(*launch.scheduler);
        launch.blocks.resize(num_blocks);
        launch.has_one_thread = num_blocks * num_threads == 1;
        // With ranks on other hosts, waits must yield so that the network progresses.
        const int num_local = communicator->lsa_team_size();
        if (num_local == communicator->num_ranks()) launch.num_spins = cpu::IdleBackoff::spins_for(num_local);
        for (device_api::Block& block : launch.blocks) {
            block.num_live = static_cast<int>(num_threads);
            block.warps.resize((num_threads + 31) / 32);
            block.static_shared.assign(arguments->static_shared_bytes, std::byte{kStaleByte});
        }
        LaunchShape shape;
        shape.num_blocks = static_cast<int>(num_blocks);
        shape.warps_per_block = static_cast<int>(num_threads);
        shape.is_users = true;
        shape.stack_bytes = environment_number("CROSSDOCK_GIN_STACK_KIB", kMaxStackKib, warn).value_or(kDefaultStackKib)
                            << 10;
        shape.shared_bytes = arguments->dynamic_shared_bytes + 16;
        cpu::report_stack_overflows(describe_overflow);
        // The __shared__ variables in place are invalid once the blocks are gone.
        struct Taken {
            void (*enter)(const crossdockThread*);
            ~Taken() {
                const crossdockThread no_thread = {};
                enter(&no_thread);
                enter(nullptr);
            }
        } taken{arguments->enter};
        executor.run(shape, [&](cpu::Warp& warp) {
            device_api::Block& block = launch.blocks[static_cast<size_t>(warp.block_idx)];
            crossdockThread thread = {};
            place(thread.thread_idx, arguments->block, static_cast<unsigned>(warp.warp_idx));
            place(thread.block_idx, arguments->grid, static_cast<unsigned>(warp.block_idx));
            std::memcpy(thread.block_dim, arguments->block, sizeof(thread.block_dim));
            std::memcpy(thread.grid_dim, arguments->grid, sizeof(thread.grid_dim));
            thread.static_shared = block.static_shared.data();
            device_api::KernelThread(launch, warp, thread, block, warp.block_idx, warp.warp_idx)
                .run(arguments->body, arguments->context);
        });
    });
}
