// SPDX-License-Identifier: Apache-2.0
// Host memory that acts as device memory: copies are delayed and done a few at a time, depending on a seed.
#pragma once

#include <cstdint>

namespace crossdock::network {

// For devices created from now on. 0: no device.
void set_fake_device_seed(uint64_t seed);
// Per direction; if small, operations wait for room.
void set_fake_staging_bytes(uint64_t bytes);
// Every call throws once this many steps have been queued.
void set_fake_device_failure(uint64_t steps);

}  // namespace crossdock::network
