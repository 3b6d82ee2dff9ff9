// SPDX-License-Identifier: Apache-2.0
// A thread that notices failed GPU groups: a kernel that fails writes words that the host reads only at the next call,
// which may never come. The thread only reads memory, so it disturbs no launch, capture or replay.
#pragma once

#include <functional>
#include <memory>

#include "device/wait_records.h"

namespace crossdock {

class FailureWatch {
  public:
    // Until the registration is released or the process ends, tell() runs once: soon after status.failed is set, at the
    // latest when the registration is released. It must not throw or release a registration. `status` and what tell()
    // uses must live as long as the registration. A forked child has no such thread; releasing there does nothing.
    using Registration = std::shared_ptr<void>;
    static Registration watch(const HostVisibleStatus& status, std::function<void()> tell);
};

}  // namespace crossdock
