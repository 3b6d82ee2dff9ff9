// SPDX-License-Identifier: Apache-2.0
// The registry of live CPU communicators, by ncclComm_t.
#pragma once

#include <cstdint>
#include <memory>

#include "device/platform.h"
#include "nccl.h"

namespace crossdock::cpu {

class CpuCommunicator;

// A value for an opaque handle: never reused, and outside of the address space (dereferencing it faults, and no pointer
// of another library equals it).
void* new_token();
bool is_token(const void* value);

// Returns the communicator's public handle, valid until withdraw().
ncclComm_t publish(std::shared_ptr<CpuCommunicator> communicator);
// Null if handle is not a published one. Throws ncclInvalidUsage in a forked child of the process that published it.
std::shared_ptr<CpuCommunicator> find_communicator(ncclComm_t handle);
// Returns false if it was not published.
bool withdraw(ncclComm_t handle);

}  // namespace crossdock::cpu
