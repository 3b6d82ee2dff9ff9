// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

namespace crossdock::bench {

// Something that is timed.
struct Work {
    // Enqueues it on the device's stream (CPUs: has done it on return), `count` times over.
    std::function<void(int count)> run;

    // What must be done before it may run again, if anything; not timed. Such work is not repeated in graphs.
    std::function<void()> settle;

    bool capturable = true;

    bool has_graph() const { return capturable && !settle; }
};

}  // namespace crossdock::bench
