// SPDX-License-Identifier: Apache-2.0
// Follows every slot of the protocol through its life: written once, then read once, then written again. Keeps the first violation.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "runtime/cpu/scheduler.h"

namespace crossdock::cpu {

// Once a rank has been killed or a wait has run into its deadline, operations end early: slots stay unread and announced rows do not
// come, rightly. From then on only reads are judged, since nothing justifies reading what was never written, or twice.
class SlotChecker final : public ProtocolChecker {
  public:
    explicit SlotChecker(const Scheduler& scheduler) : scheduler_(&scheduler) {}

    void slot_written(int writer, int owner, int buffer, uint64_t slot, uint64_t epoch) override;
    void slot_read(int owner, int buffer, uint64_t slot, uint64_t epoch) override;
    void operation_read(int owner, uint64_t epoch, uint64_t rows_announced, uint64_t rows_read) override;

    // One sentence; empty: none.
    const std::string& violation() const { return violation_; }

  private:
    struct Slot {
        int writer = -1;
        uint64_t epoch = 0;
        bool is_read = true;
    };

    void violated(std::string what);

    const Scheduler* scheduler_;
    std::map<std::tuple<int, int, uint64_t>, Slot> slots_;  // by owner, buffer, slot
    std::string violation_;
};

}  // namespace crossdock::cpu
