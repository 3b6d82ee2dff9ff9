// SPDX-License-Identifier: Apache-2.0
// Frames between the ranks of a communicator: through memory that ranks of a host share, over RDMA with UCX between
// hosts that have it, and over the authenticated links where neither can be had. Frames to one peer may overtake each
// other. One thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "network/frame.h"
#include "network/handshake.h"
#include "network/host_streams.h"
#include "network/peer_links.h"
#include "network/ucx.h"

namespace crossdock::network {

class FrameSink {
  public:
    virtual ~FrameSink() = default;
    // A well-formed frame of a rank of this communicator.
    virtual void on_frame(const FrameHeader& header, Payload& payload) = 0;
    virtual void on_departure(const Departure& departure) = 0;
};

struct TransportConfig {
    uint32_t num_contexts;
    uint64_t timeout_ns;  // of the handshake
};

class Transport final : private FrameReceiver {
  public:
    // Collective: connects all ranks. Throws ncclRemoteError that names the ranks that are missing.
    Transport(const Listener& listener, std::span<const RankAddress> addresses, uint32_t rank,
              const TransportConfig& config, FrameSink& sink);

    uint32_t rank() const { return rank_; }
    uint32_t num_ranks() const { return num_ranks_; }
    bool is_there(uint32_t peer) const { return is_there_[peer]; }

    // Best payload size of frames to this peer, in bytes.
    uint64_t good_payload(uint32_t peer) const;

    // Fills in the source and the key; `send.header` must be `header`. Returns UCS_INPROGRESS if `send.done` will be
    // called, once; otherwise the final status, and `send.done` is not called.
    ucs_status_t send(uint32_t peer, FrameHeader& header, Send& send);

    // Passes received frames to the sink, completes sends. Returns true if anything happened.
    bool progress();
    // Closes the connection to a lost peer. Not while a frame is being handed out.
    void drop(uint32_t peer);
    // Checks whether peers have left. Call it from time to time.
    void look_after_peers();

    // Failure reports: as PeerLinks'. They may wait for room (is_flushed).
    void send_failure_report(uint32_t lost) { links_->send_failure_report(lost); }
    uint32_t reported_loss(uint32_t peer) const { return links_->reported_loss(peer); }
    bool is_flushed() const { return links_->is_flushed(); }

    // Sends close notices; because_of: the lost rank that is the reason, or kNoRank. Pending sends get timeout_ns.
    void close(uint64_t timeout_ns, uint32_t because_of);

    // Number of frames with a wrong key: from another communicator, or from a process that is no rank.
    uint64_t num_refused() const { return num_refused_; }

  private:
    struct LocalFrame {
        FrameHeader* header;
        Send* send;
    };
    void on_frame(std::span<const std::byte> header, Payload& payload) override;
    void on_endpoint_error(uint32_t peer, const char* reason) override;
    void depart(const Departure& departure);
    void depart_all(const std::vector<Departure>& departures);
    enum class Carrier : uint8_t { kLink, kHost, kUcx };
    Carrier connect(uint32_t peer, std::span<const std::byte> blob);
    bool flush(uint64_t timeout_ns);

    uint32_t rank_;
    uint32_t num_ranks_;
    FrameLimits limits_;
    FrameSink& sink_;
    std::vector<uint64_t> keys_out_;  // of frames that UCX or memory of the host carries
    std::vector<uint64_t> keys_in_;
    std::vector<Carrier> carriers_;  // of frames to each peer
    std::vector<bool> is_there_;
    std::vector<Departure> errors_;  // reported after frames have been handed out
    std::deque<LocalFrame> local_;   // of this rank to itself
    uint64_t num_refused_ = 0;
    // Last members: their destructors still call back.
    std::optional<PeerLinks> links_;
    std::unique_ptr<HostStreams> host_streams_;  // null: no peer, or no memory
    std::unique_ptr<UcxWorker> ucx_worker_;      // null: no peer, or no RDMA
};

}  // namespace crossdock::network
