// SPDX-License-Identifier: Apache-2.0
// The threads of a launch: each is a fiber of the executor (what the executor calls a warp), 32 in a row are a warp of
// the kernel. Here they wait for each other and for other ranks.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "crossdock/device/entry.hpp"
#include "fabric/cpu/cpu_communicator.h"
#include "gin/simulated_gin.h"
#include "runtime/cpu/executor.h"

namespace crossdock::gin {

// A meeting point of threads of a block, used again and again.
struct Meeting {
    unsigned arrived = 0;  // a mask of lanes, or a number
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
    std::shared_ptr<SimulatedGin> simulated;  // too
    std::vector<Block> blocks;
    bool has_one_thread = false;
    int num_spins = 0;  // of a wait, before it lets others run
};

class KernelThread {
  public:
    KernelThread(Launch& launch, cpu::Warp& warp, const crossdockThread& thread, Block& block, int block_idx,
                 int thread_idx);

    // The thread whose code runs. Error with ncclInvalidUsage outside of kernels.
    static KernelThread& current();
    static KernelThread* current_or_null();

    // Runs body(context) as this thread, to the end.
    void run(void (*body)(void*), void* context);

    void sync_block();
    void sync_lanes(unsigned mask);
    void sync_named(int number, int count);
    void exchange(unsigned mask, const void* own, size_t bytes, std::byte* all);
    unsigned active_mask() const { return lanes_in_warp() & ~warp_lanes().returned; }

    // Until ready(). Bounded: Error with ncclTimeout and the wait's description, or of a deadlock.
    void wait(const std::function<bool()>& ready, const std::function<std::string()>& description);
    // Until ready() or the time: then false. Bounded as wait is.
    bool wait_until(const std::function<bool()>& ready, uint64_t deadline_ns,
                    const std::function<std::string()>& description);
    // One step of a loop that waits for others in a way that nobody here knows.
    void poll(uint64_t until_ns);
    // The thread wrote: what it polls next is not the loop of before.
    void wrote() { num_polls_ = 0; }
    // It posted an operation, or begins a wait.
    void made_progress() {
        wrote();
        warp_->note_progress();
    }
    // A place where other threads may run. Ends the kernel where a violation was found.
    void scheduling_point();

    uint64_t now_ns() { return warp_->now_ns(); }
    std::byte* dynamic_shared() { return warp_->shared_memory; }
    std::byte* scratch(size_t number) { return block_->scratch[number]; }
    Launch& launch() const { return *launch_; }
    cpu::Warp& warp() { return *warp_; }
    const Who& who() const { return who_; }
    std::string name() const { return Judge::name(who_); }

    // Of the simulation.
    Clock clock;
    Clock fenced;   // what it knew at its last fence
    Clock pending;  // what relaxed loads have seen, until a fence
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
    // what(): the end of the message. Making it takes longer than a poll.
    template <typename What>
    [[noreturn]] void timed_out(What what);
    [[noreturn]] void deadlocked(const std::string& deadlock, const std::string& wait, bool is_within_block);
    void leave_block();
    void look();
    void set_running(KernelThread* thread);

    Launch* launch_;
    cpu::Warp* warp_;
    crossdockThread view_;
    Block* block_;
    Who who_;
    int num_polls_ = 0;
    uint64_t first_poll_ns_ = 0;
};

}  // namespace crossdock::gin
