// SPDX-License-Identifier: Apache-2.0
#include "network/peer_watch.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>

#include "core/error.h"

namespace crossdock::network {
namespace {

constexpr uint32_t kGoodbyeMagic = 0x65796267;  // "gbye"

struct Goodbye {
    uint32_t magic;
    uint32_t because_of;
};

}  // namespace

PeerWatch::PeerWatch(std::vector<Link> links) : links_(std::move(links)), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    require(epoll_ >= 0, ncclSystemError, "epoll_create1 failed: {}", std::strerror(errno));
    for (uint32_t rank = 0; rank < links_.size(); ++rank) {
        if (!links_[rank].socket.is_open()) continue;
        epoll_event event = {};
        event.events = EPOLLIN | EPOLLRDHUP;
        event.data.u32 = rank;
        const int status = epoll_ctl(epoll_, EPOLL_CTL_ADD, links_[rank].socket.fd(), &event);
        require(status == 0, ncclSystemError, "epoll_ctl failed: {}", std::strerror(errno));
    }
}

PeerWatch::~PeerWatch() {
    const std::lock_guard lock(closing_);
    let_go();
}

// In a child nothing is taken out of the epoll set, which is the parent's, too.
void PeerWatch::let_go() noexcept {
    for (Link& link : links_) link.socket.close();
    if (epoll_ >= 0) close(epoll_);
    epoll_ = -1;
}

std::vector<Departure> PeerWatch::poll() {
    std::vector<Departure> departures;
    epoll_event events[16];
    const int count = epoll_wait(epoll_, events, 16, 0);
    for (int i = 0; i < count; ++i) read_link(events[i].data.u32, departures);
    return departures;
}

void PeerWatch::read_link(uint32_t rank, std::vector<Departure>& departures) {
    Socket& socket = links_[rank].socket;
    if (!socket.is_open()) return;
    Goodbye said = {};
    const ssize_t got = recv(socket.fd(), &said, sizeof(said), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got == sizeof(said) && said.magic == kGoodbyeMagic) {
        departures.push_back({rank, true, {}, said.because_of});
    } else if (got > 0) {
        departures.push_back({rank, false, "it sent what no rank sends"});
    } else {
        departures.push_back({rank, false, got == 0 ? "its process ended" : std::strerror(errno)});
    }
    const std::lock_guard lock(closing_);
    // To close it is not enough where somebody else has the socket open, too.
    epoll_ctl(epoll_, EPOLL_CTL_DEL, socket.fd(), nullptr);
    socket.close();
}

void PeerWatch::say_goodbye(uint32_t because_of) {
    const Goodbye goodbye{kGoodbyeMagic, because_of};
    for (const Link& link : links_) {
        if (link.socket.is_open()) send(link.socket.fd(), &goodbye, sizeof(goodbye), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
}

}  // namespace crossdock::network
