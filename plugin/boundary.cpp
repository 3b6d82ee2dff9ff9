// SPDX-License-Identifier: Apache-2.0
#include "plugin/boundary.h"

#include <atomic>
#include <cstdio>

namespace crossdock::plugin {
namespace {

std::atomic<LogFunction> g_log{nullptr};

void log(int level, const char* sentence) noexcept {
    if (const LogFunction function = g_log.load()) {
        function(level, kLogNetwork, "crossdock", 0, "NET/crossdock: %s", sentence);
    } else if (level == kLogWarn) {
        std::fprintf(stderr, "crossdock: warning: %s\n", sentence);
    }
}

}  // namespace

void set_log(LogFunction log) noexcept { g_log.store(log); }
void warn(const char* sentence) noexcept { log(kLogWarn, sentence); }
void inform(const char* sentence) noexcept { log(kLogInfo, sentence); }

}  // namespace crossdock::plugin
