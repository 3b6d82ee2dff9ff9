// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/simulated_network.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "runtime/cpu/local_put.h"

namespace crossdock::cpu {
namespace {

constexpr size_t kSmallBytes = 64;  // per message, besides its data

bool lies_in(const void* pointer, const void* memory, size_t bytes) {
    const auto* first = static_cast<const std::byte*>(memory);
    return pointer != nullptr && pointer >= first && pointer < first + bytes;
}

// A short message's source may be written and its target polled meanwhile, so it is copied word by word, as in
// put_local.
void read(VirtualThread& sender, std::byte* target, const std::byte* source, size_t bytes) {
    if (!goes_by_words(target, source, bytes)) {
        sender.read(source, bytes);
        copy_unwatched(target, source, bytes);
        return;
    }
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        const uint64_t word = sender.load(reinterpret_cast<const uint64_t*>(source + at));
        copy_unwatched(target + at, &word, sizeof(word));
    }
}

void write(VirtualThread& sender, std::byte* target, const std::byte* source, size_t bytes) {
    if (!goes_by_words(target, source, bytes)) {
        sender.write(target, bytes);
        copy_unwatched(target, source, bytes);
        return;
    }
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word = 0;
        copy_unwatched(&word, source + at, sizeof(word));
        sender.store_release(reinterpret_cast<uint64_t*>(target + at), word);
    }
}

}  // namespace

SimulatedNetwork::SimulatedNetwork(int num_ranks, const NetworkConfig& config, uint64_t seed)
    : config_(config),
      num_ranks_(num_ranks),
      random_(Random::mix(~seed)),
      links_(static_cast<size_t>(num_ranks) * static_cast<size_t>(num_ranks)) {
    link_free_ns_.resize(static_cast<size_t>(num_ranks));
}

// Returns when the message leaves its rank's link.
uint64_t SimulatedNetwork::leave(int rank, size_t bytes, uint64_t now_ns) {
    uint64_t& free_ns = link_free_ns_[static_cast<size_t>(rank)];
    free_ns = std::max(free_ns, now_ns) + (bytes + kSmallBytes) * config_.ns_per_kib / 1024;
    return free_ns;
}

VirtualThread& SimulatedNetwork::link(int rank, int peer) {
    const size_t ranks = static_cast<size_t>(num_ranks_);
    return links_[static_cast<size_t>(rank) * ranks + static_cast<size_t>(peer)];
}

void SimulatedNetwork::acquire(int rank) {
    for (int peer = 0; peer < num_ranks_; ++peer) link(rank, peer).acquire();
}

uint64_t& SimulatedNetwork::last_put_arrival(int rank, int peer) {
    const size_t ranks = static_cast<size_t>(num_ranks_);
    if (last_put_arrivals_.empty()) last_put_arrivals_.resize(ranks * ranks);
    return last_put_arrivals_[static_cast<size_t>(rank) * ranks + static_cast<size_t>(peer)];
}

void SimulatedNetwork::send(Message message) {
    if (is_cut_ && (message.rank == config_.cut_rank || message.peer == config_.cut_rank)) return;
    message.order = num_sent_++;
    messages_.push_back(std::move(message));
    std::push_heap(messages_.begin(), messages_.end());
}

void SimulatedNetwork::put(int rank, int peer, void* target, const void* source, size_t bytes, uint64_t now_ns) {
    const uint64_t arrival_ns = leave(rank, bytes, now_ns) + 1 + random_.below(config_.max_delay_ns);
    uint64_t& last_ns = last_put_arrival(rank, peer);
    last_ns = std::max(last_ns, arrival_ns);
    send({arrival_ns,
          0,
          Kind::kPut,
          rank,
          peer,
          static_cast<std::byte*>(target),
          static_cast<const std::byte*>(source),
          bytes,
          0,
          {}});
}

void SimulatedNetwork::put_value(int rank, int peer, uint64_t* target, uint64_t value, uint64_t now_ns) {
    const uint64_t arrival_ns = leave(rank, sizeof(value), now_ns) + 1 + random_.below(config_.max_delay_ns);
    uint64_t& last_ns = last_put_arrival(rank, peer);
    last_ns = std::max(last_ns, arrival_ns);
    std::vector<std::byte> bytes(sizeof(value));
    std::memcpy(bytes.data(), &value, sizeof(value));
    send({arrival_ns, 0, Kind::kPut, rank, peer, reinterpret_cast<std::byte*>(target), nullptr, sizeof(value), 0,
          std::move(bytes)});
}

void SimulatedNetwork::signal(int rank, int peer, uint64_t* word, uint64_t increase, uint64_t now_ns) {
    const uint64_t arrival_ns = leave(rank, 0, now_ns) + 1 + random_.below(config_.max_delay_ns);
    send({std::max(arrival_ns, last_put_arrival(rank, peer)),
          0,
          Kind::kSignal,
          rank,
          peer,
          reinterpret_cast<std::byte*>(word),
          nullptr,
          0,
          increase,
          {}});
}

void SimulatedNetwork::read_sources(int rank) {
    for (Message& message : messages_) {
        if (message.rank == rank) read_source(message);
    }
}

void SimulatedNetwork::read_source(Message& message) {
    if (message.source == nullptr) return;
    message.bytes.resize(message.num_bytes);
    read(link(message.rank, message.peer), message.bytes.data(), message.source, message.num_bytes);
    message.source = nullptr;
}

uint64_t SimulatedNetwork::last_arrival_ns(int rank) const {
    uint64_t last_ns = 0;
    for (const Message& message : messages_) {
        if (message.rank == rank) last_ns = std::max(last_ns, message.arrives_at_ns);
    }
    return last_ns;
}

bool SimulatedNetwork::advance_to(uint64_t now_ns) {
    bool has_arrived = false;
    while (!messages_.empty() && messages_.front().arrives_at_ns <= now_ns) {
        std::pop_heap(messages_.begin(), messages_.end());
        Message message = std::move(messages_.back());
        messages_.pop_back();
        has_arrived = true;
        VirtualThread& sender = link(message.rank, message.peer);
        if (message.kind == Kind::kSignal) {
            sender.add_release(reinterpret_cast<uint64_t*>(message.target), message.increase);
        } else if (message.num_bytes > 0) {
            read_source(message);
            write(sender, message.target, message.bytes.data(), message.num_bytes);
        }
    }
    return has_arrived;
}

template <typename IsLost>
void SimulatedNetwork::lose(IsLost is_lost) {
    std::erase_if(messages_, is_lost);
    std::make_heap(messages_.begin(), messages_.end());
}

void SimulatedNetwork::kill(int rank) {
    std::vector<uint64_t> orders;
    for (const Message& message : messages_) {
        if (message.rank == rank) orders.push_back(message.order);
    }
    if (orders.empty()) return;
    std::sort(orders.begin(), orders.end());
    // Loses all messages from one of them on, so that no signal arrives without earlier puts.
    const uint64_t first_lost = orders[random_.below(orders.size())];
    lose([&](const Message& message) { return message.rank == rank && message.order >= first_lost; });
}

void SimulatedNetwork::cut(int rank) {
    config_.cut_rank = rank;
    is_cut_ = true;
    lose([&](const Message& message) { return message.rank == rank || message.peer == rank; });
}

void SimulatedNetwork::forget(const void* memory, size_t bytes) {
    for (VirtualThread& each : links_) each.acquire();
    if (messages_.empty()) return;
    lose([&](const Message& message) {
        return lies_in(message.target, memory, bytes) || lies_in(message.source, memory, bytes);
    });
}

}  // namespace crossdock::cpu
