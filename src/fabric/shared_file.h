// SPDX-License-Identifier: Apache-2.0
// How ranks of one host agree on memory that all of them map: a file of rank 0, with a piece for each rank.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "fabric/communicator.h"
#include "runtime/cpu/memory_file.h"

namespace crossdock {

// Gathers bytes of all ranks, in rank order.
using GatherHostBytes = std::function<void(const void* own, void* all, size_t bytes)>;

// Makes the mapped file this rank's symmetric memory. It has num_ranks pieces of piece_bytes, and a page more.
using UseSharedFile = std::function<std::unique_ptr<SymmetricMemory>(cpu::Mapping file, size_t piece_bytes)>;

struct SharedHostMemory {
    std::unique_ptr<SymmetricMemory> memory;  // null on all ranks, if one of them cannot have it
    std::string problem;                      // then: why
};

// Collective: rank 0 makes the file, all ranks map it, and use() what they have mapped. A piece has at least `bytes`
// zeros. is_wanted: false on any rank makes the memory null on all, as an exception of use() does. Throws what gather
// throws, and ncclRemoteError if ranks are out of step after a gather that failed. What has been made by then is never
// freed, because gather's kernel may wait on the GPU for ever, and to free such memory may wait for kernels.
SharedHostMemory share_file(int rank, int num_ranks, size_t bytes, bool is_wanted, const UseSharedFile& use,
                            const GatherHostBytes& gather);

}  // namespace crossdock
