// SPDX-License-Identifier: Apache-2.0
// Finds races in kernels of the simulation: stores the last write and reads of every byte of a window, and reports two
// unordered accesses. It sees all puts, and the loads and stores of kernels that were compiled with
// crossdock/device/watch.hpp. Atomic accesses order others and are not checked themselves.
//
// Of several unordered reads of a byte, one by a thread and one by a put are stored; a write that races only with
// another one is found with other seeds.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "crossdock/device/entry.hpp"
#include "device_api/clock.h"
#include "runtime/cpu/scheduler.h"

namespace crossdock::device_api {

// A thread, as reports name it.
struct Who {
    int rank = 0;
    int block = 0;
    int thread = 0;
};

class RaceDetector {
  public:
    explicit RaceDetector(cpu::Scheduler& scheduler) : scheduler_(&scheduler) {}

    // Watches [memory, memory + bytes), the rank's piece of that window.
    void watch(const std::byte* memory, size_t bytes, int rank, uint64_t window);

    // The thread's index in clocks, the same in every launch.
    uint32_t number_of(const Who& who);

    void thread_accesses(const Who& who, uint32_t number, const Clock& clock, const void* memory, size_t bytes,
                         bool is_write, const void* instruction);
    // A put or a get, with its thread and line.
    struct Transfer {
        Who who;
        crossdockWhere where = {};
        bool is_get = false;
    };
    // issued: the posting thread's clock at that time.
    void put_reads(uint64_t put, const Transfer& transfer, const Clock& issued, const void* memory, size_t bytes);
    void put_lands(uint64_t put, const Transfer& transfer, const Clock& issued, const void* memory, size_t bytes);

    // Stores the first violation, prefixed with the seed.
    void violated(const std::string& what);
    const std::string& violation() const { return violation_; }

    // After a deadlock: adds what a thread waits for. Waits within a block are reported only if there are no others.
    void add_waiting(const std::string& deadlock, const std::string& wait, bool is_within_block);

    static std::string name(const Who& who);
    static std::string name(crossdockWhere where);

    // Joined clocks of all threads that have ended, which precede later launches.
    Clock ended;
    std::unordered_map<const void*, Clock> atomics;

  private:
    enum class Kind : uint8_t { kThreadRead, kThreadWrite, kPutRead, kPutLanding };
    struct Access {
        Kind kind;
        Transfer by;
        uint64_t number;  // thread or put
        uint64_t time;    // of the thread
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

    void check(const Access& access, const Clock& clock, const void* memory, size_t bytes);
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

}  // namespace crossdock::device_api
