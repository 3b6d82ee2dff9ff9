// SPDX-License-Identifier: Apache-2.0
// NCCL's collective calls wait for the other ranks without a timeout. Here they run in a thread that is abandoned at
// the deadline.
#pragma once

#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "core/error.h"

namespace crossdock {

using Deadline = std::chrono::steady_clock::time_point;

// Returns or throws what work() does. At the deadline it throws ncclRemoteError with the message; objects that work
// owns are then freed when NCCL returns.
template <typename Work>
auto run_bounded(Work work, Deadline deadline, const std::string& message) {
    std::packaged_task<decltype(work())()> task(std::move(work));
    auto result = task.get_future();
    std::thread(std::move(task)).detach();
    require(result.wait_until(deadline) == std::future_status::ready, ncclRemoteError, "{}", message);
    return result.get();
}

}  // namespace crossdock
