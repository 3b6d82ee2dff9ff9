// SPDX-License-Identifier: Apache-2.0
// The plugin's environment variables; docs/deployment.md lists them.
#pragma once

#include <cstdint>
#include <string>

namespace crossdock::plugin {

uint64_t join_timeout_ns();      // CROSSDOCK_JOIN_TIMEOUT_MS
uint64_t progress_timeout_ns();  // CROSSDOCK_NETWORK_TIMEOUT_MS
std::string secret();            // CROSSDOCK_SECRET; may be empty
const char* interfaces();        // CROSSDOCK_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME; may be null

}  // namespace crossdock::plugin
