// SPDX-License-Identifier: Apache-2.0
// Memory that the CPU cannot access. Asynchronous copies between it and staging memory, in order in each direction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace crossdock::network {

class DeviceMemory {
  public:
    virtual ~DeviceMemory() = default;

    // The staging memory of the two directions.
    virtual std::span<std::byte> staging_in() = 0;
    virtual std::span<std::byte> staging_out() = 0;

    // Each queues one step and returns its number, counted from 1 in each direction. Steps of a direction take effect
    // in this order; a kernel that sees a written word sees all bytes before it.
    virtual uint64_t copy_in(void* device, const std::byte* staging, uint64_t bytes) = 0;
    virtual uint64_t write_word(void* device, uint64_t value) = 0;
    // A step of the inward direction: reads the word as it is after all earlier inward steps.
    virtual uint64_t read_word(std::byte* staging, const void* device) = 0;
    virtual uint64_t copy_out(std::byte* staging, const void* device, uint64_t bytes) = 0;

    // The last step that has taken effect.
    virtual uint64_t done_in() = 0;
    virtual uint64_t done_out() = 0;
};

}  // namespace crossdock::network
