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
    // From now until the place is given up, or the process ends: tell() runs once, soon after status.failed is set, or
    // when the place is given up at the latest. It must not throw, nor give up a place. `status` and what tell() uses
    // must live as long as the place. A forked child has no such thread; giving up a place there does nothing.
    using Place = std::shared_ptr<void>;
    static Place watch(const HostVisibleStatus& status, std::function<void()> tell);
};

}  // namespace crossdock
