// SPDX-License-Identifier: Apache-2.0
// A bounded lock-free queue of descriptors: any number of threads push, one pops. Each cell takes 128 bytes, of
// which a descriptor for a mapped peer touches the first 64.
//
// A cell's turn is its state: in lap n (positions n * depth to (n + 1) * depth - 1) the cell is free at 2 n, and full
// at 2 n + 1, for any depth. Zeroed memory is an empty queue. Positions have 64 bits: they do not wrap around.
#pragma once

#include <atomic>
#include <bit>
#include <cstring>
#include <new>

#include "device_api/descriptor.h"
#include "runtime/cpu/zeroed_memory.h"

namespace crossdock::device_api {

class DescriptorQueue {
  public:
    // depth: rounded up to a power of two.
    explicit DescriptorQueue(size_t depth)
        : mask_(std::bit_ceil(depth) - 1),
          depth_bits_(std::countr_zero(mask_ + 1)),
          memory_((mask_ + 1) * sizeof(Cell), alignof(Cell)) {}

    size_t depth() const { return mask_ + 1; }

    // Returns false if the queue is full.
    bool try_push(const Descriptor& descriptor) {
        uint64_t position = pushed_.load(std::memory_order_relaxed);
        for (;;) {
            Cell& cell = cell_at(position);
            const uint64_t turn = __atomic_load_n(&cell.turn, __ATOMIC_ACQUIRE);
            const auto ahead = static_cast<int64_t>(turn - free_at(position));
            if (ahead < 0) return false;
            if (ahead > 0) {
                position = pushed_.load(std::memory_order_relaxed);
            } else if (pushed_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
                std::memcpy(&cell.descriptor, &descriptor,
                            descriptor.is_remote ? sizeof(Descriptor) : kLocalDescriptorBytes);
                // Sequentially consistent, like the popping thread's flag that it sleeps.
                __atomic_store_n(&cell.turn, free_at(position) + 1, __ATOMIC_SEQ_CST);
                return true;
            }
        }
    }

    // The oldest descriptor, valid until pop(). Null if the queue is empty or the next descriptor is being written.
    const Descriptor* front() const {
        const Cell& cell = cell_at(popped_);
        return __atomic_load_n(&cell.turn, __ATOMIC_SEQ_CST) == free_at(popped_) + 1 ? &cell.descriptor : nullptr;
    }
    void pop() {
        __atomic_store_n(&cell_at(popped_).turn, free_at(popped_) + 2, __ATOMIC_RELEASE);
        ++popped_;
    }

    uint64_t num_pushed() const { return pushed_.load(std::memory_order_relaxed); }

  private:
    struct alignas(64) Cell {
        uint64_t turn;
        Descriptor descriptor;
    };
    static_assert(sizeof(Cell) == 128);

    Cell& cell_at(uint64_t position) const {
        return *std::launder(reinterpret_cast<Cell*>(memory_.data() + (position & mask_) * sizeof(Cell)));
    }
    // The turn at which a position's cell is free; two later it is in the next lap.
    uint64_t free_at(uint64_t position) const { return 2 * (position >> depth_bits_); }

    uint64_t mask_;
    int depth_bits_;
    cpu::ZeroedMemory memory_;
    alignas(64) std::atomic<uint64_t> pushed_{0};
    alignas(64) uint64_t popped_ = 0;
};

}  // namespace crossdock::device_api
