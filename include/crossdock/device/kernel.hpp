// SPDX-License-Identifier: Apache-2.0
// The one include of a program whose kernels are written against NCCL's Device API. Under nvcc it is NCCL's own header.
// Under g++ or clang++ (C++20) the same names come from here, and the program links libnccl_ep: kernels run on this
// machine's cores, over threads or processes, or in the simulator (crossdockRunSimulation). docs/device_api.md says
// what differs from a GPU, and which names of NCCL's header are missing; a missing name does not compile.
//
// The few words that are Crossdock's own: crossdockLaunch (launch.hpp), CROSSDOCK_DYNAMIC_SHARED (below).
#pragma once

#if defined(__CUDACC__)

#include <nccl.h>
#include <nccl_device.h>

#include <cuda/atomic>
#include <utility>

#include "crossdock/device/launch.hpp"

// The launch's dynamic shared memory as an array of type.
#define CROSSDOCK_DYNAMIC_SHARED(type, name) extern __shared__ type name[]

#else

#include "crossdock/device/atomic.hpp"
#include "crossdock/device/coop.hpp"
#include "crossdock/device/core.hpp"
#include "crossdock/device/gin.hpp"
#include "crossdock/device/gin_barrier.hpp"
#include "crossdock/device/launch.hpp"
#include "crossdock/device/ll_a2a.hpp"
#include "crossdock/device/lsa_barrier.hpp"
#include "crossdock/device/reduce_copy.hpp"
#include "crossdock/device/warp.hpp"
#include "crossdock/device/words.hpp"
#if defined(CROSSDOCK_WATCH_ACCESSES)
#include "crossdock/device/watch.hpp"
#endif
#include "crossdock/simulation.h"

#define CROSSDOCK_DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(::crossdockDynamicShared())

#endif
