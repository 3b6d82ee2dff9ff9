// SPDX-License-Identifier: Apache-2.0
// GIN in the simulation: pending puts, gets and signals of all ranks. Puts land late and in any order. A strong signal
// arrives after all earlier puts of its context to that peer, a weak one after its own put only. A source is read when
// its put lands or a flush or counter completes, not earlier. A get reads its source when it lands.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "device_api/race_detector.h"
#include "runtime/cpu/random.h"

namespace crossdock::device_api {

class SimulatedGin {
  public:
    // The simulation's, created by the first call.
    static std::shared_ptr<SimulatedGin> of(cpu::Scheduler& scheduler);
    explicit SimulatedGin(cpu::Scheduler& scheduler);

    struct Post {
        Who who;
        uint32_t thread;  // its index in clocks
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
        std::function<bool()> is_there;  // true while its windows are registered
        bool is_get;                     // the source is the peer's, the target this rank's
    };
    void post(Post post);

    // Reads the sources of the thread's puts in the context, lands its gets, and adds both to clock.
    void flush(uint32_t thread, uint64_t dev_comm, int context, Clock& clock);

    // The same, later: for all operations to the peer, of any thread, that `clock` knows to be posted.
    uint64_t request_flush(const Clock& clock, uint64_t dev_comm, int context, int peer);
    bool has_request(uint64_t request) const { return request < requests_.size(); }
    void wait_for_request(uint64_t request, Clock& clock);

    // Delivers everything that arrives until now.
    void advance(uint64_t now_ns);
    uint64_t next_arrival_ns() const { return events_.empty() ? UINT64_MAX : events_.front().at_ns; }

    // The clock that a thread acquires by reading this word.
    const Clock& seen(const uint64_t* word) { return words_[word].clock; }
    void reset(const uint64_t* word) { words_[word] = {}; }

    RaceDetector& races() { return races_; }

  private:
    struct Put : Post {
        std::vector<std::byte> before;  // the source's bytes when it was posted
        std::vector<std::byte> read;
        bool is_read = false;
        bool has_landed = false;
        Clock signals;  // the clock that its signal releases
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
        Clock landed;  // the clock that a strong signal releases
    };

    void add(uint64_t at_ns, Kind kind, uint64_t put);
    void read_source(uint64_t number);
    void land(uint64_t number);
    void finish(uint64_t number, Clock& clock);
    void deliver(const Event& event);

    RaceDetector races_;
    cpu::Random random_;
    cpu::Scheduler* scheduler_;
    std::vector<std::unique_ptr<Put>> puts_;  // by number; null: done
    std::vector<Event> events_;
    uint64_t num_events_ = 0;
    std::unordered_map<const uint64_t*, Word> words_;
    std::map<std::tuple<uint64_t, int, int, int>, Stream> streams_;  // device communicator, context, rank, peer
    std::map<std::tuple<uint32_t, uint64_t, int>, std::vector<uint64_t>> unflushed_;
    std::vector<std::vector<uint64_t>> requests_;  // of which puts and gets
};

}  // namespace crossdock::device_api
