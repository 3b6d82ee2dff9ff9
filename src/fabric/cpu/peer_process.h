// SPDX-License-Identifier: Apache-2.0
// Identifies and watches processes of this host: by number and start time, since numbers are reused.
#pragma once

#include <cstdint>

#include "runtime/cpu/memory_file.h"

namespace crossdock::cpu {

struct ProcessIdentity {
    int64_t number = 0;
    uint64_t start = 0;  // clock ticks from the host's start; 0: not known
};

ProcessIdentity own_process();

// Packs the identity into one word, which is not 0.
uint64_t to_word(const ProcessIdentity& process);
ProcessIdentity process_from(uint64_t word);

// Detects the end of a process at once, even if it ended before and another process has its number now.
class ProcessWatch {
  public:
    explicit ProcessWatch(const ProcessIdentity& process);
    bool has_ended() const;
    int64_t number() const { return process_.number; }

  private:
    bool has_another_start() const;

    ProcessIdentity process_;
    FileDescriptor descriptor_;  // a pidfd; invalid: not available, or the process is gone
    bool was_gone_ = false;
};

}  // namespace crossdock::cpu
