// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <strings.h>
#include <cstdio>
#include <cstdlib>

namespace crossdock {
namespace {

// Fixed storage: reporting an error must not fail, out of memory included.
thread_local char t_last_error[1024] = "";

}  // namespace

ncclResult_t report_failure(ncclResult_t code, const char* sentence) noexcept {
    std::snprintf(t_last_error, sizeof(t_last_error), "%s", sentence);
    if (debug_enabled()) std::fprintf(stderr, "crossdock: %s\n", t_last_error);
    return code;
}

const char* last_error() noexcept { return t_last_error; }

void warn(const std::string& line) noexcept { std::fprintf(stderr, "crossdock: warning: %s\n", line.c_str()); }

void debug(const std::string& line) noexcept {
    if (debug_enabled()) std::fprintf(stderr, "crossdock: %s\n", line.c_str());
}

bool debug_enabled() noexcept {
    // v1 of the interface counts any non-empty value, v2 a flag: everything that is not a spelled-out "no" switches it
    // on.
    static const bool enabled = [] {
        const char* value = std::getenv("NCCL_EP_DEBUG");
        return value != nullptr && *value != '\0' && strcasecmp(value, "0") != 0 && strcasecmp(value, "off") != 0 &&
               strcasecmp(value, "false") != 0;
    }();
    return enabled;
}

}  // namespace crossdock
