// SPDX-License-Identifier: Apache-2.0
#include "network/port_owner.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>

#include "core/error.h"
#include "core/printable.h"

namespace crossdock::network {
namespace {

struct Listening {
    unsigned user;
    std::string socket;  // as links in /proc/PID/fd name it
};

std::optional<Listening> find_socket(uint16_t port) {
    constexpr unsigned kListens = 10;
    for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
        std::ifstream lines(table);
        for (std::string line; std::getline(lines, line);) {
            unsigned at = 0, state = 0, user = 0;
            unsigned long inode = 0;
            if (std::sscanf(line.c_str(), " %*[^:]: %*[0-9A-F]:%x %*s %x %*s %*s %*s %u %*s %lu", &at, &state, &user,
                            &inode) == 4 &&
                at == port && state == kListens)
                return Listening{user, fmt::format("socket:[{}]", inode)};
        }
    }
    return std::nullopt;
}

bool has_open(const std::filesystem::path& process, const std::string& socket) {
    std::error_code unreadable;
    for (std::filesystem::directory_iterator each(process / "fd", unreadable), end; !unreadable && each != end;
         each.increment(unreadable)) {
        std::error_code gone;
        if (std::filesystem::read_symlink(each->path(), gone) == socket) return true;
    }
    return false;
}

}  // namespace

std::string who_listens(uint16_t port) {
    const auto found = find_socket(port);
    if (!found) return {};
    std::error_code unreadable;
    for (std::filesystem::directory_iterator each("/proc", unreadable), end; !unreadable && each != end;
         each.increment(unreadable)) {
        const std::string number = each->path().filename().string();
        if (!std::all_of(number.begin(), number.end(), [](unsigned char c) { return std::isdigit(c) != 0; })) continue;
        if (!has_open(each->path(), found->socket)) continue;
        std::ifstream file(each->path() / "comm");
        std::string name;
        std::getline(file, name);
        return fmt::format("process {} ({}) listens there", number, printable(name.c_str(), name.size()));
    }
    return fmt::format("a process of user {} listens there", found->user);
}

}  // namespace crossdock::network
