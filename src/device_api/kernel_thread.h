// SPDX-License-Identifier: Apache-2.0
// The threads of a launch: each is a fiber of the executor (which calls it a warp), and 32 consecutive ones are a warp
// of the kernel. Here they wait for each other and for other ranks.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "crossdock/device/entry.hpp"
#include "device_api/simulated_gin.h"
#include "fabric/cpu/cpu_communicator.h"
#include "runtime/cpu/executor.h"

namespace crossdock::device_api {

// A reusable barrier of threads of a block.
struct Meeting {
    unsigned arrived = 0;  // a lane mask, or a count
    uint64_t generation = 0;
    std::vector<cpu::Task*> waiting;  // in the simulation
    Clock gathering, released;
};

struct Lanes {
    std::map<unsigned, Meeting> meetings;  // by mask
    unsigned returned = 0;                 // lanes
    alignas(16) std::byte slots[32][16];
};

struct Block {
    int num_live = 0;
    Meeting all;
    std::map<int, Meeting> named;
    std::vector<Lanes> warps;
    std::vector<std::byte> static_shared;
    alignas(16) std::byte scratch[16][16];  // of broadcasts
};

struct Launch {
    std::shared_ptr<cpu::CpuCommunicator> communicator;
    void (*enter)(const crossdockThread*);
    uint64_t timeout_ns;
    cpu::Scheduler* scheduler;                // null outside of the simulation
    std::shared_ptr<SimulatedGin> simulated;  // likewise
    std::vector<Block> blocks;
    bool has_one_thread = false;
    int num_spins = 0;  // of a wait, before it yields
};

class KernelThread {
  public:
    KernelThread(Launch& launch, cpu::Warp& warp, const crossdockThread& thread, Block& block, int block_idx,
                 int thread_idx);

    // The thread that is running. Throws ncclInvalidUsage outside of kernels.
    static KernelThread& current();
    static KernelThread* current_or_null();

    // Runs body(context) as this thread, to the end.
    void run(void (*body)(void*), void* context);

    void sync_block();
    void sync_lanes(unsigned mask);
    void sync_named(int number, int count);
    void exchange(unsigned mask, const void* own, size_t bytes, std::byte* all);
    unsigned active_mask() const { return lanes_in_warp() & ~warp_lanes().returned; }

    // Waits until ready(). Throws ncclTimeout with the wait's description, or the report of a deadlock.
    void wait(const std::function<bool()>& ready, const std::function<std::string()>& description);
    // Waits until ready(), or returns false at the deadline. Throws like wait().
    bool wait_until(const std::function<bool()>& ready, uint64_t deadline_ns,
                    const std::function<std::string()>& description);
    // One iteration of a user's polling loop, whose condition the simulator does not know.
    void poll(uint64_t until_ns);
    // The thread wrote, so its next poll belongs to another loop.
    void wrote() { num_polls_ = 0; }
    // It posted an operation, or begins a wait.
    void made_progress() {
        wrote();
        warp_->note_progress();
    }
    // Other threads may run here. Ends the kernel if a violation was found.
    void scheduling_point();

    uint64_t now_ns() { return warp_->now_ns(); }
    std::byte* dynamic_shared() { return warp_->shared_memory; }
    std::byte* scratch(size_t number) { return block_->scratch[number]; }
    Launch& launch() const { return *launch_; }
    cpu::Warp& warp() { return *warp_; }
    const Who& who() const { return who_; }
    std::string name() const { return RaceDetector::name(who_); }

    // For the simulation.
    Clock clock;
    Clock fenced;   // its clock at the last fence
    Clock pending;  // clocks seen by relaxed loads, until a fence
    uint32_t number = 0;
    void tick() {
        if (launch_->simulated != nullptr) clock.tick(number);
    }

  private:
    Lanes& warp_lanes() const { return block_->warps[static_cast<size_t>(who_.thread) / 32]; }
    unsigned lanes_in_warp() const;
    bool is_complete(const Meeting& meeting, unsigned mask_or_count) const;
    void meet(Meeting& meeting, unsigned arriving, const std::function<bool()>& is_complete, const char* what);
    void release(Meeting& meeting);
    template <typename Body>
    void suspended(Body body);
    // what(): the message's suffix; a function, because formatting takes longer than a poll.
    template <typename What>
    void expect_time_until(uint64_t deadline_ns, What what);
    [[noreturn]] void deadlocked(const std::string& deadlock, const std::string& wait, bool is_within_block);
    void leave_block();
    void look();
    void set_running(KernelThread* thread);

    Launch* launch_;
    cpu::Warp* warp_;
    crossdockThread view_;
    Block* block_;
    Who who_;
    uint64_t num_polls_ = 0;  // in a row; a loop may go on for days
    uint64_t first_poll_ns_ = 0;
};

}  // namespace crossdock::device_api
