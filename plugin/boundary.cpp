// SPDX-License-Identifier: Apache-2.0
#include "plugin/boundary.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <mutex>

namespace crossdock::plugin {
namespace {

std::atomic<LogFunction> g_log{nullptr};
std::mutex g_warning_mutex;
std::array<char, 1024> g_warning = {};

void log(int level, const char* message) noexcept {
    if (const LogFunction function = g_log.load()) {
        function(level, kLogNetwork, "crossdock", 0, "NET/crossdock: %s", message);
    } else if (level == kLogWarn) {
        std::fprintf(stderr, "crossdock: warning: %s\n", message);
    }
}

}  // namespace

void set_log(LogFunction log) noexcept { g_log.store(log); }
void warn(const char* message) noexcept {
    {
        const std::lock_guard lock(g_warning_mutex);
        std::snprintf(g_warning.data(), g_warning.size(), "%s", message);
    }
    log(kLogWarn, message);
}
void copy_last_warning(char* message, size_t bytes) noexcept {
    const std::lock_guard lock(g_warning_mutex);
    std::snprintf(message, bytes, "%s", g_warning.data());
}
void inform(const char* message) noexcept { log(kLogInfo, message); }

}  // namespace crossdock::plugin
