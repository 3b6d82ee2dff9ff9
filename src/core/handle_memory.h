// SPDX-License-Identifier: Apache-2.0
// The memory of a group's handles. Memory of a destroyed handle is reused by the next one: a program may make a handle
// for every forward pass, and allocating or freeing CUDA memory may wait for everything that runs on the device.
#pragma once

#include <cstdint>
#include <vector>

#include "core/memory.h"

namespace crossdock {

// Memory is reused at once, also while operations of its last user are queued: a group's operations run in the order in
// which they are issued, on any streams. For one thread at a time.
class HandleMemory {
  public:
    // hooks: the caller's allocator. Its memory returns to it.
    HandleMemory(Runtime& runtime, const ncclEpAllocConfig_t& hooks) : runtime_(runtime), hooks_(hooks) {}
    ~HandleMemory() { clear(); }
    HandleMemory(const HandleMemory&) = delete;
    HandleMemory& operator=(const HandleMemory&) = delete;

    // At least `bytes` bytes, not zeroed.
    DeviceMemory take(size_t bytes);
    // is_in_graphs: a captured operation uses the memory, so it is kept for replays until the group is destroyed.
    void give_back(DeviceMemory memory, bool is_in_graphs);
    // Call when no operation is queued. Returns retired memory to the caller's hooks.
    void return_to_hooks() { retired_.clear(); }
    bool has_retired() const { return !retired_.empty(); }

    // A 64-bit word that kernels write and the host reads. Keeps the value that its last owner left.
    uint64_t* take_word();
    void give_back(uint64_t* word);

    // Used by handles, spare, or kept for replays.
    size_t held_bytes() const;
    size_t word_bytes() const { return num_words_ * sizeof(uint64_t); }

    // Frees all memory that no handle uses.
    void clear() noexcept;

    // Spare memory is freed, oldest first, if it and the handles' memory together exceed this and twice the most that
    // handles have used at once.
    static constexpr size_t kAlwaysKept = size_t{64} << 20;

  private:
    void trim();

    Runtime& runtime_;
    ncclEpAllocConfig_t hooks_;
    std::vector<DeviceMemory> spare_;    // oldest first
    std::vector<DeviceMemory> retired_;  // waits for return_to_hooks
    std::vector<DeviceMemory> in_graphs_;
    std::vector<uint64_t*> spare_words_;
    size_t num_words_ = 0;
    size_t used_bytes_ = 0;  // by handles
    size_t most_used_bytes_ = 0;
    size_t spare_bytes_ = 0;
};

}  // namespace crossdock
