// SPDX-License-Identifier: Apache-2.0
#include "network/transport.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "runtime/cpu/clock.h"

namespace crossdock::network {
namespace {

constexpr int kHostPolls = 4;
// At the end, ranks get this time to read what was sent to them.
constexpr uint64_t kPartNs = 500'000'000;

// Two byte strings as one.
std::vector<std::byte> pack(const std::vector<std::byte>& host, const std::vector<std::byte>& network) {
    const uint64_t host_bytes = host.size();
    std::vector<std::byte> packed(sizeof(host_bytes));
    std::memcpy(packed.data(), &host_bytes, sizeof(host_bytes));
    packed.insert(packed.end(), host.begin(), host.end());
    packed.insert(packed.end(), network.begin(), network.end());
    return packed;
}

struct Addresses {
    std::span<const std::byte> host, network;
};

Addresses unpack(std::span<const std::byte> packed, uint32_t peer) {
    uint64_t host_bytes = 0;
    require(packed.size() >= sizeof(host_bytes), ncclRemoteError, "rank {} sent no address of its worker", peer);
    std::memcpy(&host_bytes, packed.data(), sizeof(host_bytes));
    packed = packed.subspan(sizeof(host_bytes));
    require(host_bytes <= packed.size(), ncclRemoteError, "rank {} sent a broken address of its worker", peer);
    return {packed.first(host_bytes), packed.subspan(host_bytes)};
}

bool user_chose_transports() {
    const char* value = std::getenv("UCX_TLS");
    return value != nullptr && *value != '\0' && std::strcmp(value, "all") != 0;
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
      workers_(num_ranks_),
      is_there_(num_ranks_, true) {
    bool has_local_peers = false;
    bool has_remote_peers = false;
    for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
        if (peer != rank) (addresses[peer].host == addresses[rank].host ? has_local_peers : has_remote_peers) = true;
    }
    const bool chosen = user_chose_transports();
    FrameReceiver& receiver = *this;
    const auto worker = [&](Reach reach) {
        return can_reach(reach) ? std::make_unique<UcxWorker>(reach, receiver, num_ranks_) : nullptr;
    };
    if (has_local_peers && !chosen) host_worker_ = worker(Reach::kHost);
    if (has_remote_peers || chosen) network_worker_ = worker(chosen ? Reach::kChosen : Reach::kNetwork);

    const auto address_of = [](const std::unique_ptr<UcxWorker>& each) {
        return each != nullptr ? each->address() : std::vector<std::byte>();
    };
    std::vector<Link> links =
        meet(listener, addresses, rank, pack(address_of(host_worker_), address_of(network_worker_)), config.timeout_ns);
    std::vector<std::vector<std::byte>> blobs;
    for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
        keys_out_[peer] = links[peer].key_out;
        keys_in_[peer] = links[peer].key_in;
        blobs.push_back(std::move(links[peer].blob));
    }
    links_.emplace(std::move(links), receiver);
    for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank) continue;
        workers_[peer] = connect(peer, blobs[peer], addresses[peer].host == addresses[rank].host);
        if (workers_[peer] == nullptr) links_->carry_frames(peer);
    }
}

// Returns null if frames to that peer go over its link. The peer may choose otherwise; both ways are received.
UcxWorker* Transport::connect(uint32_t peer, std::span<const std::byte> packed_address, bool is_same_host) {
    const Addresses address = unpack(packed_address, peer);
    const bool is_through_host = is_same_host && host_worker_ != nullptr && !address.host.empty();
    UcxWorker* worker = is_through_host ? host_worker_.get() : network_worker_.get();
    const std::span<const std::byte> place = is_through_host ? address.host : address.network;
    if (worker == nullptr || place.empty()) return nullptr;
    try {
        worker->connect(peer, place);
    } catch (const Error&) {
        return nullptr;  // on another RDMA network, or it has left already
    }
    return worker;
}

uint64_t Transport::good_payload(uint32_t peer) const {
    return peer == rank_ || workers_[peer] != nullptr ? kMaxFramePayload : kLinkPayloadBytes;
}

ucs_status_t Transport::send(uint32_t peer, FrameHeader& header, Send& send) {
    UcxWorker* worker = workers_[peer];
    header.key = worker != nullptr ? keys_out_[peer] : 0;  // on a link anyone on its way could read it
    header.source = rank_;
    if (worker != nullptr) return worker->send(peer, send);
    if (peer != rank_) return links_->send(peer, send);
    local_.push_back({&header, &send});
    return UCS_INPROGRESS;
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
    for (int look = 0; host_worker_ != nullptr && look < kHostPolls && !happened; ++look)
        happened = host_worker_->progress();
    if (network_worker_ != nullptr) happened |= network_worker_->progress();
    std::vector<Departure> departures;
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
    if (workers_[peer] != nullptr) workers_[peer]->drop(peer);
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
    sink_.on_departure(departure);
}

void Transport::close(uint64_t timeout_ns, uint32_t because_of) {
    // After a loss the notice comes first: a peer whose transfer fails looks for it.
    if (because_of != kNoRank) links_->send_close_notice(because_of);
    if (host_worker_) host_worker_->disconnect(is_there_, timeout_ns);
    if (network_worker_) network_worker_->disconnect(is_there_, timeout_ns);
    const bool is_flushed = flush_links(timeout_ns);
    if (because_of == kNoRank) links_->send_close_notice(because_of);
    if (is_flushed) links_->part(is_there_, std::min(timeout_ns, kPartNs));
    // Cancels frames of this rank to itself.
    for (const LocalFrame& frame : std::exchange(local_, {})) frame.send->done(*frame.send, UCS_ERR_CANCELED);
}

// Returns true if all queued records were sent in time. Receives meanwhile: peers may wait for room, too.
bool Transport::flush_links(uint64_t timeout_ns) {
    const uint64_t end_ns = cpu::saturating_add(cpu::steady_now_ns(), timeout_ns);
    while (!links_->is_flushed() && cpu::steady_now_ns() < end_ns) progress();
    return links_->is_flushed();
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
