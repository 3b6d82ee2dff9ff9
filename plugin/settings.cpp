// SPDX-License-Identifier: Apache-2.0
#include "plugin/settings.h"

#include <cstdlib>
#include <string>

#include "core/environment_value.h"
#include "plugin/boundary.h"

namespace crossdock::plugin {
namespace {

uint64_t timeout_ns(const char* name, uint64_t default_ns) {
    return environment_timeout_ns(name, [](const std::string& line) { warn(line.c_str()); }).value_or(default_ns);
}

}  // namespace

uint64_t join_timeout_ns() { return timeout_ns("CROSSDOCK_JOIN_TIMEOUT_MS", 60'000'000'000); }
uint64_t progress_timeout_ns() { return timeout_ns("CROSSDOCK_NETWORK_TIMEOUT_MS", 100'000'000'000); }

std::string secret() {
    const char* text = std::getenv("CROSSDOCK_SECRET");
    return text == nullptr ? "" : text;
}

const char* interfaces() {
    const char* own = std::getenv("CROSSDOCK_SOCKET_IFNAME");
    return own != nullptr && *own != '\0' ? own : std::getenv("NCCL_SOCKET_IFNAME");
}

}  // namespace crossdock::plugin
