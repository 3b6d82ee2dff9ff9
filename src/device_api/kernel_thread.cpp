// SPDX-License-Identifier: Apache-2.0
#include "device_api/kernel_thread.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "core/error.h"
#include "runtime/cpu/idle_backoff.h"

namespace crossdock::device_api {
namespace {

thread_local KernelThread* t_running = nullptr;

// After this many consecutive polls a loop counts as waiting.
constexpr uint64_t kFreePolls = 4;
// The simulation ends a polling loop after this many pauses, since its clock jumps.
constexpr uint64_t kMaxPauses = 100'000;

}  // namespace

KernelThread::KernelThread(Launch& launch, cpu::Warp& warp, const crossdockThread& thread, Block& block, int block_idx,
                           int thread_idx)
    : launch_(&launch),
      warp_(&warp),
      view_(thread),
      block_(&block),
      who_{launch.communicator->rank(), block_idx, thread_idx} {
    if (launch.simulated == nullptr) return;
    RaceDetector& races = launch.simulated->races();
    number = races.number_of(who_);
    clock = races.ended;
    clock.tick(number);
}

KernelThread* KernelThread::current_or_null() { return t_running; }

KernelThread& KernelThread::current() {
    require(t_running != nullptr, ncclInvalidUsage, "a function of kernels was called outside of a kernel");
    return *t_running;
}

void KernelThread::set_running(KernelThread* thread) {
    t_running = thread;
    launch_->enter(thread == nullptr ? nullptr : &thread->view_);
}

template <typename Body>
void KernelThread::suspended(Body body) {
    struct Return {
        KernelThread* thread;
        ~Return() { thread->set_running(thread); }
    } back{this};
    set_running(nullptr);
    body();
}

template <typename What>
void KernelThread::expect_time_until(uint64_t deadline_ns, What what) {
    if (now_ns() >= deadline_ns)
        fail(ncclTimeout, "{} timed out after {} ms waiting {}", name(), launch_->timeout_ns / 1'000'000, what());
    if (warp_->is_interrupted()) fail(ncclRemoteError, "{} was interrupted while it waited {}", name(), what());
}

void KernelThread::run(void (*body)(void*), void* context) {
    struct End {
        KernelThread* thread;
        ~End() {
            if (thread->launch_->simulated != nullptr) thread->launch_->simulated->races().ended.join(thread->clock);
            thread->set_running(nullptr);
        }
    };
    set_running(this);
    End end{this};
    try {
        body(context);
        leave_block();
    } catch (const Error& error) {
        // Without this report, the other threads would wait forever, and a deadlock would be reported instead.
        if (launch_->scheduler != nullptr && launch_->scheduler->deadlock().empty()) {
            RaceDetector& races = launch_->simulated->races();
            races.violated(error.what());
        }
        throw;
    }
}

// Waits for threads of the block or warp no longer include this one.
void KernelThread::leave_block() {
    warp_lanes().returned |= 1u << who_.thread % 32;
    --block_->num_live;
    if (block_->all.arrived > 0 && static_cast<int>(block_->all.arrived) == block_->num_live) {
        const auto arrived = static_cast<int>(block_->all.arrived);
        release(block_->all);
        if (launch_->scheduler == nullptr) suspended([&] { warp_->meet(0, arrived + 1); });
    }
    for (auto& [mask, meeting] : warp_lanes().meetings) {
        if (meeting.arrived != 0 && ((meeting.arrived | warp_lanes().returned) & mask) == mask) release(meeting);
    }
}

unsigned KernelThread::lanes_in_warp() const {
    const unsigned threads = view_.block_dim[0] * view_.block_dim[1] * view_.block_dim[2];
    const unsigned first = static_cast<unsigned>(who_.thread) / 32 * 32;
    return threads - first >= 32 ? ~0u : (1u << (threads - first)) - 1;
}

void KernelThread::release(Meeting& meeting) {
    meeting.arrived = 0;
    ++meeting.generation;
    meeting.released = std::move(meeting.gathering);
    meeting.gathering = {};
    for (cpu::Task* task : meeting.waiting) launch_->scheduler->wake(*task);
    meeting.waiting.clear();
    warp_->note_progress();
}

void KernelThread::meet(Meeting& meeting, unsigned arriving, const std::function<bool()>& is_complete,
                        const char* what) {
    made_progress();
    const bool is_simulated = launch_->simulated != nullptr;
    if (is_simulated) {
        meeting.gathering.join(clock);
        tick();
    }
    meeting.arrived += arriving;
    if (is_complete()) {
        release(meeting);
    } else {
        const uint64_t generation = meeting.generation;
        if (launch_->scheduler != nullptr) {
            while (meeting.generation == generation) {
                meeting.waiting.push_back(&launch_->scheduler->current());
                try {
                    suspended([&] { launch_->scheduler->block(); });
                } catch (const Error& error) {
                    deadlocked(error.what(), fmt::format("{} waits at {}", name(), what), true);
                }
                look();
            }
        } else {
            const uint64_t deadline_ns = now_ns() + launch_->timeout_ns;
            while (meeting.generation == generation) {
                expect_time_until(deadline_ns, [&] { return fmt::format("at {}", what); });
                suspended([&] { warp_->pause(deadline_ns); });
            }
        }
    }
    if (is_simulated) clock.join(meeting.released);
    scheduling_point();
}

void KernelThread::sync_block() {
    const auto is_complete = [&] { return static_cast<int>(block_->all.arrived) == block_->num_live; };
    if (launch_->scheduler != nullptr) return meet(block_->all, 1, is_complete, "__syncthreads");
    // The executor does not resume fibers that wait at its own barrier, which is cheaper.
    made_progress();
    ++block_->all.arrived;
    const int live = block_->num_live;
    if (is_complete()) block_->all.arrived = 0;
    suspended([&] { warp_->meet(0, live); });
}

void KernelThread::sync_lanes(unsigned mask) {
    mask &= lanes_in_warp();
    const unsigned own = 1u << who_.thread % 32;
    require((mask & own) != 0, ncclInvalidUsage,
            "{} calls __syncwarp or a shuffle with mask {:#x}, expected a mask that includes the calling lane", name(),
            mask);
    Lanes& lanes = warp_lanes();
    Meeting& meeting = lanes.meetings[mask];
    meet(
        meeting, own, [&] { return ((meeting.arrived | lanes.returned) & mask) == mask; },
        "__syncwarp, a shuffle or a vote");
}

void KernelThread::sync_named(int number, int count) {
    require(number >= 0 && number < 16, ncclInvalidUsage, "{} uses barrier {}, allowed: 0..15", name(), number);
    Meeting& meeting = block_->named[number];
    meet(
        meeting, 1, [&] { return static_cast<int>(meeting.arrived) >= count; }, "a barrier of several warps");
}

void KernelThread::exchange(unsigned mask, const void* own, size_t bytes, std::byte* all) {
    Lanes& lanes = warp_lanes();
    std::memcpy(lanes.slots[who_.thread % 32], own, bytes);
    sync_lanes(mask);
    for (size_t lane = 0; lane < 32; ++lane) {
        if ((mask >> lane & 1) != 0) std::memcpy(all + lane * bytes, lanes.slots[lane], bytes);
    }
    sync_lanes(mask);  // all lanes have read before any writes again
}

void KernelThread::deadlocked(const std::string& deadlock, const std::string& wait, bool is_within_block) {
    RaceDetector& races = launch_->simulated->races();
    races.add_waiting(deadlock, wait, is_within_block);
    throw Error(ncclInternalError, races.violation().empty() ? deadlock + ": " + wait : races.violation());
}

void KernelThread::scheduling_point() {
    if (launch_->scheduler == nullptr) return;
    launch_->simulated->advance(now_ns());
    suspended([&] { warp_->scheduling_point(); });
    look();
}

// Unlike scheduling_point, this is no progress: a polling thread must not keep the others from being idle.
void KernelThread::look() {
    launch_->simulated->advance(now_ns());
    const std::string& violation = launch_->simulated->races().violation();
    if (!violation.empty()) throw Error(ncclInternalError, violation);
}

void KernelThread::wait(const std::function<bool()>& ready, const std::function<std::string()>& description) {
    wait_until(ready, UINT64_MAX, description);
}

bool KernelThread::wait_until(const std::function<bool()>& ready, uint64_t deadline_ns,
                              const std::function<std::string()>& description) {
    made_progress();
    if (launch_->scheduler == nullptr) {
        // No other fiber runs on this OS thread, so a short spin costs nothing.
        if (launch_->has_one_thread) {
            for (int i = 0; i < launch_->num_spins; ++i) {
                if (ready()) return true;
                cpu::IdleBackoff::relax();
            }
        }
        uint64_t timeout_ns = 0;
        while (!ready()) {
            const uint64_t now = now_ns();
            if (now >= deadline_ns) return false;
            if (timeout_ns == 0) timeout_ns = now + launch_->timeout_ns;
            expect_time_until(timeout_ns, [&] { return "for " + description(); });
            suspended([&] { warp_->pause(std::min(timeout_ns, deadline_ns)); });
        }
        return true;
    }
    scheduling_point();
    while (!ready()) {
        if (now_ns() >= deadline_ns) return false;
        try {
            const uint64_t next_ns = std::min(launch_->simulated->next_arrival_ns(), deadline_ns);
            suspended([&] { launch_->scheduler->poll(next_ns); });
        } catch (const Error& error) {
            deadlocked(error.what(), fmt::format("{} waits for {}", name(), description()), false);
        }
        look();
    }
    return true;
}

void KernelThread::poll(uint64_t until_ns) {
    if (++num_polls_ == 1) first_poll_ns_ = now_ns();
    if (num_polls_ <= kFreePolls && until_ns == 0) return scheduling_point();
    const char* const what = "in a loop of its own, by atomic loads or pauses";
    if (launch_->scheduler == nullptr) {
        const uint64_t deadline_ns = first_poll_ns_ + launch_->timeout_ns;
        expect_time_until(deadline_ns, [&] { return what; });
        suspended([&] { warp_->pause(until_ns == 0 ? deadline_ns : until_ns); });
        return;
    }
    const std::string wait = fmt::format("{} waits {}", name(), what);
    uint64_t next_ns = launch_->simulated->next_arrival_ns();
    if (until_ns != 0) next_ns = std::min(next_ns, until_ns);
    if (num_polls_ > kMaxPauses) deadlocked("no end in sight", wait, false);
    try {
        suspended([&] { launch_->scheduler->poll(next_ns); });
    } catch (const Error& error) {
        deadlocked(error.what(), wait, false);
    }
    look();
}

}  // namespace crossdock::device_api
