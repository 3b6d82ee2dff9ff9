// SPDX-License-Identifier: Apache-2.0
#include "cpu_rank.h"

#include <cstring>

namespace crossdock::testing {

CommunicatorSets::~CommunicatorSets() {
    for (const std::vector<ncclComm_t>& set : sets_) {
        for (const ncclComm_t comm : set) crossdockCommDestroy(comm);
    }
}

ncclComm_t CommunicatorSets::get(size_t index, int rank) {
    const std::lock_guard lock(mutex_);
    while (sets_.size() <= index) {
        std::vector<ncclComm_t> comms(num_ranks_);
        if (crossdockCommInitAll(comms.data(), num_ranks_) != ncclSuccess)
            throw std::runtime_error(crossdockGetLastError());
        sets_.push_back(std::move(comms));
    }
    return sets_[index][rank];
}

CpuRank::~CpuRank() {
    for (const ncclComm_t comm : joined_) crossdockCommDestroy(comm);
}

void* CpuRank::allocate(size_t bytes) {
    // An allocation of its own for each buffer, so that AddressSanitizer sees what runs over; only the start is rounded
    // up.
    constexpr size_t kAlignment = 256;
    auto memory = std::make_unique<std::byte[]>(bytes + kAlignment);
    void* aligned = memory.get();
    size_t space = bytes + kAlignment;
    std::align(kAlignment, bytes, aligned, space);
    allocations_[aligned] = std::move(memory);
    return aligned;
}

void CpuRank::deallocate(void* memory) { allocations_.erase(memory); }

void CpuRank::copy_to_device(void* target, const void* source, size_t bytes, cudaStream_t) {
    if (bytes != 0) std::memcpy(target, source, bytes);
}

void CpuRank::copy_to_host(void* target, const void* source, size_t bytes, cudaStream_t) {
    if (bytes != 0) std::memcpy(target, source, bytes);
}

Window CpuRank::make_window(size_t bytes) {
    Window window;
    window.bytes = bytes;
    void* memory = nullptr;
    RANK_OK(*this, crossdockMemAlloc(&memory, bytes));
    window.memory = static_cast<std::byte*>(memory);
    RANK_OK(*this, crossdockCommWindowRegister(comm(), memory, bytes, &window.handle, 0));
    return window;
}

void CpuRank::destroy_window(const Window& window) {
    // Without throwing: destructors come here.
    const bool gone = crossdockCommWindowDeregister(comm(), window.handle) == ncclSuccess &&
                      crossdockMemFree(window.memory) == ncclSuccess;
    RANK_CHECK(*this, gone, "{}", crossdockGetLastError());
}

void CpuRank::barrier() { RANK_OK(*this, crossdockCommBarrier(comm())); }

void CpuRank::all_gather(const void* own, void* all, size_t bytes) {
    RANK_OK(*this, crossdockCommAllGather(comm(), own, all, bytes));
}

ncclComm_t CpuRank::make_communicator() {
    if (world_ == CpuWorld::kThreads) return sets_->get(num_made_++, rank());
    if (world_ == CpuWorld::kDeterministic) throw std::logic_error("the deterministic world has one communicator");
    ncclUniqueId id{};
    if (rank() == 0) RANK_OK(*this, crossdockGetUniqueId(&id));
    std::vector<ncclUniqueId> ids(num_ranks());
    all_gather(&id, ids.data(), sizeof id);
    ncclComm_t comm = nullptr;
    RANK_OK(*this, crossdockCommInitRank(&comm, num_ranks(), ids[0], rank()));
    joined_.push_back(comm);
    return comm;
}

}  // namespace crossdock::testing
