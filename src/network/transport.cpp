// SPDX-License-Identifier: Apache-2.0
#include "network/transport.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "core/log.h"
#include "runtime/cpu/clock.h"

namespace crossdock::network {
namespace {

constexpr int kHostPolls = 4;
// At the end, ranks get this time to read what was sent to them.
constexpr uint64_t kPartNs = 500'000'000;

// Two byte strings as one.
std::vector<std::byte> pack(const std::vector<std::byte>& host, const std::vector<std::byte>& ucx) {
    const uint64_t host_bytes = host.size();
    std::vector<std::byte> packed(sizeof(host_bytes));
    std::memcpy(packed.data(), &host_bytes, sizeof(host_bytes));
    packed.insert(packed.end(), host.begin(), host.end());
    packed.insert(packed.end(), ucx.begin(), ucx.end());
    return packed;
}

// What a rank offers its peers: an inbox for those of its host, and UCX's address.
struct Offers {
    std::span<const std::byte> host, ucx;
};

Offers unpack(std::span<const std::byte> packed, uint32_t peer) {
    uint64_t host_bytes = 0;
    require(packed.size() >= sizeof(host_bytes), ncclRemoteError, "rank {} did not say how to reach it", peer);
    std::memcpy(&host_bytes, packed.data(), sizeof(host_bytes));
    packed = packed.subspan(sizeof(host_bytes));
    require(host_bytes <= packed.size(), ncclRemoteError,
            "rank {} said in {} bytes how to reach it, of which {} were for this host", peer, packed.size(),
            host_bytes);
    return {packed.first(host_bytes), packed.subspan(host_bytes)};
}

// What frames can do without: if it cannot be had, they go over links.
template <class Make>
auto unless_impossible(const char* what, Make make) -> decltype(make()) {
    try {
        return make();
    } catch (const Error& error) {
        // A library that the user names must load.
        if (error.code() == ncclInvalidUsage) throw;
        warn(fmt::format("{}, so sockets carry frames: {}", what, error.what()));
        return nullptr;
    }
}

}  // namespace

Transport::Transport(const Listener& listener, std::span<const RankAddress> addresses, uint32_t rank,
                     const TransportConfig& config, FrameSink& sink)
    : rank_(rank),
      num_ranks_(static_cast<uint32_t>(addresses.size())),
      limits_{num_ranks_, config.num_contexts},
      sink_(sink),
      keys_out_(num_ranks_),
      keys_in_(num_ranks_),
      carriers_(num_ranks_, Carrier::kLink),
      is_there_(num_ranks_, true) {
    std::vector<bool> on_host;
    for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
        on_host.push_back(addresses[peer].host == addresses[rank].host);
    }
    const auto ranks_on_host = std::ranges::count(on_host, true);
    FrameReceiver& receiver = *this;
    if (ranks_on_host > 1) {
        host_streams_ = unless_impossible("this process cannot share memory for frames with the ranks of its host",
                                          [&] { return std::make_unique<HostStreams>(on_host, rank, receiver); });
    }
    std::vector<std::byte> ucx_address;
    if (ranks_on_host < num_ranks_) {
        ucx_worker_ = unless_impossible("UCX cannot be used", [&]() -> std::unique_ptr<UcxWorker> {
            auto context = UcxContext::shared();
            if (context == nullptr) return nullptr;
            auto worker = std::make_unique<UcxWorker>(std::move(context), receiver, num_ranks_);
            ucx_address = worker->address();
            return worker;
        });
    }
    const std::vector<std::byte> blob =
        pack(host_streams_ ? host_streams_->offer() : std::vector<std::byte>(), ucx_address);
    std::vector<Link> links = meet(listener, addresses, rank, blob, config.timeout_ns);
    std::vector<std::vector<std::byte>> blobs;
    for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
        keys_out_[peer] = links[peer].key_out;
        keys_in_[peer] = links[peer].key_in;
        blobs.push_back(std::move(links[peer].blob));
    }
    links_.emplace(std::move(links), receiver);
    for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank) continue;
        carriers_[peer] = connect(peer, blobs[peer]);
        // The peer may choose otherwise; all ways are received.
        if (carriers_[peer] == Carrier::kLink) links_->carry_frames(peer);
    }
}

Transport::Carrier Transport::connect(uint32_t peer, std::span<const std::byte> blob) {
    const Offers offers = unpack(blob, peer);
    if (host_streams_ && host_streams_->connect(peer, offers.host)) return Carrier::kHost;
    if (ucx_worker_ && !offers.ucx.empty() && ucx_worker_->connect(peer, offers.ucx)) return Carrier::kUcx;
    return Carrier::kLink;
}

uint64_t Transport::good_payload(uint32_t peer) const {
    return peer == rank_ || carriers_[peer] == Carrier::kUcx ? kMaxFramePayload : kStreamPayloadBytes;
}

ucs_status_t Transport::send(uint32_t peer, FrameHeader& header, Send& send) {
    header.key = carriers_[peer] != Carrier::kLink ? keys_out_[peer] : 0;  // on a link anyone on its way could read it
    header.source = rank_;
    if (peer == rank_) {
        local_.push_back({&header, &send});
        return UCS_INPROGRESS;
    }
    switch (carriers_[peer]) {
        case Carrier::kHost:
            return host_streams_->send(peer, send);
        case Carrier::kUcx:
            return ucx_worker_->send(peer, send);
        case Carrier::kLink:
            break;
    }
    return links_->send(peer, send);
}

bool Transport::progress() {
    bool happened = false;
    // Frames that these cause are handled by the next call.
    for (size_t left = local_.size(); left > 0; --left) {
        const LocalFrame frame = local_.front();
        local_.pop_front();
        Payload payload = Payload::borrowed(frame.send->bytes.data(), frame.send->bytes.size());
        sink_.on_frame(*frame.header, payload);
        frame.send->done(*frame.send, UCS_OK);
        happened = true;
    }
    // Polling shared memory is cheaper than another call of this function.
    std::vector<Departure> departures;
    for (int look = 0; host_streams_ != nullptr && look < kHostPolls && !happened; ++look)
        happened = host_streams_->progress(departures);
    if (ucx_worker_ != nullptr) happened |= ucx_worker_->progress();
    happened |= links_->progress(departures);
    depart_all(departures);
    if (!errors_.empty()) {
        look_after_peers();  // a link knows the reason better than an endpoint
        depart_all(std::exchange(errors_, {}));
    }
    return happened;
}

void Transport::drop(uint32_t peer) {
    is_there_[peer] = false;
    if (host_streams_ != nullptr) host_streams_->drop(peer);
    if (carriers_[peer] == Carrier::kUcx) ucx_worker_->drop(peer);
    links_->drop(peer);
}

void Transport::look_after_peers() {
    std::vector<Departure> departures;
    links_->look_at_all(departures);
    depart_all(departures);
}

void Transport::depart_all(const std::vector<Departure>& departures) {
    for (const Departure& departure : departures) depart(departure);
}

void Transport::depart(const Departure& departure) {
    if (!is_there_[departure.rank]) return;  // an endpoint's error may follow a close notice
    is_there_[departure.rank] = false;
    if (host_streams_ != nullptr) {
        host_streams_->stop_sending(departure.rank);
        // What it sent before comes first.
        std::vector<Departure> more;
        host_streams_->receive_rest(departure.rank, more);
    }
    sink_.on_departure(departure);
}

void Transport::close(uint64_t timeout_ns, uint32_t because_of) {
    // After a loss the notice comes first: a peer whose transfer fails looks for it.
    if (because_of != kNoRank) links_->send_close_notice(because_of);
    if (ucx_worker_) ucx_worker_->disconnect(is_there_, timeout_ns);
    const bool is_flushed = flush(timeout_ns);
    if (because_of == kNoRank) links_->send_close_notice(because_of);
    if (is_flushed) links_->part(is_there_, std::min(timeout_ns, kPartNs));
    // Cancels frames of this rank to itself.
    for (const LocalFrame& frame : std::exchange(local_, {})) frame.send->done(*frame.send, UCS_ERR_CANCELED);
}

// Returns true if all queued records were sent in time. Receives meanwhile: peers may wait for room, too.
bool Transport::flush(uint64_t timeout_ns) {
    const uint64_t end_ns = cpu::saturating_add(cpu::steady_now_ns(), timeout_ns);
    const auto is_flushed = [&] { return links_->is_flushed() && (!host_streams_ || host_streams_->is_flushed()); };
    while (!is_flushed() && cpu::steady_now_ns() < end_ns) progress();
    return is_flushed();
}

void Transport::on_frame(std::span<const std::byte> header, Payload& payload) {
    FrameHeader parsed;
    const char* wrong = parse_frame(header, payload.bytes(), limits_, parsed);
    if (const uint32_t peer = links_->receives_from(); peer != kNoRank) {
        if (wrong == nullptr && parsed.source != peer) wrong = "it says that another rank sent it";
        if (wrong == nullptr) return sink_.on_frame(parsed, payload);
        errors_.push_back({peer, {false, fmt::format("it sent a malformed frame: {}", wrong)}});
        return;
    }
    // With a wrong key nothing in the frame is trusted, not even its source.
    const bool has_header = header.size() == sizeof(FrameHeader) && parsed.source < num_ranks_;
    if (!has_header || parsed.key != keys_in_[parsed.source]) {
        ++num_refused_;
        return;
    }
    if (wrong != nullptr) {
        errors_.push_back({parsed.source, {false, fmt::format("it sent a malformed frame: {}", wrong)}});
        return;
    }
    sink_.on_frame(parsed, payload);
}

void Transport::on_endpoint_error(uint32_t peer, const char* reason) {
    errors_.push_back({peer, {false, fmt::format("its connection failed: {}", reason)}});
}

}  // namespace crossdock::network
