// SPDX-License-Identifier: Apache-2.0
// Sends the puts and signals of a device communicator, in one of two ways, as NCCL does:
//
// - Direct: the calling thread executes the operation, or posts it to the network.
// - Proxy: the calling thread writes a descriptor into a bounded queue, one per context and peer, and a helper thread
//   executes it, also for peers on this host. The source is read later; a flush or a counter tells when.
//
// In both, a strong signal follows all earlier puts of its context to that peer: the queue keeps their order, and the
// network numbers them. A weak signal follows its own put.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "crossdock/device/entry.hpp"
#include "device_api/descriptor.h"
#include "device_api/descriptor_queue.h"

namespace crossdock::network {
struct Operation;
}

namespace crossdock::device_api {

// From NCCL_GIN_TYPE, with NCCL's numbers: 2 is the proxy; 3, 4 (NCCL's types without a proxy), -1 and no value are
// direct. Throws ncclInvalidUsage for others.
enum class GinType { kProxy = 2, kDirect = 4 };
GinType chosen_type();

class Outbox {
  public:
    // depth: of each queue; 0: 128. ranks_on_machine: number of ranks that share its cores. has_remote_peers: some
    // ranks are on other hosts.
    Outbox(GinType type, int num_ranks, int num_contexts, int depth, int ranks_on_machine, bool has_remote_peers);
    // Waits a few seconds for pending operations.
    ~Outbox();
    Outbox(const Outbox&) = delete;
    Outbox& operator=(const Outbox&) = delete;

    GinType type() const { return type_; }

    // Returns false if the proxy's queue is full. Throws errors of the network.
    bool try_post(int context, int peer, const Descriptor& descriptor);
    // Number of posted operations; whether the sources of the first `number` have been read.
    uint64_t num_posted(int context, int peer) const;
    bool has_read(int context, int peer, uint64_t number) const;
    // Call it while waiting: completes direct operations whose sources have been read, and increments their counters.
    // Throws errors of the proxy.
    void progress(int context);
    // Waits until all posted sources have been read; returns false after the timeout, or if interrupted.
    bool drain(uint64_t timeout_ns);

    // Message suffix: the proxy's state, or empty.
    std::string state(int context) const;

  private:
    struct UnderWay {
        network::Operation* operation;
        const cpu::RemoteMemory* memory;
        uint64_t* counter;
    };
    // Per context and peer.
    struct Lane {
        explicit Lane(size_t depth) : queue(depth) {}
        DescriptorQueue queue;              // of the proxy
        std::mutex mutex;                   // of under_way
        std::deque<UnderWay> under_way;     // posted to the network, in order
        std::atomic<uint64_t> posted{0};    // direct: posted to the network; proxy: taken from the queue
        std::atomic<uint64_t> num_read{0};  // of them, in order
    };
    Lane& lane(int context, int peer) const {
        return *lanes_[static_cast<size_t>(context) * static_cast<size_t>(num_ranks_) + static_cast<size_t>(peer)];
    }
    static void carry_out(Lane& lane, int context, int peer, const Descriptor& descriptor);
    static bool end_some(Lane& lane);

    void run_proxy();
    bool work_once(bool& is_busy);
    bool has_queued(int context) const;
    bool is_queue_empty() const;
    void wake();
    void fail_proxy(const std::string& message);

    GinType type_;
    int num_ranks_;
    int num_spins_;  // of the proxy; 0: it shares a core with its rank
    bool has_remote_peers_;
    std::vector<std::unique_ptr<Lane>> lanes_;  // by context, then peer

    std::atomic<bool> is_over_{false};
    std::atomic<uint32_t> is_asleep_{0};
    std::atomic<bool> has_failed_{false};
    mutable std::mutex failure_mutex_;
    std::string failure_;
    std::thread proxy_;
};

}  // namespace crossdock::device_api
