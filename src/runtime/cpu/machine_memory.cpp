// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/machine_memory.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <sstream>

namespace crossdock::cpu {
namespace {

// UINT64_MAX if the file is missing or has no number, such as "max".
uint64_t limit_in(const std::string& path) {
    std::ifstream file(path);
    uint64_t bytes = 0;
    return file >> bytes ? bytes : UINT64_MAX;
}

// The smallest limit of a group and its parents.
uint64_t least_limit(const std::string& root, std::string group, const char* file) {
    uint64_t least = limit_in(root + "/" + file);
    while (!group.empty() && group != "/") {
        least = std::min(least, limit_in(root + group + "/" + file));
        group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
    }
    return least;
}

}  // namespace

uint64_t control_group_limit(const std::string& root, const std::string& own) {
    // Lines are "number:controllers:/group"; version 2 has no controllers.
    uint64_t least = UINT64_MAX;
    std::istringstream lines(own);
    for (std::string line; std::getline(lines, line);) {
        const size_t first = line.find(':');
        const size_t second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
        const std::string group = line.substr(second + 1);
        if (controllers == ",,") least = std::min(least, least_limit(root, group, "memory.max"));
        if (controllers.find(",memory,") != std::string::npos)
            least = std::min(least, least_limit(root + "/memory", group, "memory.limit_in_bytes"));
    }
    return least;
}

uint64_t machine_memory() {
    static std::atomic<uint64_t> known{0};
    if (known == 0) {
        std::ostringstream own;
        own << std::ifstream("/proc/self/cgroup").rdbuf();
        const auto physical =
            static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
        known = std::min(physical, control_group_limit("/sys/fs/cgroup", own.str()));
    }
    return known;
}

}  // namespace crossdock::cpu
