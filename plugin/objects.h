// SPDX-License-Identifier: Apache-2.0
// The objects behind the plugin's opaque pointers in NCCL.
#pragma once

#include <atomic>
#include <memory>

#include "network/handshake.h"
#include "network/mesh.h"
#include "network/progress_thread.h"
#include "plugin/nccl_rma.h"

namespace crossdock::plugin {

// One per communicator and NCCL plugin context.
struct Instance {
    uint64_t comm_id;
};

struct Comm {
    std::unique_ptr<network::Mesh> mesh;
    network::ProgressThread::Registration progress_thread;  // ends before the mesh
    std::atomic<uint32_t> num_blocks{0};                    // of contexts, which NCCL's thread progresses
};

// A block of contexts.
struct Contexts {
    Comm* comm;
    uint32_t first;
    uint32_t count;
    DeviceHandle device;  // of version 13
    bool told_failure;    // in NCCL's log
};

// Copies between device and staging memory on the current CUDA device. Null without a device and in builds without
// CUDA.
std::unique_ptr<network::DeviceMemory> make_device_memory();

}  // namespace crossdock::plugin
