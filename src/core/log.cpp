// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <limits.h>
#include <strings.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace crossdock {
namespace {

// Fixed storage: reporting an error must not fail, even out of memory.
thread_local char t_last_error[1024] = "";

// NCCL's reading of NCCL_DEBUG: from this level on it prints warnings.
bool nccl_warns() {
    const char* level = std::getenv("NCCL_DEBUG");
    if (level == nullptr) return false;
    for (const char* printing : {"WARN", "INFO", "ABORT", "TRACE"}) {
        if (strcasecmp(level, printing) == 0) return true;
    }
    return false;
}

// NCCL_DEBUG_FILE with its %h (host) and %p (process) filled in; null: not set, or cannot be opened.
FILE* open_nccl_log(const char* host) {
    const char* pattern = std::getenv("NCCL_DEBUG_FILE");
    if (pattern == nullptr || *pattern == '\0') return nullptr;
    char path[PATH_MAX];
    size_t length = 0;
    for (; *pattern != '\0' && length < sizeof(path) - 1; ++pattern) {
        const size_t room = sizeof(path) - length;
        int written = 1;
        if (pattern[0] == '%' && pattern[1] == 'h') {
            written = std::snprintf(path + length, room, "%s", host), ++pattern;
        } else if (pattern[0] == '%' && pattern[1] == 'p') {
            written = std::snprintf(path + length, room, "%d", getpid()), ++pattern;
        } else {
            path[length] = *pattern;
        }
        length += std::min(static_cast<size_t>(written), room - 1);
    }
    path[length] = '\0';
    return std::fopen(path, "ae");
}

void print_as_nccl(const char* message) {
    char host[HOST_NAME_MAX + 1] = "";
    gethostname(host, sizeof(host) - 1);
    host[std::strcspn(host, ".")] = '\0';
    FILE* const file = open_nccl_log(host);
    std::fprintf(file != nullptr ? file : stderr, "%s:%d:%d NCCL WARN crossdock: %s\n", host, getpid(), gettid(),
                 message);
    if (file != nullptr) std::fclose(file);
}

}  // namespace

ncclResult_t report_failure(ncclResult_t code, const char* message) noexcept {
    std::snprintf(t_last_error, sizeof(t_last_error), "%s", message);
    if (nccl_warns())
        print_as_nccl(t_last_error);
    else if (debug_enabled())
        std::fprintf(stderr, "crossdock: %s\n", t_last_error);
    return code;
}

const char* last_error() noexcept { return t_last_error; }

void warn(const std::string& line) noexcept { std::fprintf(stderr, "crossdock: warning: %s\n", line.c_str()); }

void debug(const std::string& line) noexcept {
    if (debug_enabled()) std::fprintf(stderr, "crossdock: %s\n", line.c_str());
}

bool debug_enabled() noexcept {
    // API v1 takes any non-empty value as on, v2 reads a flag: everything but a spelled-out "no" switches it on.
    enum : int { kUnknown, kNo, kYes };
    static std::atomic<int> enabled{kUnknown};
    if (enabled == kUnknown) {
        const char* value = std::getenv("NCCL_EP_DEBUG");
        const bool is_no = value == nullptr || *value == '\0' || strcasecmp(value, "0") == 0 ||
                           strcasecmp(value, "off") == 0 || strcasecmp(value, "false") == 0;
        enabled = is_no ? kNo : kYes;
    }
    return enabled == kYes;
}

}  // namespace crossdock
