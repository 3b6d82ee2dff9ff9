// SPDX-License-Identifier: Apache-2.0
// One-sided operations between the ranks of a communicator: put, signal, get, on memory that all registered.
//
// A context orders only itself. A put is there when its signal is; a strong signal says that all earlier puts and
// signals of its context to that rank are there as well. A put has ended when its source may be reused, a get when its
// bytes are there. Who leaves, dies, sends nonsense or takes nothing for the timeout makes every later call fail with
// a message that names the rank; a mesh that outlives its ranks drops what was meant for that rank, and goes on. Calls
// of several threads take turns.
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
    uint64_t join_timeout_ns;              // of meeting
    uint64_t progress_timeout_ns;          // so long may a rank take nothing of what is sent to it
    std::unique_ptr<DeviceMemory> device;  // null: host memory only
    bool outlives_ranks = false;           // a rank that is lost concerns only what is sent to it
};

class Mesh : private FrameSink {
  public:
    // Collective. Error with ncclRemoteError that names the ranks that did not come.
    Mesh(const Listener& listener, std::span<const RankAddress> addresses, uint32_t rank, MeshConfig config);
    // Ends what is under way, waiting a little for it, and tells the others.
    ~Mesh() override;

    uint32_t rank() const { return transport_.rank(); }
    uint32_t num_ranks() const { return transport_.num_ranks(); }

    // Contexts that every rank adds in the same order; returns the first one's number.
    uint32_t add_contexts(uint32_t count);

    // Collective: waits for all ranks, at most so long. `signals_only`: nobody else writes this memory, which holds
    // zeros now.
    Region* register_memory(void* base, uint64_t bytes, MemoryKind kind, bool signals_only, uint64_t timeout_ns);
    // For owners whose operations come from a queue that somebody else empties, who progresses after each round of it:
    // waits, a moment at most, until some rounds have brought nothing for this memory.
    void await_operations(const Region* region);
    // Waits for what touches it here. What comes for it later is dropped.
    void deregister_memory(Region* region);

    // Errors are ncclInvalidArgument, where nothing has happened, or what check() throws.
    Operation* put(uint32_t context, uint32_t peer, const Span& source, const Span& target, const Signal& signal);
    Operation* get(uint32_t context, uint32_t peer, const Span& remote, const Span& local);
    Operation* flush(uint32_t context, uint32_t peer);

    // A put from host memory to host memory that leaves its source alone: there is nothing to test, and nothing to wait
    // for. Its last piece waits in this rank for the signal behind it, until the next call. To a lost rank: dropped.
    void put_copy(uint32_t context, uint32_t peer, std::span<const std::byte> bytes, const Span& target);
    // If the signal is strong, behind all of the context's puts to that peer.
    void signal_copy(uint32_t context, uint32_t peer, const Signal& signal);

    // Notes are small messages from host to host. Numbers of the notes to a peer grow; reading one forgets those
    // before.
    void send_note(uint32_t peer, uint64_t number, std::span<const std::byte> bytes);
    // False: it has not come.
    bool read_note(uint32_t peer, uint64_t number, std::vector<std::byte>& bytes);

    // What became of a rank that is gone: lost, or, for some time, left. Empty: it is there.
    std::string why_gone(uint32_t peer);
    bool took_leave(uint32_t peer);  // whatever has become of it since

    // True once: then the operation is gone. Progresses if it has not ended.
    bool test(Operation* operation);
    bool progress();  // true if something happened
    // Progresses if nobody has for so long; true if something happened.
    bool progress_if_idle(uint64_t idle_ns);

    // Throws what has gone wrong between ranks, if anything has.
    void check();
    bool has_failed() const { return has_failed_.load(std::memory_order_relaxed); }
    uint64_t num_refused_frames();

  private:
    // What a rank does in one context for one peer: numbers of frames, and which operations have ended.
    struct Channel {
        uint64_t next_frame = 0;
        uint64_t next_operation = 0;
        Lane ended;
    };
    // What comes from one peer in one context.
    struct Inlet {
        Lane landed;
        std::vector<FrameHeader> signals;  // that wait for bytes
    };
    struct PeerState {
        uint64_t waits = 0;  // frames to it, and gets from it, that have not ended
        uint64_t last_change_ns = 0;
        std::map<uint32_t, RemoteRegion> early;  // announced there, not yet registered here
        std::map<uint64_t, std::vector<std::byte>> notes;
        uint64_t gone_ns = 0;     // since when the rank is not there
        std::string gone_reason;  // empty: it left in order
        std::string lost;         // why nothing goes to it and nothing comes from it any more
    };
    // Bytes that are on their way into memory.
    struct Landing {
        Mesh* mesh;
        FrameHeader header;
        Region* region;
        std::byte* target;
        std::byte* staging;  // of device memory
    };
    struct Unstaged {
        Landing* landing;
        std::unique_ptr<Payload> payload;
    };
    // A signal that waits: for bytes on their way to the device, for the word that it is added to, or for an earlier
    // one.
    struct LateSignal {
        Region* region;
        uint64_t offset, value;
        uint64_t step;          // inwards, which must be done first
        bool is_word_unknown;   // nobody has been asked yet what the word holds
        const std::byte* word;  // staging: what it holds then
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
    // For what the transport calls, or a thread that nobody watches: the device's errors fail the mesh.
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
    bool is_lost(uint32_t rank) const { return !peers_[rank].lost.empty(); }
    bool is_reached(uint32_t rank) const { return !is_lost(rank) && transport_.is_there(rank); }
    bool is_idle() const;
    void check_locked() const;
    bool progress_locked();
    void look_for_stalls(uint64_t now_ns);
    void wait_locked(std::unique_lock<std::mutex>& lock, uint64_t timeout_ns, const std::function<bool()>& is_over);

    void begin_wait(uint32_t peer);
    void note_change(uint32_t peer) {
        // The clock of the last progress may be older than the wait.
        peers_[peer].last_change_ns = std::max(peers_[peer].last_change_ns, now_ns_);
    }

    // mesh_outgoing.cpp
    // is_late: it goes nowhere, also where the peer has left.
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
    std::atomic<uint64_t> progressed_ns_{0};  // when it was done last
    uint64_t now_ns_ = 0;                     // the same
    uint32_t num_progresses_ = 0;
    uint64_t num_rounds_ = 0;  // calls of progress()
    MeshConfig config_;
    std::string failure_;
    std::atomic<bool> has_failed_{false};
    bool is_closing_ = false;
    bool takes_nothing_ = false;  // frames that still come are dropped
    bool device_has_failed_ = false;
    uint32_t num_contexts_ = 0;
    std::vector<std::unique_ptr<Region>> regions_;  // by number; those that were deregistered, too
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
    std::vector<uint32_t> dropped_;   // lost ranks whose connections are still to be ended

    // Last, so that it ends first: what it then cancels still finds the rest.
    Transport transport_;
};

}  // namespace crossdock::network
