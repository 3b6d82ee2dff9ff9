// SPDX-License-Identifier: Apache-2.0
//
// crossdock.Group.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <vector>

#include "communicator.h"

namespace crossdock::python {

// What a group and its handles share.
class GroupState {
  public:
    GroupState(std::shared_ptr<CommunicatorState> communicator, ncclEpGroup_t group, bool is_low_latency)
        : communicator_(std::move(communicator)), group_(group), is_low_latency_(is_low_latency) {}
    GroupState(const GroupState&) = delete;
    GroupState& operator=(const GroupState&) = delete;

    ncclEpGroup_t get() const { return group_; }
    bool is_closed() const { return is_closed_; }
    bool is_low_latency() const { return is_low_latency_; }
    bool is_foreign() const { return fork_guard_.is_foreign(); }
    CommunicatorState& communicator() const { return *communicator_; }

    // Runs body, which calls the C API, without the GIL and alone among the calls of this group: threads that share one
    // wait for each other. InvalidUsage: the group is closed.
    template <class Body>
    void call(Body&& body) {
        nanobind::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> lock(mutex_);
        expect_usable();
        body();
        bury();
    }

    // The same for what concerns the communicator, too.
    template <class Body>
    void call_with_communicator(Body&& body) {
        communicator_->call([&] {
            const std::lock_guard<std::mutex> lock(mutex_);
            expect_usable();
            body();
            bury();
        });
    }

    void close();

    // Destroys a handle, now or, if another thread is in a call, at the end of that. Never waits.
    void dispose(ncclEpHandle_t handle);

  private:
    void expect_usable() const;
    void bury();

    std::shared_ptr<CommunicatorState> communicator_;
    ncclEpGroup_t group_;
    bool is_low_latency_;
    bool is_closed_ = false;
    std::mutex mutex_;
    std::mutex doomed_mutex_;
    std::vector<ncclEpHandle_t> doomed_;
    ForkGuard fork_guard_;
};

class Group {
  public:
    Group(nanobind::handle comm, nanobind::handle config, const nanobind::kwargs& fields);
    // A group is destroyed by all ranks together, which a collector of garbage cannot arrange: one that was not closed
    // stays until the process ends, and a ResourceWarning says so.
    ~Group();
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    const std::shared_ptr<GroupState>& state() const { return state_; }

  private:
    std::shared_ptr<GroupState> state_;
};

void bind_group(nanobind::module_& module);

}  // namespace crossdock::python
