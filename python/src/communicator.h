// SPDX-License-Identifier: Apache-2.0
//
// crossdock.Communicator: the ranks, as threads or processes of CPUs, or an adopted NCCL communicator.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "fork_guard.h"
#include "gil.h"
#include "interrupt.h"

namespace crossdock::python {

// What a communicator, its groups and windows share: it lives as long as one of them.
class CommunicatorState {
  public:
    CommunicatorState(ncclComm_t comm, bool is_owned, bool is_cpu);
    ~CommunicatorState();
    CommunicatorState(const CommunicatorState&) = delete;
    CommunicatorState& operator=(const CommunicatorState&) = delete;

    int rank() const { return rank_; }
    int num_ranks() const { return num_ranks_; }
    bool is_cpu() const { return is_cpu_; }
    ncclComm_t get() const { return comm_; }
    // Runs body, which calls the C API, without the GIL and alone among the calls that concern the communicator.
    template <class Body>
    void call(Body&& body) {
        expect_no_handler();
        // First: another thread may have held the mutex at the fork.
        fork_guard_.expect_own_process("communicator");
        const ReleasedGil unlocked;
        const std::lock_guard<std::mutex> lock(mutex_);
        expect_open();
        body();
    }

    // Frees it, if it is ours. Repeating it is fine. InvalidUsage: groups or windows of it are open.
    void close();

    // Open groups and windows.
    void add_user() { ++num_users_; }
    void remove_user() { --num_users_; }

  private:
    void expect_open() const;

    ncclComm_t comm_;
    bool is_owned_;
    bool is_cpu_;
    bool is_closed_ = false;
    int rank_ = 0;
    int num_ranks_ = 0;
    std::atomic<int> num_users_ = 0;
    std::mutex mutex_;
    ForkGuard fork_guard_;
};

struct Communicator {
    std::shared_ptr<CommunicatorState> state;
};

// A Communicator, or an object that stands for an NCCL communicator: one with an address in `ptr` (nccl4py's), or the
// address itself.
std::shared_ptr<CommunicatorState> communicator_from(nanobind::handle object);

// `with` closes what it names. If its block failed, that is what is reported, and not what cannot be closed now.
template <class Close>
void close_at_exit(const nanobind::args& exception, Close&& close) {
    const bool has_failed = exception.size() > 0 && !nanobind::handle(exception[0]).is_none();
    try {
        close();
    } catch (const ApiError&) {
        if (!has_failed) throw;
    }
}

void bind_communicator(nanobind::module_& module);

}  // namespace crossdock::python
