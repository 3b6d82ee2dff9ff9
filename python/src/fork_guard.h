// SPDX-License-Identifier: Apache-2.0
//
// A process that fork() made has copies of its parent's objects, whose ranks live in the parent: using them would write
// into memory that is shared with other ranks. So objects remember in which process they were made.
#pragma once

#include "error.h"

namespace crossdock::python {

// Grows by one in every forked child.
unsigned process_generation();

class ForkGuard {
  public:
    bool is_foreign() const { return made_in_ != process_generation(); }
    void expect_own_process(const char* what) const {
        if (is_foreign()) {
            invalid_usage(std::string("this ") + what + " was made before fork(): a child process makes its own");
        }
    }

  private:
    unsigned made_in_ = process_generation();
};

}  // namespace crossdock::python
