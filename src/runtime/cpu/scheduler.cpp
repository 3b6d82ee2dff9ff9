// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/scheduler.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/error.h"
#include "runtime/cpu/fiber_stack.h"

namespace crossdock::cpu {
namespace {

constexpr uint64_t kStepNs = 10;  // simulated time of one step

// Rounds of failed polls by every task before time jumps to a deadline. One would suffice if every store called
// note_progress(); more cover chains of tasks that proceed by plain stores within a rank.
constexpr int kIdleRounds = 16;

// From time to time one rank is stalled, since uniform picks alone would keep all ranks in step. A process may get no
// core for so long that others end meanwhile.
struct Stalls {
    uint64_t one_in;
    uint64_t max_steps;
    int max_redraws;
};
constexpr Stalls kStalls = {128, 512, 3};
constexpr Stalls kStallsOfProcesses = {1024, 16'384, 16};

}  // namespace

Scheduler::Scheduler(int num_ranks, const SimulationConfig& config)
    : config_(config),
      num_ranks_(num_ranks),
      random_(Random::mix(config.seed)),
      network_(num_ranks, config.network, config.seed),
      garbage_(num_ranks, config.seed) {}

void Scheduler::reserve(size_t num_tasks, size_t stack_bytes) {
    const auto fits = [&](const Task* task) { return task->stack_bytes == stack_bytes; };
    size_t num_free = static_cast<size_t>(std::count_if(free_tasks_.begin(), free_tasks_.end(), fits));
    if (num_free < num_tasks) expect_room_for_stacks(num_tasks - num_free);
    for (; num_free < num_tasks; ++num_free) {
        tasks_.push_back(std::make_unique<Task>(stack_bytes));
        free_tasks_.push_back(tasks_.back().get());
    }
    for (auto* tasks : {&ready_, &polled_, &blocked_}) tasks->reserve(tasks_.size());
}

Task& Scheduler::spawn(int rank, size_t stack_bytes, void (*body)(void*), void* argument) {
    const auto fits = [&](const Task* task) { return task->stack_bytes == stack_bytes; };
    const auto found = std::find_if(free_tasks_.rbegin(), free_tasks_.rend(), fits);
    assert(found != free_tasks_.rend());
    Task* task = *found;
    free_tasks_.erase(std::next(found).base());
    task->warp = nullptr;
    task->rank = rank;
    task->id = num_created_++;
    task->deadline_ns = UINT64_MAX;
    task->num_copies = 0;
    task->unwinds_on_deadlock = true;
    task->sleeps = false;
    task->fiber.start(body, argument);
    ready_.push_back(task);
    ++num_live_;
    return *task;
}

void Scheduler::run() {
    while (num_live_ > 0) step(pick());
}

Task& Scheduler::current() {
    require(current_ != nullptr, ncclInvalidUsage,
            "a communicator of the simulation was used outside of its rank's program");
    return *current_;
}

Task& Scheduler::pick() {
    while (ready_.empty()) all_are_idle();
    const Stalls& stalls = config_.are_processes ? kStallsOfProcesses : kStalls;
    size_t i = random_.below(ready_.size());
    for (int redraw = 0; redraw < stalls.max_redraws; ++redraw) {
        if (ready_[i]->rank != stalled_rank_ || num_steps_ >= stalled_until_step_) break;
        i = random_.below(ready_.size());
    }
    if (random_.one_in(stalls.one_in)) {
        stalled_rank_ = static_cast<int>(random_.below(static_cast<uint64_t>(num_ranks_)));
        stalled_until_step_ = num_steps_ + random_.below(stalls.max_steps);
    }
    Task* task = ready_[i];
    ready_[i] = ready_.back();
    ready_.pop_back();
    return *task;
}

void Scheduler::step(Task& task) {
    if (num_steps_ >= config_.killed_at_step && config_.killed_rank >= 0 && !killed_) kill();
    if (num_steps_ >= config_.network.cut_at_step && config_.network.cut_rank >= 0 && !cut_) {
        cut_ = true;
        network_.cut(config_.network.cut_rank);
    }
    // This notes no progress, which would keep the clock from reaching a deadline.
    if (config_.fault == Fault::kWriteGarbage) {
        const Unwatched unwatched;
        garbage_.step();
    }
    ++num_steps_;
    advance_to(now_ns_ + kStepNs);
    if (now_ns_ >= task.deadline_ns && !task.sleeps) wait_expired_ = true;
    task.deadline_ns = UINT64_MAX;
    trace_hash_ = Random::mix(trace_hash_ ^ task.id) + now_ns_;
    current_ = &task;
    Warp::set_running(task.warp);
    task.fiber.resume();
    Warp::set_running(nullptr);
    current_ = nullptr;
    if (task.fiber.is_finished()) {
        --num_live_;
        note_progress();
    }
}

// No task can run at this simulated time.
void Scheduler::all_are_idle() {
    const uint64_t next_ns =
        std::min(copies_.empty() ? UINT64_MAX : copies_.front().lands_at_ns, network_.next_arrival_ns());
    if (next_ns != UINT64_MAX) {
        advance_to(next_ns);
        return;
    }
    if (!polled_.empty() && num_idle_rounds_++ < kIdleRounds) {
        ready_.swap(polled_);
        return;
    }
    uint64_t earliest_ns = UINT64_MAX;
    for (const Task* task : polled_) {
        // Steps of other tasks may have passed a deadline that this task has not seen yet.
        if (task->deadline_ns > task->polled_at_ns) earliest_ns = std::min(earliest_ns, task->deadline_ns);
    }
    if (earliest_ns == UINT64_MAX || !deadlock_.empty()) {
        declare_deadlock();
    } else {
        advance_to(earliest_ns);
    }
    note_progress();
}

void Scheduler::advance_to(uint64_t time_ns) {
    now_ns_ = std::max(now_ns_, time_ns);
    while (!copies_.empty() && copies_.front().lands_at_ns <= now_ns_) {
        std::pop_heap(copies_.begin(), copies_.end());
        const Copy copy = std::move(copies_.back());
        copies_.pop_back();
        finish_copy(copy, true);
    }
    if (network_.next_arrival_ns() <= now_ns_ && network_.advance_to(now_ns_)) note_progress();
}

void Scheduler::put(int peer, void* target, const void* source, size_t bytes) {
    const int rank = current().rank;
    if (!is_killed(rank)) network_.put(rank, peer, target, source, bytes, now_ns_);
    note_progress();
}

void Scheduler::put_value(int peer, uint64_t* target, uint64_t value) {
    const int rank = current().rank;
    if (!is_killed(rank)) network_.put_value(rank, peer, target, value, now_ns_);
    note_progress();
}

void Scheduler::signal(int peer, uint64_t* word, uint64_t increase) {
    const int rank = current().rank;
    if (!is_killed(rank)) network_.signal(rank, peer, word, increase, now_ns_);
    note_progress();
}

void Scheduler::copy_async(void* target, const void* source, size_t bytes, bool is_lost_if_killed) {
    Task& task = current();
    if (bytes == 0 || (is_lost_if_killed && is_killed(task.rank))) return;
    const uint64_t delay_ns = 1 + random_.below(std::max<uint64_t>(config_.max_copy_delay_ns, 1));
    task.pending_copies.push_back(task.num_copies);
    copies_.push_back(
        {now_ns_ + delay_ns, num_copies_++, &task, task.num_copies++, target, source, bytes, is_lost_if_killed, {}});
    std::push_heap(copies_.begin(), copies_.end());
    note_progress();
}

template <typename Pending>
void Scheduler::block_while(Pending pending) {
    Task& task = current();
    task.awaits_copies = true;
    block_until([&] { return !pending(); });  // a copy in flight is no deadlock
    task.awaits_copies = false;
}

void Scheduler::wait_copies(int max_pending) {
    Task& task = current();
    const uint64_t num_awaited = task.num_copies - std::min(task.num_copies, static_cast<uint64_t>(max_pending));
    block_while([&] { return !task.pending_copies.empty() && task.pending_copies.front() < num_awaited; });
}

void Scheduler::wait_copies_to(const void* target, size_t bytes) {
    const Task* task = &current();
    const auto* first = static_cast<const std::byte*>(target);
    block_while([&] {
        return std::any_of(copies_.begin(), copies_.end(), [&](const Copy& copy) {
            return copy.task == task && copy.target >= first && copy.target < first + bytes;
        });
    });
}

void Scheduler::read_sources() {
    for (Copy& copy : copies_) {
        if (copy.task != &current() || !copy.read.empty()) continue;
        copy.task->copies.read(copy.source, copy.bytes);
        copy.read.resize(copy.bytes);
        copy_unwatched(copy.read.data(), copy.source, copy.bytes);
        copy.source = copy.read.data();
    }
}

void Scheduler::finish_copy(const Copy& copy, bool lands) {
    Task& task = *copy.task;
    if (lands) {
        if (copy.read.empty()) task.copies.read(copy.source, copy.bytes);
        task.copies.write(copy.target, copy.bytes);
        copy_unwatched(copy.target, copy.source, copy.bytes);
    }
    auto& pending = task.pending_copies;
    pending.erase(std::lower_bound(pending.begin(), pending.end(), copy.number));
    if (task.awaits_copies) wake(task);
    note_progress();
}

void Scheduler::yield() {
    note_progress();
    give_way();
}

void Scheduler::give_way() {
    ready_.push_back(&current());
    suspend();
}

void Scheduler::poll(uint64_t deadline_ns) {
    Task& task = current();
    task.deadline_ns = deadline_ns;
    task.polled_at_ns = now_ns_;
    polled_.push_back(&task);
    suspend();
}

void Scheduler::sleep(uint64_t until_ns) {
    Task& task = current();
    task.sleeps = true;
    while (now_ns_ < until_ns) poll(until_ns);
    task.sleeps = false;
}

void Scheduler::block() {
    Task& task = current();
    task.blocked = true;
    blocked_.push_back(&task);
    suspend();
}

void Scheduler::wake(Task& task) {
    if (!task.blocked) return;
    task.blocked = false;
    blocked_.erase(std::find(blocked_.begin(), blocked_.end(), &task));
    ready_.push_back(&task);
    note_progress();
}

void Scheduler::suspend() {
    Task& task = current();
    task.fiber.suspend();
    if (!deadlock_.empty() && task.unwinds_on_deadlock) throw Error(ncclInternalError, deadlock_);
}

void Scheduler::note_progress() {
    num_idle_rounds_ = 0;
    ready_.insert(ready_.end(), polled_.begin(), polled_.end());
    polled_.clear();
}

// Copies in flight from the killed rank may or may not be lost.
void Scheduler::kill() {
    killed_ = true;
    network_.kill(config_.killed_rank);
    std::vector<Copy> in_flight;
    in_flight.swap(copies_);
    for (Copy& copy : in_flight) {
        if (copy.task->rank == config_.killed_rank && copy.is_lost_if_killed && random_.one_in(2)) {
            finish_copy(copy, false);
        } else {
            copies_.push_back(std::move(copy));
        }
    }
    std::make_heap(copies_.begin(), copies_.end());
    note_progress();
}

void Scheduler::declare_deadlock() {
    if (deadlock_.empty()) {
        std::vector<bool> waits(static_cast<size_t>(num_ranks_));
        for (const auto* tasks : {&polled_, &blocked_}) {
            for (const Task* task : *tasks) waits[static_cast<size_t>(task->rank)] = true;
        }
        std::string ranks;
        for (int rank = 0; rank < num_ranks_; ++rank) {
            if (waits[static_cast<size_t>(rank)]) ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", rank);
        }
        deadlock_ =
            fmt::format("seed {}: deadlock after {} steps: ranks {} wait without a deadline, and no rank can run",
                        config_.seed, num_steps_, ranks);
    }
    const std::vector<Task*> blocked = blocked_;
    for (Task* task : blocked) {
        if (task->unwinds_on_deadlock) wake(*task);
    }
}

}  // namespace crossdock::cpu
