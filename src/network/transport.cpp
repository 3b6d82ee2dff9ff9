// SPDX-License-Identifier: Apache-2.0
#include "network/transport.h"

#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace crossdock::network {
namespace {

constexpr int kNearLooks = 4;

// Of frames from source to target; both know both secrets.
uint64_t key_of(std::span<const RankAddress> addresses, uint32_t source, uint32_t target) {
    const uint64_t words[] = {addresses[source].secret[0], addresses[source].secret[1], source, target};
    return keyed_hash(addresses[target].secret, std::as_bytes(std::span(words)));
}

// Two byte strings as one.
std::vector<std::byte> pack(const std::vector<std::byte>& near, const std::vector<std::byte>& far) {
    const uint64_t near_bytes = near.size();
    std::vector<std::byte> packed(sizeof(near_bytes));
    std::memcpy(packed.data(), &near_bytes, sizeof(near_bytes));
    packed.insert(packed.end(), near.begin(), near.end());
    packed.insert(packed.end(), far.begin(), far.end());
    return packed;
}

struct Addresses {
    std::span<const std::byte> near, far;
};

Addresses unpack(std::span<const std::byte> packed, uint32_t peer) {
    uint64_t near_bytes = 0;
    require(packed.size() >= sizeof(near_bytes), ncclRemoteError, "rank {} sent no address of its worker", peer);
    std::memcpy(&near_bytes, packed.data(), sizeof(near_bytes));
    packed = packed.subspan(sizeof(near_bytes));
    require(near_bytes <= packed.size(), ncclRemoteError, "rank {} sent a broken address of its worker", peer);
    return {packed.first(near_bytes), packed.subspan(near_bytes)};
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
      is_near_(num_ranks_, false),
      is_there_(num_ranks_, true) {
    for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
        keys_out_.push_back(key_of(addresses, rank, peer));
        keys_in_.push_back(key_of(addresses, peer, rank));
    }
    const bool chosen = user_chose_transports();
    FrameReceiver& receiver = *this;
    if (!chosen) near_ = std::make_unique<UcxWorker>(Reach::kHost, receiver, num_ranks_);
    far_ = std::make_unique<UcxWorker>(chosen ? Reach::kChosen : Reach::kNetwork, receiver, num_ranks_);

    const std::vector<std::byte> blob = pack(near_ ? near_->address() : std::vector<std::byte>(), far_->address());
    std::vector<Link> links = meet(listener, addresses, rank, blob, config.timeout_ns);
    for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank) continue;
        const Addresses address = unpack(links[peer].blob, peer);
        is_near_[peer] = near_ && !address.near.empty() && addresses[peer].host == addresses[rank].host;
        worker_of(peer).connect(peer, is_near_[peer] ? address.near : address.far);
        (is_near_[peer] ? has_near_peers_ : has_far_peers_) = true;
    }
    watch_.emplace(std::move(links));
}

uint64_t Transport::good_payload(uint32_t peer) const {
    return peer == rank_ || is_near_[peer] || far_->sends_by_reference() ? kMaxFramePayload : kCopiedPayloadBytes;
}

ucs_status_t Transport::send(uint32_t peer, FrameHeader& header, Send& send) {
    header.key = keys_out_[peer];
    header.source = rank_;
    if (peer != rank_) return worker_of(peer).send(peer, send);
    local_.push_back({&header, &send});
    return UCS_INPROGRESS;
}

bool Transport::progress() {
    bool happened = false;
    // As many as there are now: what they cause is for the next call.
    for (size_t left = local_.size(); left > 0; --left) {
        const LocalFrame frame = local_.front();
        local_.pop_front();
        Payload payload = Payload::borrowed(frame.send->bytes.data(), frame.send->bytes.size());
        sink_.on_frame(*frame.header, payload);
        frame.send->done(*frame.send, UCS_OK);
        happened = true;
    }
    // A look into shared memory takes less than a caller's way here and back.
    for (int look = 0; has_near_peers_ && look < kNearLooks && !happened; ++look) happened = near_->progress();
    if (has_far_peers_) happened |= far_->progress();
    if (!errors_.empty()) {
        look_after_peers();  // who left, or was lost, knows better than an endpoint
        const std::vector<Departure> errors = std::exchange(errors_, {});
        for (const Departure& error : errors) depart(error);
    }
    return happened;
}

void Transport::drop(uint32_t peer) {
    is_there_[peer] = false;
    if (peer != rank_) worker_of(peer).drop(peer);
}

void Transport::look_after_peers() {
    for (const Departure& departure : watch_->poll()) depart(departure);
}

void Transport::depart(const Departure& departure) {
    if (!is_there_[departure.rank]) return;  // its endpoint's error follows its goodbye
    is_there_[departure.rank] = false;
    sink_.on_departure(departure);
}

void Transport::close(uint64_t timeout_ns, uint32_t because_of) {
    // Who is still sending or receiving here looks for a goodbye when that fails.
    if (because_of != kNoRank) watch_->say_goodbye(because_of);
    if (near_) near_->disconnect(is_there_, timeout_ns);
    if (far_) far_->disconnect(is_there_, timeout_ns);
    if (because_of == kNoRank) watch_->say_goodbye(because_of);
    // What it still sends to itself has no receiver any more.
    for (const LocalFrame& frame : std::exchange(local_, {})) frame.send->done(*frame.send, UCS_ERR_CANCELED);
}

void Transport::on_frame(std::span<const std::byte> header, Payload& payload) {
    FrameHeader parsed;
    const char* wrong = parse_frame(header, payload.bytes(), limits_, parsed);
    // Without the key nothing in it counts, its source neither.
    const bool has_header = header.size() == sizeof(FrameHeader) && parsed.source < num_ranks_;
    if (!has_header || parsed.key != keys_in_[parsed.source]) {
        ++num_refused_;
        return;
    }
    if (wrong != nullptr) {
        errors_.push_back({parsed.source, false, fmt::format("it sent a malformed frame: {}", wrong)});
        return;
    }
    sink_.on_frame(parsed, payload);
}

void Transport::on_endpoint_error(uint32_t peer, const char* reason) {
    errors_.push_back({peer, false, fmt::format("its connection failed: {}", reason)});
}

}  // namespace crossdock::network
