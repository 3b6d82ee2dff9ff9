// SPDX-License-Identifier: Apache-2.0
// The simulation's network between LSA teams: puts and signals of all ranks on their way. Every
// message takes its own time, so puts overtake each other, and so do signals; only a strong signal stays behind the
// earlier puts of its rank to that peer. A rank's messages share its link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/cpu/random.h"
#include "runtime/cpu/virtual_thread.h"

namespace crossdock::cpu {

struct NetworkConfig {
    uint64_t max_delay_ns = 30'000;
    uint64_t ns_per_kib = 20;  // of a rank's link: some 50 GB/s
    int cut_rank = -1;         // -1: none
    uint64_t cut_at_step = 0;  // from this step on the network does not reach it, nor it the network
};

class SimulatedNetwork {
  public:
    SimulatedNetwork(int num_ranks, const NetworkConfig& config, uint64_t seed);

    void put(int rank, int peer, void* target, const void* source, size_t bytes, uint64_t now_ns);
    void put_value(int rank, int peer, uint64_t* target, uint64_t value, uint64_t now_ns);
    void signal(int rank, int peer, uint64_t* word, uint64_t increase, uint64_t now_ns);
    // The rank's puts take what their sources hold now; when they arrive stays as it is.
    void read_sources(int rank);

    // What carries the rank's messages to the peer.
    VirtualThread& link(int rank, int peer);
    // What all links of the rank have done comes before what the caller does.
    void acquire(int rank);

    // When the next message arrives; UINT64_MAX: none is under way.
    uint64_t next_arrival_ns() const { return messages_.empty() ? UINT64_MAX : messages_.front().arrives_at_ns; }
    // False: none has arrived by then.
    bool advance_to(uint64_t now_ns);

    // The rank dies: of its latest messages some never leave it.
    void kill(int rank);
    // The rank's cable is cut: what is under way from it or to it is lost, and so is all that follows.
    void cut(int rank);
    // Memory that goes: nothing is read from it or written to it any more.
    void forget(const void* memory, size_t bytes);

  private:
    enum class Kind { kPut, kSignal };
    struct Message {
        uint64_t arrives_at_ns;
        uint64_t order;  // of issue, so that equal times have one order
        Kind kind;
        int rank;
        int peer;
        std::byte* target;
        const std::byte* source;  // null: what `bytes` holds
        size_t num_bytes;
        uint64_t increase;
        std::vector<std::byte> bytes;                 // read ahead of time
        bool operator<(const Message& other) const {  // std::push_heap keeps the largest in front: the next to arrive
            return arrives_at_ns != other.arrives_at_ns ? arrives_at_ns > other.arrives_at_ns : order > other.order;
        }
    };

    void read_source(Message& message);
    uint64_t leave(int rank, size_t bytes, uint64_t now_ns);
    uint64_t& last_put_arrival(int rank, int peer);
    void send(Message message);
    template <typename IsLost>
    void lose(IsLost is_lost);

    NetworkConfig config_;
    int num_ranks_;
    Random random_;
    std::vector<Message> messages_;  // a heap
    uint64_t num_sent_ = 0;
    std::vector<VirtualThread> links_;         // [ranks][peers]
    std::vector<uint64_t> link_free_ns_;       // [ranks]
    std::vector<uint64_t> last_put_arrivals_;  // [ranks][peers], made by the first put
    bool is_cut_ = false;
};

}  // namespace crossdock::cpu
