// SPDX-License-Identifier: Apache-2.0
// Judges kernels of the simulation: of every byte of a window it keeps who wrote and who read it last, and reports two
// accesses that nothing orders. Accesses are puts, which it always sees, and loads and stores of kernels that were
// compiled with crossdock/device/watch.hpp. Atomic accesses order others and are not judged themselves.
//
// Of several unordered reads of a byte one by a thread and one by a put are remembered, so a write that races with
// another of them only is found in other seeds.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "crossdock/device/entry.hpp"
#include "gin/clock.h"
#include "runtime/cpu/scheduler.h"

namespace crossdock::gin {

// A thread as reports name it.
struct Who {
    int rank = 0;
    int block = 0;
    int thread = 0;
};

class Judge {
  public:
    explicit Judge(cpu::Scheduler& scheduler) : scheduler_(&scheduler) {}

    // [memory, memory + bytes) is rank's piece of the window of that number.
    void watch(const std::byte* memory, size_t bytes, int rank, uint64_t window);

    // A number for the thread's time in clocks; the same in every launch.
    uint32_t number_of(const Who& who);

    void thread_accesses(const Who& who, uint32_t number, const Clock& clock, const void* memory, size_t bytes,
                         bool is_write, const void* instruction);
    // A put or a get, by whom and where.
    struct Transfer {
        Who who;
        crossdockWhere where = {};
        bool is_get = false;
    };
    // issued: what the thread that posted it knew.
    void put_reads(uint64_t put, const Transfer& transfer, const Clock& issued, const void* memory, size_t bytes);
    void put_lands(uint64_t put, const Transfer& transfer, const Clock& issued, const void* memory, size_t bytes);

    // Keeps the first violation, with the seed before it.
    void violated(const std::string& what);
    const std::string& violation() const { return violation_; }

    // After a deadlock: what each thread waits for. Threads that wait for others of their block are only counted.
    void add_waiting(const std::string& deadlock, const std::string& wait, bool is_within_block);

    static std::string name(const Who& who);
    static std::string name(crossdockWhere where);

    // What all threads of kernels that have ended knew: later launches come after them.
    Clock ended;
    std::unordered_map<const void*, Clock> atomics;

  private:
    enum class Kind : uint8_t { kThreadRead, kThreadWrite, kPutRead, kPutLanding };
    struct Access {
        Kind kind;
        Transfer by;
        uint64_t number;  // thread or put
        uint32_t time;    // of the thread
        const void* instruction;
    };
    struct Byte {
        uint32_t write = 0, read = 0, put_read = 0;  // indices of accesses; 0: none
    };
    static constexpr size_t kPageBytes = 1024;
    struct Region {
        size_t bytes;
        int rank;
        uint64_t window;
        std::unordered_map<size_t, std::array<Byte, kPageBytes>> pages;
    };

    void judge(const Access& access, const Clock& clock, const void* memory, size_t bytes);
    bool is_known(const Access& access, const Clock& clock) const;
    void report(const Access& first, const Access& second, const Region& region, size_t offset);
    static std::string describe(const Access& access);

    cpu::Scheduler* scheduler_;
    std::map<const std::byte*, Region> regions_;
    std::vector<Access> accesses_{Access{}};
    std::map<std::array<int, 3>, uint32_t> numbers_;
    std::string violation_;
    std::vector<std::string> waits_;
    std::vector<std::string> waits_within_blocks_;
};

}  // namespace crossdock::gin
