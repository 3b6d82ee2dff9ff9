// SPDX-License-Identifier: Apache-2.0
// The scheduler of the simulation: tasks (fibers) of all ranks on one thread, a seed that picks which runs next, a
// simulated clock, and asynchronous copies that land late and out of order. A seed determines the run: nothing depends
// on addresses, hashes or real time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/cpu/warp.h"
#include "runtime/cpu/fiber.h"
#include "runtime/cpu/garbage_writer.h"
#include "runtime/cpu/random.h"
#include "runtime/cpu/simulated_network.h"

namespace crossdock::cpu {

struct SimulationConfig {
    uint64_t seed = 0;
    uint64_t max_copy_delay_ns = 20'000;
    int killed_rank = -1;  // -1: none
    uint64_t killed_at_step = 0;
    bool are_processes = false;  // ranks start late and join, and their ends are seen
    uint64_t max_start_delay_ns = 100'000;
    Fault fault = Fault::kNone;
    NetworkConfig network;
};

// A fiber of one rank: its program or one warp of one of its launches.
struct Task {
    explicit Task(size_t stack) : fiber(stack), stack_bytes(stack) {}

    Fiber fiber;
    VirtualThread copies;
    size_t stack_bytes;
    Warp* warp = nullptr;  // null: its rank's program
    int rank = 0;
    uint64_t id = 0;                       // order of creation
    uint64_t deadline_ns = UINT64_MAX;     // of the wait that it polls for
    uint64_t polled_at_ns = 0;             // when it polled last
    uint64_t num_copies = 0;               // asynchronous copies issued
    std::vector<uint64_t> pending_copies;  // numbers of those that have not landed, ascending
    bool awaits_copies = false;
    bool blocked = false;
    bool sleeps = false;
    bool unwinds_on_deadlock = true;  // false during waits that are certain to end, such as for its launch
};

class Scheduler {
  public:
    Scheduler(int num_ranks, const SimulationConfig& config);

    // Allocates stacks for num_tasks more tasks, so that spawning them cannot fail half-way.
    void reserve(size_t num_tasks, size_t stack_bytes);
    // Lets a reserved task run body(argument); it lives until release().
    Task& spawn(int rank, size_t stack_bytes, void (*body)(void*), void* argument);
    void release(Task& task) { free_tasks_.push_back(&task); }

    // Runs until every task has finished. Called outside of tasks.
    void run();

    // The rest is called by the running task.
    Task& current();

    // Lets other tasks run. Counts as progress of the caller.
    void yield();
    // The same without progress.
    void give_way();
    // Call after a failed poll. May return with the clock at deadline_ns if no task can make progress before. Throws on
    // a deadlock, and in every later wait.
    void poll(uint64_t deadline_ns);
    // Until this time, while others run. Not a wait that expires.
    void sleep(uint64_t until_ns);
    // Waits until wake(). Throws like poll() if the task unwinds on deadlock.
    void block();
    // Waits for what is certain to come, and whose wake() comes after it: even in a deadlock, without a throw.
    template <typename Done>
    void block_until(Done done) {
        Task& task = current();
        const bool unwinds = std::exchange(task.unwinds_on_deadlock, false);
        while (!done()) block();
        task.unwinds_on_deadlock = unwinds;
    }
    void wake(Task& task);
    // Call after an effect that others may wait for: all tasks poll again before time jumps.
    void note_progress();

    // is_lost_if_killed: true for copies to other ranks, false for copies into the rank's own shared memory: a dead
    // rank's kernel still runs, and would compute with stale contents.
    void copy_async(void* target, const void* source, size_t bytes, bool is_lost_if_killed);
    void wait_copies(int max_pending);
    // Waits until the caller's copies into [target, target + bytes) have landed.
    void wait_copies_to(const void* target, size_t bytes);
    // Reads the sources of the caller's copies now. Does not change when they land.
    void read_sources();

    // Between LSA teams. Messages of a killed rank are lost.
    void put(int peer, void* target, const void* source, size_t bytes);
    void put_value(int peer, uint64_t* target, uint64_t value);
    void signal(int peer, uint64_t* word, uint64_t increase);
    void flush_puts() { network_.read_sources(current().rank); }
    SimulatedNetwork& network() { return network_; }
    GarbageWriter& garbage() { return garbage_; }

    uint64_t now_ns() const { return now_ns_; }
    uint64_t num_steps() const { return num_steps_; }
    uint64_t trace_hash() const { return trace_hash_; }  // of the schedule
    const SimulationConfig& config() const { return config_; }
    Random& random() { return random_; }
    bool is_killed(int rank) const { return killed_ && rank == config_.killed_rank; }

    // True if no rank was killed or cut off and no wait timed out, so that the protocol must have been followed
    // exactly.
    bool is_undisturbed() const { return !killed_ && !cut_ && !wait_expired_; }
    // Empty unless a deadlock was found.
    const std::string& deadlock() const { return deadlock_; }

    // Reports a checker's finding as the run's result. Replaces an earlier one.
    void report(std::string finding) { finding_ = std::move(finding); }
    const std::string& finding() const { return finding_; }

  private:
    struct Copy {
        uint64_t lands_at_ns;
        uint64_t order;  // of issue, so that equal times have one order
        Task* task;
        uint64_t number;  // within its task
        void* target;
        const void* source;
        size_t bytes;
        bool is_lost_if_killed;
        std::vector<std::byte> read;               // bytes read early; then `source` points here
        bool operator<(const Copy& other) const {  // std::push_heap keeps the largest in front: the next to land
            return lands_at_ns != other.lands_at_ns ? lands_at_ns > other.lands_at_ns : order > other.order;
        }
    };

    Task& pick();
    void step(Task& task);
    void all_are_idle();
    void advance_to(uint64_t time_ns);
    void finish_copy(const Copy& copy, bool lands);
    // Blocks while pending(), which copies that land may change.
    template <typename Pending>
    void block_while(Pending pending);
    void kill();
    void declare_deadlock();
    void suspend();

    SimulationConfig config_;
    int num_ranks_;
    Random random_;
    std::vector<std::unique_ptr<Task>> tasks_;
    std::vector<Task*> free_tasks_;
    std::vector<Task*> ready_;   // may run
    std::vector<Task*> polled_;  // polled without success since the last progress of any task
    std::vector<Task*> blocked_;
    std::vector<Copy> copies_;  // a heap
    Task* current_ = nullptr;
    uint64_t num_live_ = 0;
    uint64_t num_created_ = 0;
    uint64_t num_copies_ = 0;
    uint64_t num_steps_ = 0;
    uint64_t now_ns_ = 1'000'000'000;  // not 0, which would hide a forgotten start time
    uint64_t trace_hash_ = 0;
    int num_idle_rounds_ = 0;
    int stalled_rank_ = -1;
    uint64_t stalled_until_step_ = 0;
    bool killed_ = false;
    bool cut_ = false;
    SimulatedNetwork network_;
    GarbageWriter garbage_;
    bool wait_expired_ = false;
    std::string deadlock_;
    std::string finding_;
};

}  // namespace crossdock::cpu
