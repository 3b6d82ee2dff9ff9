// SPDX-License-Identifier: Apache-2.0
// Processes as ranks of a host know each other: by number and start, since numbers are used again.
#pragma once

#include <cstdint>

#include "fabric/cpu/memory_file.h"

namespace crossdock::cpu {

struct ProcessIdentity {
    int64_t number = 0;
    uint64_t start = 0;  // clock ticks from the host's start; 0: not known
};

ProcessIdentity own_process();

// As one word, which is not 0.
uint64_t to_word(const ProcessIdentity& process);
ProcessIdentity process_from(uint64_t word);

// Knows of a process's end at once, also if it ended before, and even if another process has its ID now.
class ProcessWatch {
  public:
    explicit ProcessWatch(const ProcessIdentity& process);
    bool has_ended() const;
    int64_t number() const { return process_.number; }

  private:
    bool has_another_start() const;

    ProcessIdentity process_;
    FileDescriptor descriptor_;  // none: the kernel has no such descriptors or no more, or the process is gone
    bool was_gone_ = false;
};

}  // namespace crossdock::cpu
