// SPDX-License-Identifier: Apache-2.0
// Follows every slot of the protocol through its life: written once, then read once, then written again. Keeps the
// first violation.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "runtime/cpu/scheduler.h"

namespace crossdock::cpu {

// Once a rank has been killed or masked, a wait has run into its deadline, or an operation was given up, slots stay
// unread, announced rows do not come and rows are read once more, all of it rightly. From then on only one thing is
// judged, since nothing justifies it: to read what was not written for that operation.
class SlotChecker final : public ProtocolChecker {
  public:
    explicit SlotChecker(const Scheduler& scheduler) : scheduler_(&scheduler) {}

    void slot_written(int writer, int owner, const void* memory, int buffer, uint64_t slot, uint64_t epoch) override;
    void slot_read(int owner, const void* memory, int buffer, uint64_t slot, uint64_t epoch) override;
    void operation_read(int owner, uint64_t epoch, uint64_t rows_announced, uint64_t rows_read) override;
    void unread_slots_allowed() override { unread_slots_allowed_ = true; }

    // A new symmetric allocation begins there: what is known of earlier ones at that address is over.
    void memory_is_new(const void* memory);

    // One message; empty: none.
    const std::string& violation() const { return violation_; }

  private:
    struct Slot {
        int writer = -1;
        uint64_t epoch = 0;
        bool is_read = true;
        std::string dispute;  // two ranks wrote it for one operation: wrong, unless they disagree and no rank reads it
    };

    bool is_undisturbed() const { return !unread_slots_allowed_ && scheduler_->is_undisturbed(); }
    void violated(const std::string& what);

    const Scheduler* scheduler_;
    std::map<std::tuple<const void*, int, uint64_t>, Slot>
        slots_;  // by memory, buffer, slot; the order is never looked at
    bool unread_slots_allowed_ = false;
    std::string violation_;
};

}  // namespace crossdock::cpu
