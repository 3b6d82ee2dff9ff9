// SPDX-License-Identifier: Apache-2.0
// UCX unpacks a peer's address without its length and aborts the process over bytes that make no sense. So what a peer
// has sent is checked first.
#pragma once

#include <cstddef>
#include <span>

namespace crossdock::network {

// True if the bytes have the layout of a worker's address, version 1 (UCX 1.12 and newer) without unified mode, and
// numbers that UCX can use. Whether anything is at the address is for UCX to find out.
bool is_ucx_address(std::span<const std::byte> bytes);

}  // namespace crossdock::network
