// SPDX-License-Identifier: Apache-2.0
// NCCL communicators. Builds without CUDA have none (core/without_gpus.cpp).
#pragma once

#include <memory>

#include "fabric/communicator.h"

namespace crossdock {

// Wraps a communicator that is no CPU one; its runtime is a CudaRuntime. Local. Throws ncclInvalidArgument if NCCL does
// not accept comm either, or what nccl_api() throws. NCCL dereferences the pointer, so an invalid one may crash.
//
// connect(), or the first collective call, connects the ranks: it finds out how they reach each other's memory (throws
// ncclInvalidUsage that says what to do if they do not) and sets up the exchange for all_gather (2 MiB).
// lsa_team_size(), shares_host_memory(), ranks_on_device() and stores_lines_whole() are local afterwards. After a
// timeout of an exchange the ranks are out of step, and every later collective call fails at once. allocate_symmetric
// fails on all ranks if one lacks memory.
//
// window(): local is the address with which the window was registered. NCCL does not tell its size: bytes is an upper
// bound.
//
// comm must live for as long as the object and its memory.
std::shared_ptr<Communicator> nccl_communicator_of(ncclComm_t comm);

}  // namespace crossdock
