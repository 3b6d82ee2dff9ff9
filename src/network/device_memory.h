// SPDX-License-Identifier: Apache-2.0
// Memory that the processor cannot touch: copies between it and staging memory, one after another in each direction,
// done by somebody else while the processor goes on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace crossdock::network {

class DeviceMemory {
  public:
    virtual ~DeviceMemory() = default;

    // Memory that copies may start from and end in.
    virtual std::span<std::byte> staging_in() = 0;
    virtual std::span<std::byte> staging_out() = 0;

    // Each queues one step and returns its number, counted from 1 in each direction. Steps of a direction take effect
    // in this order; a word that was written is seen by a kernel only after all bytes before it.
    virtual uint64_t copy_in(void* device, const std::byte* staging, uint64_t bytes) = 0;
    virtual uint64_t write_word(void* device, uint64_t value) = 0;
    // The word as it is behind all steps inwards before this one, which is a step inwards itself.
    virtual uint64_t read_word(std::byte* staging, const void* device) = 0;
    virtual uint64_t copy_out(std::byte* staging, const void* device, uint64_t bytes) = 0;

    // All steps up to this one have taken effect.
    virtual uint64_t done_in() = 0;
    virtual uint64_t done_out() = 0;
};

}  // namespace crossdock::network
