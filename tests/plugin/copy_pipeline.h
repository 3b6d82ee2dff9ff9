// SPDX-License-Identifier: Apache-2.0
// What a put over TCP is measured against: a copy from the device to the host, over a socket and to the device again,
// in pieces, so that all three are at work at the same time.
#pragma once

#include <cstdint>

namespace crossdock::plugin_test {

// Nanoseconds of `rounds` copies of that many bytes through loopback, one after the other, between memory of the
// current device. Throws std::runtime_error.
double pipelined_copies_ns(uint64_t bytes, uint32_t rounds);

}  // namespace crossdock::plugin_test
