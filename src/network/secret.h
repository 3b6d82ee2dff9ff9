// SPDX-License-Identifier: Apache-2.0
// Secrets and keyed hashes, with which ranks of one communicator authenticate each other. They do not encrypt: what
// ranks send can be read on the network.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace crossdock::network {

using Secret = std::array<uint64_t, 2>;

// From the kernel's random numbers. Error with ncclSystemError where there are none.
Secret random_secret();

// SipHash-2-4 (Aumasson, Bernstein: "SipHash: a fast short-input PRF", 2012) of the bytes under the secret.
uint64_t keyed_hash(const Secret& secret, std::span<const std::byte> bytes);

}  // namespace crossdock::network
