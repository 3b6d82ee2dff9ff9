// SPDX-License-Identifier: Apache-2.0
// GIN in the simulation: puts and signals on their way. Puts land late and in any order; a strong signal arrives behind
// all earlier puts of its context to that peer, a weak one behind its own put only; sources are read when the put lands
// or when a flush or a counter has to say so, not earlier. A get reads its source when it lands. One object for all
// ranks.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "gin/judge.h"
#include "runtime/cpu/random.h"

namespace crossdock::gin {

class SimulatedGin {
  public:
    // The simulation's, made by whoever asks first.
    static std::shared_ptr<SimulatedGin> of(cpu::Scheduler& scheduler);
    explicit SimulatedGin(cpu::Scheduler& scheduler);

    struct Post {
        Who who;
        uint32_t thread;  // its number in clocks
        Clock issued;
        int rank, peer, context;
        uint64_t dev_comm;
        std::byte* target;  // null: only the signal
        const std::byte* source;
        std::vector<std::byte> value;  // instead of a source
        size_t bytes;
        crossdockRemoteAction remote;
        uint64_t* signal;   // the word at the peer
        uint64_t* counter;  // null: none
        crossdockWhere where;
        std::function<bool()> is_there;  // whether its windows still are
        bool is_get;                     // the source is the peer's, the target the own one
    };
    void post(Post post);

    // Sources of what the thread has put in the context are read, and what it has got has landed; clock learns it.
    void flush(uint32_t thread, uint64_t dev_comm, int context, Clock& clock);

    // The same later, for what whoever has the clock knows to have been posted to the peer, by any thread.
    uint64_t request_flush(const Clock& clock, uint64_t dev_comm, int context, int peer);
    bool has_request(uint64_t request) const { return request < requests_.size(); }
    void wait_for_request(uint64_t request, Clock& clock);

    // Delivers what arrives until now.
    void advance(uint64_t now_ns);
    uint64_t next_arrival_ns() const { return events_.empty() ? UINT64_MAX : events_.front().at_ns; }

    // What a thread learns that has seen the word's value.
    const Clock& seen(const uint64_t* word) { return words_[word].clock; }
    void reset(const uint64_t* word) { words_[word] = {}; }

    Judge& judge() { return judge_; }

  private:
    struct Put : Post {
        std::vector<std::byte> before;  // the source when the put was posted
        std::vector<std::byte> read;
        bool is_read = false;
        bool has_landed = false;
        Clock signals;  // what the signal tells
    };
    enum class Kind { kLanding, kCounter, kSignal };
    struct Event {
        uint64_t at_ns;
        uint64_t order;
        Kind kind;
        uint64_t put;
        bool operator<(const Event& other) const {  // the heap's front is the next one
            return at_ns != other.at_ns ? at_ns > other.at_ns : order > other.order;
        }
    };
    struct Word {
        Clock clock;
        crossdockSignalKind kind = crossdockNoSignal;  // of what has arrived since the last reset
        crossdockWhere where = {};
    };
    struct Stream {
        uint64_t last_landing_ns = 0;
        Clock landed;  // what a strong signal tells
    };

    void add(uint64_t at_ns, Kind kind, uint64_t put);
    void read_source(uint64_t number);
    void land(uint64_t number);
    void finish(uint64_t number, Clock& clock);
    void deliver(const Event& event);

    Judge judge_;
    cpu::Random random_;
    cpu::Scheduler* scheduler_;
    std::vector<std::unique_ptr<Put>> puts_;  // by number; null: over
    std::vector<Event> events_;
    uint64_t num_events_ = 0;
    std::unordered_map<const uint64_t*, Word> words_;
    std::map<std::tuple<uint64_t, int, int, int>, Stream> streams_;  // device communicator, context, rank, peer
    std::map<std::tuple<uint32_t, uint64_t, int>, std::vector<uint64_t>> unflushed_;
    std::vector<std::vector<uint64_t>> requests_;  // of which puts and gets
};

}  // namespace crossdock::gin
