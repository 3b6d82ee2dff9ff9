// SPDX-License-Identifier: Apache-2.0
#include "network/acceptor.h"

#include <sys/resource.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace crossdock::network {

Socket Acceptor::accept(size_t num_unauthenticated, uint64_t now_ns) {
    constexpr uint64_t kPauseNs = 100'000'000;
    if (!accepts(num_unauthenticated, now_ns)) return Socket();
    Socket socket =
        Socket::made_by([&] { return accept4(socket_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (socket.is_open()) return socket;
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        // The connection stays in the kernel's queue, so poll() would return at once, again and again.
        closed_until_ns_ = now_ns + kPauseNs;
        rlimit limit = {};
        getrlimit(RLIMIT_NOFILE, &limit);
        trouble_ = fmt::format("; connections could not be accepted: {}", std::strerror(errno));
        if (errno == EMFILE) trouble_ += fmt::format(" (the process may have {}: ulimit -n)", limit.rlim_cur);
    }
    return Socket();
}

}  // namespace crossdock::network
