// SPDX-License-Identifier: Apache-2.0
#include "device_api/simulated_gin.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace crossdock::device_api {
namespace {

constexpr uint64_t kMaxDelayNs = 3'000;
constexpr uint64_t kStragglerOneIn = 8;  // one put in 8 takes much longer
constexpr uint64_t kStragglerFactor = 10;

RaceDetector::Transfer transfer_of(const SimulatedGin::Post& post) { return {post.who, post.where, post.is_get}; }

}  // namespace

std::shared_ptr<SimulatedGin> SimulatedGin::of(cpu::Scheduler& scheduler) {
    // A simulation runs in one thread.
    thread_local std::map<cpu::Scheduler*, std::weak_ptr<SimulatedGin>> t_all;
    std::erase_if(t_all, [](const auto& entry) { return entry.second.expired(); });
    auto found = t_all[&scheduler].lock();
    if (found == nullptr) {
        found = std::make_shared<SimulatedGin>(scheduler);
        t_all[&scheduler] = found;
    }
    return found;
}

SimulatedGin::SimulatedGin(cpu::Scheduler& scheduler)
    : races_(scheduler), random_(cpu::Random::mix(scheduler.config().seed ^ 0x6769'6e)), scheduler_(&scheduler) {}

void SimulatedGin::add(uint64_t at_ns, Kind kind, uint64_t put) {
    events_.push_back({at_ns, num_events_++, kind, put});
    std::push_heap(events_.begin(), events_.end());
}

void SimulatedGin::post(Post post) {
    const uint64_t number = puts_.size();
    auto put = std::make_unique<Put>();
    static_cast<Post&>(*put) = std::move(post);
    const uint64_t now_ns = scheduler_->now_ns();
    const auto delay = [&] {
        const uint64_t factor = random_.one_in(kStragglerOneIn) ? kStragglerFactor : 1;
        return 1 + random_.below(kMaxDelayNs) * factor;
    };
    uint64_t lands_at_ns = now_ns;
    Stream& stream = streams_[{put->dev_comm, put->context, put->rank, put->peer}];
    if (put->target != nullptr) {
        lands_at_ns = now_ns + delay();
        if (!put->is_get) {
            stream.last_landing_ns = std::max(stream.last_landing_ns, lands_at_ns);
            stream.landed.join(put->issued);
            stream.landed.learn_landed(number);
        }
        if (put->source != nullptr) {
            put->before.assign(put->source, put->source + put->bytes);
            unflushed_[{put->thread, put->dev_comm, put->context}].push_back(number);
        }
        add(lands_at_ns, Kind::kLanding, number);
    }
    if (put->counter != nullptr) {
        add(now_ns + 1 + random_.below(std::max<uint64_t>(lands_at_ns - now_ns, 1)), Kind::kCounter, number);
    }
    if (put->signal != nullptr) {
        put->signals = put->issued;
        if (put->target != nullptr) put->signals.learn_landed(number);
        uint64_t arrives_at_ns = std::max(lands_at_ns, now_ns + delay());
        if (put->remote.is_strong) {
            put->signals.join(stream.landed);
            arrives_at_ns = std::max(arrives_at_ns, stream.last_landing_ns);
        }
        add(arrives_at_ns, Kind::kSignal, number);
    }
    puts_.push_back(std::move(put));
}

void SimulatedGin::read_source(uint64_t number) {
    Put& put = *puts_[number];
    if (put.is_read || put.source == nullptr) return;
    put.is_read = true;
    races_.put_reads(number, transfer_of(put), put.issued, put.source, put.bytes);
    put.read.assign(put.source, put.source + put.bytes);
    // Compare the source with its earlier contents, which also detects writes that are not watched.
    const auto changed = std::mismatch(put.read.begin(), put.read.end(), put.before.begin()).first;
    if (changed != put.read.end()) {
        races_.violated(fmt::format("{}: byte {} of the source of the {} of {} at {}",
                                    put.is_get ? "source of a get changed before the get was done"
                                               : "source changed before a flush or a counter said that it was read",
                                    changed - put.read.begin(), put.is_get ? "get" : "put", RaceDetector::name(put.who),
                                    RaceDetector::name(put.where)));
    }
}

void SimulatedGin::flush(uint32_t thread, uint64_t dev_comm, int context, Clock& clock) {
    auto& numbers = unflushed_[{thread, dev_comm, context}];
    for (const uint64_t number : numbers) finish(number, clock);
    numbers.clear();
}

void SimulatedGin::finish(uint64_t number, Clock& clock) {
    Put& put = *puts_[number];
    if (put.is_get) {
        land(number);
        return clock.learn_landed(number);
    }
    if (put.is_there()) read_source(number);
    clock.learn_read(number);
}

uint64_t SimulatedGin::request_flush(const Clock& clock, uint64_t dev_comm, int context, int peer) {
    std::vector<uint64_t> covered;
    for (const auto& [of, numbers] : unflushed_) {
        const auto& [thread, its_dev_comm, its_context] = of;
        if (its_dev_comm != dev_comm || its_context != context) continue;
        for (const uint64_t number : numbers) {
            const Put& put = *puts_[number];
            if (put.peer == peer && put.issued.of_thread(thread) <= clock.of_thread(thread)) covered.push_back(number);
        }
    }
    requests_.push_back(std::move(covered));
    return requests_.size() - 1;
}

void SimulatedGin::wait_for_request(uint64_t request, Clock& clock) {
    for (const uint64_t number : requests_[request]) finish(number, clock);
}

void SimulatedGin::land(uint64_t number) {
    Put& put = *puts_[number];
    if (put.has_landed || !put.is_there()) return;
    put.has_landed = true;
    read_source(number);
    races_.put_lands(number, transfer_of(put), put.issued, put.target, put.bytes);
    std::memcpy(put.target, put.source != nullptr ? put.read.data() : put.value.data(), put.bytes);
    put.before = put.read = {};
}

void SimulatedGin::deliver(const Event& event) {
    Put& put = *puts_[event.put];
    switch (event.kind) {
        case Kind::kLanding:
            return land(event.put);
        case Kind::kCounter: {
            if (put.is_there()) read_source(event.put);
            Word& word = words_[put.counter];
            word.clock.join(put.issued);
            word.clock.learn_read(event.put);
            ++*put.counter;
            return;
        }
        case Kind::kSignal: {
            const bool is_va = put.remote.window != nullptr;
            if (is_va && !put.is_there()) return;
            Word& word = words_[put.signal];
            if (!is_va && word.kind != crossdockNoSignal && word.kind != put.remote.kind) {
                races_.violated(fmt::format(
                    "Inc mixed with Add without a reset: signal {} of context {} at rank {}: {} by {} at {} comes "
                    "after the other kind at {}",
                    put.remote.signal, put.context, put.peer, put.remote.kind == crossdockSignalInc ? "Inc" : "Add",
                    RaceDetector::name(put.who), RaceDetector::name(put.where), RaceDetector::name(word.where)));
            }
            word.kind = put.remote.kind;
            word.where = put.where;
            word.clock.join(put.signals);
            *put.signal += put.remote.value;
            return;
        }
    }
}

void SimulatedGin::advance(uint64_t now_ns) {
    bool arrived = false;
    while (!events_.empty() && events_.front().at_ns <= now_ns) {
        std::pop_heap(events_.begin(), events_.end());
        const Event event = events_.back();
        events_.pop_back();
        deliver(event);
        arrived = true;
    }
    if (arrived) scheduler_->note_progress();
}

}  // namespace crossdock::device_api
