// SPDX-License-Identifier: Apache-2.0
// Which ncclComm_t values are live CPU communicators.
#pragma once

#include <cstdint>
#include <memory>

#include "device/platform.h"
#include "nccl.h"

namespace crossdock::cpu {

class CpuCommunicator;

// A value for an opaque handle: never used twice, and no address that a program could have (nobody dereferences it
// unnoticed, no pointer of another library equals it).
void* new_token();
bool is_token(const void* value);

// The communicator's public handle, valid until withdraw().
ncclComm_t publish(std::shared_ptr<CpuCommunicator> communicator);
// Null if handle is none of ours, or no longer. Error with ncclInvalidUsage in a forked child of the process that
// published it.
std::shared_ptr<CpuCommunicator> find_communicator(ncclComm_t handle);
// False if it was not there.
bool withdraw(ncclComm_t handle);

}  // namespace crossdock::cpu
