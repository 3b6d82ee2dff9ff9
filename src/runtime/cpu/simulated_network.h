// SPDX-License-Identifier: Apache-2.0
// The simulation's network between LSA teams: pending puts and signals of all ranks. Each message has its own delay, so
// puts overtake each other, and so do signals; only a strong signal stays behind the earlier puts of its rank to that
// peer. A rank's messages share its link.
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
    uint64_t cut_at_step = 0;  // from this step on it is disconnected
};

class SimulatedNetwork {
  public:
    SimulatedNetwork(int num_ranks, const NetworkConfig& config, uint64_t seed);

    void put(int rank, int peer, void* target, const void* source, size_t bytes, uint64_t now_ns);
    void put_value(int rank, int peer, uint64_t* target, uint64_t value, uint64_t now_ns);
    void signal(int rank, int peer, uint64_t* word, uint64_t increase, uint64_t now_ns);
    // Reads the sources of the rank's puts now. Does not change when they arrive.
    void read_sources(int rank);

    // The link that carries the rank's messages to the peer.
    VirtualThread& link(int rank, int peer);
    // Orders everything that the rank's links have done before the caller's next accesses.
    void acquire(int rank);

    // When the next message arrives; UINT64_MAX: none is under way.
    uint64_t next_arrival_ns() const { return messages_.empty() ? UINT64_MAX : messages_.front().arrives_at_ns; }
    // The latest time at which a message of the rank arrives; 0: none is under way.
    uint64_t last_arrival_ns(int rank) const;
    // Delivers messages. Returns false if none has arrived by then.
    bool advance_to(uint64_t now_ns);

    // The rank dies: some of its latest messages are lost.
    void kill(int rank);
    // The rank's cable is cut: pending and later messages from and to it are lost.
    void cut(int rank);
    // The memory is freed: it is not accessed any more.
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
        const std::byte* source;  // null: use `bytes`
        size_t num_bytes;
        uint64_t increase;
        std::vector<std::byte> bytes;                 // read early
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
