// SPDX-License-Identifier: Apache-2.0
// crossdockSetInterruptCheck: how a program ends the library's waits for other ranks.
#pragma once

#include <cstdint>

namespace crossdock {

using InterruptCheck = int (*)();

// null: waits are not interrupted.
void set_interrupt_check(InterruptCheck check);

// One wait of the calling thread.
class Interruption {
  public:
    // Call it while waiting, as often as you like, without holding a lock: it asks the program's check about every 50
    // ms, the first time after as long. Returns true once the wait is to end, and from then on.
    bool has_come();

  private:
    uint64_t next_look_ns_ = 0;
    bool has_come_ = false;
};

}  // namespace crossdock
