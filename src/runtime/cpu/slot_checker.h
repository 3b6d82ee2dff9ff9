// SPDX-License-Identifier: Apache-2.0
// Checks every slot of the protocol: written once, then read once, then written again. Stores the first violation.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "runtime/cpu/scheduler.h"

namespace crossdock::cpu {

// After a rank was killed or masked, a wait timed out, or an operation was cancelled, slots may stay unread, announced
// rows may be missing and rows may be read twice. From then on the checker reports only reads of slots that were not
// written for the operation.
class SlotChecker final : public ProtocolChecker {
  public:
    explicit SlotChecker(const Scheduler& scheduler) : scheduler_(&scheduler) {}

    void slot_written(int writer, int owner, const void* memory, int buffer, uint64_t slot, uint64_t epoch) override;
    void slot_read(int owner, const void* memory, int buffer, uint64_t slot, uint64_t epoch) override;
    void operation_read(int owner, uint64_t epoch, uint64_t rows_announced, uint64_t rows_read) override;
    void unread_slots_allowed() override { unread_slots_allowed_ = true; }

    // A new symmetric allocation begins there: forgets earlier ones at that address.
    void memory_is_new(const void* memory);

    // The first violation's message; empty: none.
    const std::string& violation() const { return violation_; }

  private:
    struct Slot {
        int writer = -1;
        uint64_t epoch = 0;
        bool is_read = true;
        std::string dispute;  // two ranks wrote it for one operation, which is an error only if a rank reads it
    };

    bool is_undisturbed() const { return !unread_slots_allowed_ && scheduler_->is_undisturbed(); }
    void violated(const std::string& what);

    const Scheduler* scheduler_;
    std::map<std::tuple<const void*, int, uint64_t>, Slot>
        slots_;  // by memory, buffer, slot; the order does not matter
    bool unread_slots_allowed_ = false;
    std::string violation_;
};

}  // namespace crossdock::cpu
