// SPDX-License-Identifier: Apache-2.0
// Device memory that is host memory: copies happen late, a few at a time, as a seed says.
#pragma once

#include <cstdint>

namespace crossdock::network {

// For devices made from now on. 0: there is no device.
void set_fake_device_seed(uint64_t seed);
// Of each direction; small ones make operations wait for room.
void set_fake_staging_bytes(uint64_t bytes);
// Every call fails, with a message, once so many steps have been queued.
void set_fake_device_failure(uint64_t steps);

}  // namespace crossdock::network
