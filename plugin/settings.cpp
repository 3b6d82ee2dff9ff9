// SPDX-License-Identifier: Apache-2.0
#include "plugin/settings.h"

#include <cerrno>
#include <cstdlib>

#include "core/error.h"
#include "plugin/boundary.h"

namespace crossdock::plugin {
namespace {

constexpr uint64_t kMaxMs = UINT64_MAX / 1'000'000 / 2;

uint64_t milliseconds(const char* name, uint64_t fallback_ms) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == '\0') return fallback_ms * 1'000'000;
    char* end = nullptr;
    errno = 0;
    const unsigned long long value = std::strtoull(text, &end, 10);
    if (*end != '\0' || *text == '-' || errno != 0 || value < 1 || value > kMaxMs) {
        warn(fmt::format("{} is '{}': it must be 1 to {} ms, and counts as not set", name, text, kMaxMs).c_str());
        return fallback_ms * 1'000'000;
    }
    return value * 1'000'000;
}

}  // namespace

uint64_t join_timeout_ns() { return milliseconds("CROSSDOCK_JOIN_TIMEOUT_MS", 60'000); }
uint64_t progress_timeout_ns() { return milliseconds("CROSSDOCK_NETWORK_TIMEOUT_MS", 100'000); }

const char* interfaces() {
    const char* own = std::getenv("CROSSDOCK_SOCKET_IFNAME");
    return own != nullptr && *own != '\0' ? own : std::getenv("NCCL_SOCKET_IFNAME");
}

}  // namespace crossdock::plugin
