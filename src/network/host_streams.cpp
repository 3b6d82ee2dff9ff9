// SPDX-License-Identifier: Apache-2.0
#include "network/host_streams.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace crossdock::network {

class HostStreams::Stream final : public FrameStream {
  public:
    Stream(uint32_t peer, HostRing& inbox) : peer_(peer), reader_(inbox) {}
    ~Stream() override { close(); }

    uint32_t peer() const { return peer_; }
    bool is_open() const override { return is_open_; }
    bool has_bytes() const { return is_open_ && !reader_.is_empty(); }
    void send_to(HostRingWriter writer) { writer_ = std::move(writer); }
    void close() {
        is_open_ = false;
        cancel();
    }

  private:
    ptrdiff_t write(const iovec* parts, size_t num_parts) override { return writer_.write({parts, num_parts}); }
    ptrdiff_t read(const iovec* parts, size_t num_parts) override { return reader_.read({parts, num_parts}); }

    uint32_t peer_;
    HostRingReader reader_;
    HostRingWriter writer_;
    bool is_open_ = true;
};

namespace {

// A rank's ring in its peers' inboxes: ranks of a host are counted from the lowest one.
uint32_t ring_of(const std::vector<bool>& on_host, uint32_t rank) {
    return static_cast<uint32_t>(std::count(on_host.begin(), on_host.begin() + rank, true));
}

}  // namespace

HostStreams::HostStreams(const std::vector<bool>& on_host, uint32_t rank, FrameReceiver& receiver)
    : rank_(rank),
      on_host_(on_host),
      receiver_(receiver),
      inbox_(ring_of(on_host, static_cast<uint32_t>(on_host.size()))) {
    for (uint32_t peer = 0; peer < on_host.size(); ++peer) {
        const bool is_peer = on_host[peer] && peer != rank;
        streams_.push_back(is_peer ? std::make_unique<Stream>(peer, inbox_.ring(ring_of(on_host, peer))) : nullptr);
        if (is_peer) of_peers_.push_back(streams_.back().get());
    }
}

HostStreams::~HostStreams() = default;

std::vector<std::byte> HostStreams::offer() const {
    const HostInbox::Offer offer = inbox_.offer();
    const auto bytes = std::as_bytes(std::span(&offer, 1));
    return {bytes.begin(), bytes.end()};
}

bool HostStreams::connect(uint32_t peer, std::span<const std::byte> offered) {
    if (offered.empty() || streams_[peer] == nullptr) return false;
    HostInbox::Offer offer;
    require(offered.size() == sizeof(offer), ncclRemoteError,
            "rank {} described its shared memory with {} bytes instead of {}", peer, offered.size(), sizeof(offer));
    std::memcpy(&offer, offered.data(), sizeof(offer));
    try {
        streams_[peer]->send_to(HostRingWriter(offer, ring_of(on_host_, rank_)));
        return true;
    } catch (const Error&) {
        return false;
    }
}

ucs_status_t HostStreams::send(uint32_t peer, Send& send) { return streams_[peer]->send(send); }

bool HostStreams::receive(Stream& stream, std::vector<Departure>& departures) {
    std::unique_ptr<LinkEnd> end;
    const bool happened = stream.receive(receiver_, end);
    if (end == nullptr) return happened;
    stream.close();
    departures.push_back({stream.peer(), std::move(*end)});
    return true;
}

bool HostStreams::progress(std::vector<Departure>& departures) {
    bool happened = false;
    for (Stream* stream : of_peers_) {
        if (!stream->is_flushed()) stream->flush();
        if (stream->has_bytes()) happened |= receive(*stream, departures);
    }
    return happened;
}

bool HostStreams::is_flushed() const {
    return std::ranges::all_of(of_peers_, [](const Stream* each) { return each->is_flushed(); });
}

void HostStreams::stop_sending(uint32_t peer) {
    if (streams_[peer] != nullptr) streams_[peer]->cancel_sends();
}

void HostStreams::receive_rest(uint32_t peer, std::vector<Departure>& departures) {
    Stream* stream = streams_[peer].get();
    while (stream != nullptr && stream->has_bytes() && receive(*stream, departures)) {
    }
}

void HostStreams::drop(uint32_t peer) {
    if (streams_[peer] != nullptr) streams_[peer]->close();
}

}  // namespace crossdock::network
