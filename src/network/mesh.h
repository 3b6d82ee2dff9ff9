// SPDX-License-Identifier: Apache-2.0
// One-sided operations between the ranks of a communicator: put, signal, get, on memory that all have registered.
//
// Only operations of one context are ordered. A put has landed when its signal arrives; a strong signal means that all
// earlier puts and signals of its context to that rank have landed, too. A put has ended when its source may be reused,
// a get when its bytes have landed. If a rank leaves, dies, sends malformed frames or accepts no data for the timeout,
// every later call fails with a message that names it. A mesh with outlives_ranks drops operations to that rank instead
// and continues. Thread safe: calls take a mutex.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "network/device_memory.h"
#include "network/lane.h"
#include "network/operation.h"
#include "network/region.h"
#include "network/staging.h"
#include "network/transport.h"

namespace crossdock::network {

struct MeshConfig {
    uint64_t join_timeout_ns;              // of the constructor
    uint64_t progress_timeout_ns;          // a peer that accepts no data for this long is lost
    std::unique_ptr<DeviceMemory> device;  // null: host memory only
    bool outlives_ranks = false;           // a lost rank fails only operations to it
};

class Mesh : private FrameSink {
  public:
    // Collective. Throws ncclRemoteError that names the ranks that are missing.
    Mesh(const Listener& listener, std::span<const RankAddress> addresses, uint32_t rank, MeshConfig config);
    // Waits a few seconds for pending operations, then leaves and tells the peers.
    ~Mesh() override;

    uint32_t rank() const { return transport_.rank(); }
    uint32_t num_ranks() const { return transport_.num_ranks(); }

    // Every rank adds contexts in the same order. Returns the number of the first one.
    uint32_t add_contexts(uint32_t count);

    // Collective: waits for all ranks, at most timeout_ns. signals_only: only signals write this memory, which is
    // zeroed.
    Region* register_memory(void* base, uint64_t bytes, MemoryKind kind, bool signals_only, uint64_t timeout_ns);
    // From now on only signals write these words of registered device memory. Returns false if no region holds them.
    bool keep_words(const void* first, uint64_t bytes);
    // For callers whose operations come from a queue that another thread drains, calling progress() after each round:
    // waits briefly until several rounds have brought no operation on this memory.
    void await_operations(const Region* region);
    // Waits for operations on it here. Later frames for it are dropped.
    void deregister_memory(Region* region);

    // Throw ncclInvalidArgument without an effect, or what check() throws.
    Operation* put(uint32_t context, uint32_t peer, const Span& source, const Span& target, const Signal& signal);
    Operation* get(uint32_t context, uint32_t peer, const Span& remote, const Span& local);
    Operation* flush(uint32_t context, uint32_t peer);

    // A put from host memory to host memory that copies its source, so there is no operation to test. Its last piece is
    // held back until the next call, which may add a signal to it. To a lost rank: dropped.
    void put_copy(uint32_t context, uint32_t peer, std::span<const std::byte> bytes, const Span& target);
    // A strong signal comes after all of the context's puts to that peer.
    void signal_copy(uint32_t context, uint32_t peer, const Signal& signal);

    // Notes are small messages between the ranks' host code. The numbers of notes to a peer grow; reading one discards
    // earlier ones.
    void send_note(uint32_t peer, uint64_t number, std::span<const std::byte> bytes);
    // Returns false if it has not arrived.
    bool read_note(uint32_t peer, uint64_t number, std::vector<std::byte>& bytes);

    // Why a rank is lost, or that it left some time ago. Empty: it is alive.
    std::string why_gone(uint32_t peer);
    bool left_in_order(uint32_t peer);
    // Tells all peers, before it returns, that this rank fails because it has lost `lost`; kNoRank: that this is over.
    // A mesh that does not outlive its ranks does this itself.
    void report_loss(uint32_t lost);
    // The rank whose loss the peer has reported, also after its end; kNoRank: none.
    uint32_t reported_loss(uint32_t peer);

    // Returns true if the operation has ended, and frees it. Otherwise calls progress().
    bool test(Operation* operation);
    bool progress();  // true if something happened
    // Progresses if no thread has for idle_ns; true if something happened.
    bool progress_if_idle(uint64_t idle_ns);

    // From now on, leaving does not wait for peers that accept nothing.
    void stop_waiting() { waits_briefly_.store(true, std::memory_order_relaxed); }

    // Throws ncclRemoteError if the mesh has failed.
    void check();
    bool has_failed() const { return has_failed_.load(std::memory_order_relaxed); }
    uint64_t num_refused_frames();

  private:
    // Outgoing state per context and peer: frame numbers, and which operations have ended.
    struct Channel {
        uint64_t next_frame = 0;
        uint64_t next_operation = 0;
        Lane ended;
    };
    // Incoming state per context and peer.
    struct Inlet {
        Lane landed;
        std::vector<FrameHeader> signals;  // that wait for bytes
    };
    struct PeerState {
        uint64_t waits = 0;  // pending frames to it and gets from it
        uint64_t last_change_ns = 0;
        std::map<uint32_t, RemoteRegion> early;  // announced there, not yet registered here
        std::map<uint64_t, std::vector<std::byte>> notes;
        uint64_t gone_ns = 0;     // when it left or died; 0: it is alive
        std::string gone_reason;  // empty: it left in order
        std::string lost;         // why it is lost; empty: it is not
    };
    // A payload on its way into memory.
    struct Landing {
        Mesh* mesh;
        FrameHeader header;
        Region* region;
        std::byte* target;
        std::byte* staging;  // if the target is device memory
    };
    struct Unstaged {
        Landing* landing;
        std::unique_ptr<Payload> payload;
    };
    // A pending signal: waits for a copy to the device, for the word that it is added to, or for an earlier signal.
    struct LateSignal {
        Region* region;
        uint64_t offset, value;
        uint64_t step;          // to the device, that must be done first
        bool is_word_unknown;   // its value has not been requested yet
        const std::byte* word;  // its value, in staging memory
        std::optional<uint64_t> known;
    };
    struct Arriving {
        uint64_t step;
        Landing* landing;
    };
    struct Leaving {
        uint64_t step;
        OutFrame* frame;
    };

    void on_frame(const FrameHeader& header, Payload& payload) override;
    void on_departure(const Departure& departure) override;

    // mesh.cpp
    void fail_all(std::string message);
    // For callbacks of the transport and the progress thread: errors of the device fail the mesh.
    template <typename Work>
    void guarded(Work work) {
        try {
            work();
        } catch (const std::exception& error) {
            device_has_failed_ = true;
            fail_all(error.what());
        }
    }
    bool are_in(uint64_t step);
    void release(std::unique_lock<std::mutex>& lock, Region* region);
    void fail_peer(uint32_t rank, std::string message);
    uint32_t rank_to_name(uint32_t peer) const;
    bool is_lost(uint32_t rank) const { return !peers_[rank].lost.empty(); }
    bool is_reached(uint32_t rank) const { return !is_lost(rank) && transport_.is_there(rank); }
    bool is_idle() const;
    void check_locked() const;
    bool progress_locked();
    void look_for_stalls(uint64_t now_ns);
    bool wait_locked(std::unique_lock<std::mutex>& lock, uint64_t timeout_ns, const std::function<bool()>& is_over);
    bool waits_briefly() const { return !failure_.empty() || waits_briefly_.load(std::memory_order_relaxed); }

    void begin_wait(uint32_t peer);
    void note_change(uint32_t peer) {
        // The clock of the last progress may be older than the wait.
        peers_[peer].last_change_ns = std::max(peers_[peer].last_change_ns, now_ns_);
    }

    // mesh_outgoing.cpp
    // is_late: it is dropped, also if the peer has left.
    Operation* start(Operation::Kind kind, uint32_t context, uint32_t peer, bool is_late = false);
    void check_span(const Span& span, const char* name, uint32_t peer, bool is_remote) const;
    uint64_t piece_bytes_for(MemoryKind here, MemoryKind there, uint32_t peer) const;
    void pump(Operation& operation);
    bool send_piece(Operation& operation);
    OutFrame* take_frame(uint32_t peer, Operation* operation);
    void send_frame(OutFrame& frame);
    static void on_sent(Send& send, ucs_status_t status);
    void finish(OutFrame& frame, ucs_status_t status);
    void end(Operation& operation);
    void progress_outgoing();
    void answer(const FrameHeader& question, Region& region);
    void send_header(uint32_t peer, const FrameHeader& header);

    // mesh_copies.cpp
    OutFrame* copy_frame(uint32_t peer, const FrameHeader& header, std::span<const std::byte> bytes);
    void send_held();

    // mesh_incoming.cpp
    void act_on(const FrameHeader& header, Payload& payload);
    void on_announcement(const FrameHeader& header);
    void on_put(const FrameHeader& header, Payload& payload);
    void on_get(const FrameHeader& header);
    void on_reply(const FrameHeader& header, Payload& payload);
    void on_refusal(const FrameHeader& header);
    void on_note(const FrameHeader& header, const Payload& payload);
    void land(const FrameHeader& header, Region& region, std::byte* target, Payload& payload);
    bool stage(Landing& landing, Payload& payload);
    static void on_fetched(void* landing, ucs_status_t status);
    void fetched(Landing* landing);
    void landed(Landing* landing);
    void put_landed(const FrameHeader& header);
    bool try_signal(Inlet& inlet, const FrameHeader& header);
    void apply_signal(const FrameHeader& header);
    bool ask_for_word(LateSignal& late);
    void add_to_word(const LateSignal& late);
    void write_word(Region& region, uint64_t offset, uint64_t value);
    void progress_signals(uint64_t done);
    void reply_landed(const FrameHeader& header);
    void progress_incoming();

    Channel& channel(uint32_t context, uint32_t peer) { return channels_[context][peer]; }
    Inlet& inlet(uint32_t context, uint32_t peer);
    Region* find(uint32_t id) { return was_registered(id) && !regions_[id]->is_leaving ? regions_[id].get() : nullptr; }
    bool was_registered(uint32_t id) const { return id < regions_.size(); }

    std::mutex mutex_;
    std::atomic<uint64_t> progressed_ns_{0};  // time of the last progress
    uint64_t now_ns_ = 0;                     // the same
    uint32_t num_progresses_ = 0;
    uint64_t num_rounds_ = 0;  // calls of progress()
    MeshConfig config_;
    std::string failure_;
    std::atomic<bool> has_failed_{false};
    std::atomic<bool> waits_briefly_{false};
    bool is_closing_ = false;
    bool takes_nothing_ = false;  // incoming frames are dropped
    bool device_has_failed_ = false;
    uint32_t num_contexts_ = 0;
    std::vector<std::unique_ptr<Region>> regions_;  // by number, including deregistered ones
    std::vector<PeerState> peers_;
    std::vector<std::vector<Channel>> channels_;  // by context and peer
    std::vector<std::vector<Inlet>> inlets_;

    OperationPool operations_;
    OutFramePool frames_;
    std::unordered_map<uint64_t, Operation*> questions_;
    uint64_t next_question_ = 1;
    StagingRing staging_out_;
    std::deque<Operation*> starved_;  // of staging
    std::deque<Leaving> leaving_;
    OutFrame* held_ = nullptr;  // a put's last piece, which may carry the signal behind it
    std::vector<std::vector<std::byte>> spare_copies_;

    StagingRing staging_in_;
    std::deque<Unstaged> unstaged_;
    std::deque<Arriving> arriving_;
    std::deque<LateSignal> late_signals_;
    uint64_t last_step_in_ = 0;
    uint64_t num_fetches_ = 0;
    uint64_t num_frames_out_ = 0;
    uint64_t next_look_ns_ = 0;
    std::vector<std::pair<uint32_t, std::string>> failed_transfers_;
    uint32_t failed_rank_ = kNoRank;  // whose loss is failure_
    bool is_report_due_ = false;      // of failed_rank_
    std::vector<uint32_t> dropped_;   // lost ranks whose connections are to be closed

    // Last, so that it is destroyed first: its callbacks use the other members.
    Transport transport_;
};

}  // namespace crossdock::network
