// SPDX-License-Identifier: Apache-2.0
// NCCL communicators as the library sees them. Builds without CUDA know none (core/without_gpus.cpp).
#pragma once

#include <memory>

#include "fabric/communicator.h"

namespace crossdock {

// This rank's end of a communicator that is no CPU one; its runtime is a CudaRuntime. Local. Error with
// ncclInvalidArgument where NCCL does not accept comm either, or with what nccl_api() throws. NCCL looks into the
// pointer: one that never was a communicator may crash there.
//
// The first collective call, whichever it is, also connects the ranks: it checks that all of them can reach each
// other's memory (Error with ncclInvalidUsage that says what to do) and sets up the exchange for all_gather (2 MiB).
// ranks_on_device() counts as such a call: it is asked while a group is created, and local afterwards. Once an exchange
// has expired the ranks are out of step, and every later collective call fails at once. allocate_symmetric fails on
// all ranks if one lacks memory.
//
// window(): local is the address that the window was registered with. NCCL does not tell its size: bytes is SIZE_MAX.
//
// comm must live for as long as the object and its memory.
std::shared_ptr<Communicator> nccl_communicator_of(ncclComm_t comm);

}  // namespace crossdock
