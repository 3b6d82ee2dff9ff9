// SPDX-License-Identifier: Apache-2.0
// The memory of a group's handles. What a destroyed handle had serves the next one, since a program may make a handle
// for every forward pass, and asking CUDA for memory, or giving it back, may wait for all that runs on the device.
#pragma once

#include <cstdint>
#include <vector>

#include "core/memory.h"

namespace crossdock {

// Memory is reused at once, also while operations of its last user are queued: a group's operations run in the order of
// their issue, whichever streams they are issued on. To be used by one thread at a time.
class HandleMemory {
  public:
    // hooks: the caller's allocator. What comes from there goes back there.
    HandleMemory(Runtime& runtime, const ncclEpAllocConfig_t& hooks) : runtime_(runtime), hooks_(hooks) {}
    ~HandleMemory() { clear(); }
    HandleMemory(const HandleMemory&) = delete;
    HandleMemory& operator=(const HandleMemory&) = delete;

    // At least that many bytes, not zeroed.
    DeviceMemory take(size_t bytes);
    // is_in_graphs: a captured operation uses it. It is then kept for replays as long as the group lives.
    void give_back(DeviceMemory memory, bool is_in_graphs);
    // Once no operation is queued: memory of hooks that is kept no longer returns to them.
    void return_to_hooks() { retired_.clear(); }
    bool has_retired() const { return !retired_.empty(); }

    // A 64-bit word that kernels write and the host reads. A new owner finds whatever the last one left.
    uint64_t* take_word();
    void give_back(uint64_t* word);

    // Of handles, and kept for others or for replays.
    size_t held_bytes() const;
    size_t word_bytes() const { return num_words_ * sizeof(uint64_t); }

    // Frees all that no handle has.
    void clear() noexcept;

    // Spare memory is freed, oldest first, where it and the handles' together would be more than this, and more than
    // twice what handles have had at once.
    static constexpr size_t kAlwaysKept = size_t{64} << 20;

  private:
    void trim();

    Runtime& runtime_;
    ncclEpAllocConfig_t hooks_;
    std::vector<DeviceMemory> spare_;    // oldest first
    std::vector<DeviceMemory> retired_;  // of hooks, not kept any longer
    std::vector<DeviceMemory> in_graphs_;
    std::vector<uint64_t*> spare_words_;
    size_t num_words_ = 0;
    size_t used_bytes_ = 0;  // by handles
    size_t most_used_bytes_ = 0;
    size_t spare_bytes_ = 0;
};

}  // namespace crossdock
