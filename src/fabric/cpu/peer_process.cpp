// SPDX-License-Identifier: Apache-2.0
#include "fabric/cpu/peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <sstream>
#include <string>

#include "core/error.h"

namespace crossdock::cpu {
namespace {

constexpr int kNumberBits = 22;  // Linux numbers processes below 2^22

// Returns 0 if there is no such process, and nullopt if it cannot be read, as without free descriptors.
std::optional<uint64_t> start_of(int64_t number) {
    const FileDescriptor file(open(fmt::format("/proc/{}/stat", number).c_str(), O_RDONLY | O_CLOEXEC));
    if (file.get() < 0 && errno != ENOENT) return std::nullopt;
    std::string line(1024, '\0');
    line.resize(static_cast<size_t>(std::max<ssize_t>(read(file.get(), line.data(), line.size()), 0)));
    // The second field is a name in parentheses with arbitrary characters; the start is the 22nd.
    const size_t behind_name = line.rfind(')');
    if (behind_name == std::string::npos) return 0;
    std::istringstream fields(line.substr(behind_name + 1));
    std::string field;
    for (int i = 3; i <= 22; ++i) fields >> field;
    return fields ? std::stoull(field) : 0;
}

}  // namespace

ProcessIdentity own_process() { return {getpid(), start_of(getpid()).value_or(0)}; }

uint64_t to_word(const ProcessIdentity& process) {
    return process.start << kNumberBits | static_cast<uint64_t>(process.number);
}

ProcessIdentity process_from(uint64_t word) {
    return {static_cast<int64_t>(word & ((uint64_t{1} << kNumberBits) - 1)), word >> kNumberBits};
}

ProcessWatch::ProcessWatch(const ProcessIdentity& process)
    : process_(process), descriptor_(static_cast<int>(syscall(SYS_pidfd_open, process.number, 0))) {
    // EINVAL: the number is now a thread's. The start is read last, because the open descriptor keeps the number in
    // use.
    was_gone_ = (descriptor_.get() < 0 && (errno == ESRCH || errno == EINVAL)) || has_another_start();
}

bool ProcessWatch::has_another_start() const {
    return process_.start != 0 && start_of(process_.number).value_or(process_.start) != process_.start;
}

bool ProcessWatch::has_ended() const {
    if (was_gone_) return true;
    pollfd ended{descriptor_.get(), POLLIN, 0};
    poll(&ended, 1, 0);
    // The program may have closed our descriptor.
    if (descriptor_.get() < 0 || (ended.revents & POLLNVAL) != 0) return has_another_start();
    return (ended.revents & POLLIN) != 0;
}

}  // namespace crossdock::cpu
