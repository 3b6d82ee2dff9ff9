// SPDX-License-Identifier: Apache-2.0
// NCCL's collective calls wait for the other ranks without a limit of their own. Here they run in a thread that is left
// alone when the time is up.
#pragma once

#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "core/error.h"

namespace crossdock {

using Deadline = std::chrono::steady_clock::time_point;

// What work() returns, or throws; Error with ncclRemoteError and the message at the deadline. What work owns then goes
// when NCCL comes back.
template <typename Work>
auto run_bounded(Work work, Deadline deadline, const std::string& message) {
    std::packaged_task<decltype(work())()> task(std::move(work));
    auto result = task.get_future();
    std::thread(std::move(task)).detach();
    require(result.wait_until(deadline) == std::future_status::ready, ncclRemoteError, "{}", message);
    return result.get();
}

}  // namespace crossdock
