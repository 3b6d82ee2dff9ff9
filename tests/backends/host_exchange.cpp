// SPDX-License-Identifier: Apache-2.0
#include "host_exchange.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>

namespace crossdock::testing {

namespace {
constexpr size_t kPieceBytes = 1024;  // of a rank, exchanged at a time
}

struct HostExchange::Shared {
    std::atomic<int> arrived{0};
    std::atomic<int> generation{0};

    std::byte* piece(int rank) {
        return reinterpret_cast<std::byte*>(this + 1) + static_cast<size_t>(rank) * kPieceBytes;
    }
};

HostExchange::HostExchange(int num_ranks)
    : num_ranks_(num_ranks), bytes_(sizeof(Shared) + static_cast<size_t>(num_ranks) * kPieceBytes) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    shared_ = new (memory) Shared;
}

HostExchange::~HostExchange() { munmap(shared_, bytes_); }

void HostExchange::barrier() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    const int generation = shared_->generation.load();
    if (shared_->arrived.fetch_add(1) + 1 == num_ranks_) {
        shared_->arrived.store(0);
        shared_->generation.store(generation + 1);
        return;
    }
    while (shared_->generation.load() == generation) {
        if (std::chrono::steady_clock::now() > deadline)
            throw std::runtime_error("the other ranks did not come to a barrier");
        sched_yield();
    }
}

void HostExchange::all_gather(int rank, const void* own, void* all, size_t bytes) {
    for (size_t begin = 0; begin < bytes; begin += kPieceBytes) {
        const size_t length = std::min(kPieceBytes, bytes - begin);
        std::memcpy(shared_->piece(rank), static_cast<const std::byte*>(own) + begin, length);
        barrier();
        for (int source = 0; source < num_ranks_; ++source) {
            std::memcpy(static_cast<std::byte*>(all) + static_cast<size_t>(source) * bytes + begin,
                        shared_->piece(source), length);
        }
        barrier();
    }
}

}  // namespace crossdock::testing
