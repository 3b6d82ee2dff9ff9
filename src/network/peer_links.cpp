// SPDX-License-Identifier: Apache-2.0
#include "network/peer_links.h"

#include <sched.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "runtime/cpu/clock.h"

namespace crossdock::network {
namespace {

// Up to this number, sockets are read one by one; above it, epoll says which are ready.
constexpr size_t kFewCarriers = 2;

}  // namespace

PeerLinks::PeerLinks(std::vector<Link> links, FrameReceiver& receiver)
    : receiver_(receiver), epoll_(Socket::made_by([] { return epoll_create1(EPOLL_CLOEXEC); })) {
    require(epoll_.is_open(), ncclSystemError, "epoll_create1 failed: {}", std::strerror(errno));
    for (Link& link : links) {
        const auto rank = static_cast<uint32_t>(streams_.size());
        const LinkStream& stream = streams_.emplace_back(std::move(link.socket));
        if (!stream.is_open()) continue;
        epoll_event event = {};
        event.events = EPOLLIN | EPOLLRDHUP;
        event.data.u32 = rank;
        const int status = epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, stream.fd(), &event);
        require(status == 0, ncclSystemError, "epoll_ctl failed: {}", std::strerror(errno));
    }
}

void PeerLinks::close(uint32_t peer) {
    LinkStream& stream = streams_[peer];
    if (stream.is_open()) {
        // Closing it does not suffice if another process has the socket open, too.
        epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, stream.fd(), nullptr);
        stream.close_socket();
    }
    stream.cancel();
}

ucs_status_t PeerLinks::send(uint32_t peer, Send& send) {
    const bool was_flushed = streams_[peer].is_flushed();
    const ucs_status_t status = streams_[peer].send(send);
    if (was_flushed && !streams_[peer].is_flushed()) queued_.push_back(peer);
    return status;
}

void PeerLinks::flush_all() {
    // Records that callbacks queue meanwhile are sent by the next call.
    for (const uint32_t peer : std::exchange(queued_, {})) {
        streams_[peer].flush();
        if (!streams_[peer].is_flushed() && std::ranges::find(queued_, peer) == queued_.end()) queued_.push_back(peer);
    }
}

bool PeerLinks::receive(uint32_t peer, std::vector<Departure>& departures) {
    std::unique_ptr<LinkEnd> link_end;
    const struct Receiving {
        uint32_t& from;
        ~Receiving() { from = kNoRank; }
    } receiving{receives_from_ = peer};
    const bool happened = streams_[peer].receive(receiver_, link_end);
    if (link_end == nullptr) return happened;
    close(peer);
    departures.push_back({peer, std::move(*link_end)});
    return true;
}

bool PeerLinks::progress(std::vector<Departure>& departures) {
    if (!queued_.empty()) flush_all();
    bool happened = false;
    if (carriers_.size() > kFewCarriers) {
        epoll_event events[16];
        const int count = epoll_wait(epoll_.fd(), events, 16, 0);
        for (int i = 0; i < count; ++i) happened |= receive(events[i].data.u32, departures);
    } else {
        for (const uint32_t peer : carriers_) happened |= receive(peer, departures);
    }
    return happened;
}

void PeerLinks::look_at_all(std::vector<Departure>& departures) {
    epoll_event events[16];
    const int count = epoll_wait(epoll_.fd(), events, 16, 0);
    for (int i = 0; i < count; ++i) {
        const uint32_t peer = events[i].data.u32;
        const bool is_new = std::ranges::find(carriers_, peer) == carriers_.end();
        if (receive(peer, departures) && is_new && streams_[peer].is_open()) carriers_.push_back(peer);
    }
}

void PeerLinks::drop(uint32_t peer) { close(peer); }

template <typename SendTo>
void PeerLinks::send_to_all(SendTo send_to) {
    for (uint32_t peer = 0; peer < streams_.size(); ++peer) {
        const bool was_flushed = streams_[peer].is_flushed();
        send_to(streams_[peer]);
        if (was_flushed && !streams_[peer].is_flushed()) queued_.push_back(peer);
    }
}

void PeerLinks::send_close_notice(uint32_t because_of) {
    send_to_all([because_of](LinkStream& stream) { stream.send_close_notice(because_of); });
}

void PeerLinks::send_failure_report(uint32_t lost) {
    send_to_all([lost](LinkStream& stream) { stream.send_failure_report(lost); });
}

// Closing a connection with unread data resets it, and data that the other end has not read is lost.
void PeerLinks::part(const std::vector<bool>& is_there, uint64_t timeout_ns) {
    std::vector<uint32_t> waiting;
    for (const uint32_t peer : carriers_) {
        if (!is_there[peer] || !streams_[peer].is_open()) continue;
        streams_[peer].end_sending();
        waiting.push_back(peer);
    }
    const uint64_t end_ns = cpu::steady_now_ns() + timeout_ns;
    while (!waiting.empty() && cpu::steady_now_ns() < end_ns) {
        std::erase_if(waiting, [&](uint32_t peer) { return streams_[peer].drain(); });
        if (!waiting.empty()) sched_yield();
    }
}

}  // namespace crossdock::network
