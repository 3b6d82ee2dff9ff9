// SPDX-License-Identifier: Apache-2.0
// NCCL communicators. Builds without CUDA have none (core/without_gpus.cpp).
#pragma once

#include <memory>

#include "fabric/communicator.h"

namespace crossdock {

// Wraps a communicator that is no CPU one; its runtime is a CudaRuntime. Local. Throws ncclInvalidArgument if NCCL does
// not accept comm either, or what nccl_api() throws. NCCL dereferences the pointer, so an invalid one may crash.
//
// The first collective call also connects the ranks: it checks that all can reach each other's memory (throws
// ncclInvalidUsage that says what to do) and sets up the exchange for all_gather (2 MiB). ranks_on_device() and
// stores_lines_whole() are such calls: collective the first time, when a group is created, and local afterwards. After
// a timeout of an exchange the ranks are out of step, and every later collective call fails at once. allocate_symmetric
// fails on all ranks if one lacks memory.
//
// window(): local is the address with which the window was registered. NCCL does not tell its size: bytes is an upper
// bound.
//
// comm must live for as long as the object and its memory.
std::shared_ptr<Communicator> nccl_communicator_of(ncclComm_t comm);

}  // namespace crossdock
