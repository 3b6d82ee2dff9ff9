// SPDX-License-Identifier: Apache-2.0
// A thread that notices failed GPU groups: a kernel that gives up writes words that the host does not read until the
// next call, which may never come. The thread reads memory only, so it disturbs no launch, capture or replay.
#pragma once

#include <functional>
#include <memory>

#include "device/wait.h"

namespace crossdock {

class FailureWatch {
  public:
    // From now until the registration is released, or the process ends: tell() runs once, soon after status.failed is
    // set, or when the registration is released at the latest. It must not throw, nor release one. `status` and what
    // tell() uses must live as long as the registration. A forked child has no such thread; releasing one there does
    // nothing.
    using Registration = std::shared_ptr<void>;
    static Registration watch(const HostVisibleStatus& status, std::function<void()> tell);
};

}  // namespace crossdock
