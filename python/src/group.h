// SPDX-License-Identifier: Apache-2.0
//
// crossdock.Group.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "array.h"
#include "communicator.h"
#include "interrupt.h"

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
        expect_no_handler();
        expect_waits_go_on();
        fork_guard_.expect_own_process("group");
        const Funeral funeral(*this);
        const ReleasedGil unlocked;
        const std::lock_guard<std::mutex> lock(mutex_);
        run(body);
    }

    // The same for what concerns the communicator, too.
    template <class Body>
    void call_with_communicator(Body&& body) {
        fork_guard_.expect_own_process("group");
        const Funeral funeral(*this);
        communicator_->call([&] {
            const std::lock_guard<std::mutex> lock(mutex_);
            run(body);
        });
    }

    void close();

    // Destroys a handle, and then releases the arrays that it may read or write until then: now or, if another thread
    // is in a call, at the end of that. A pending half is cancelled, which may wait for ranks of other teams.
    void destroy(ncclEpHandle_t handle, std::vector<Array> arrays);
    // The same at the beginning of the next call, which may need what a pending half holds. Never waits.
    void destroy_later(ncclEpHandle_t handle, std::vector<Array> arrays);

  private:
    struct Doomed {
        ncclEpHandle_t handle;
        std::vector<Array> arrays;
    };
    // After a call, with the GIL, whether it failed or not.
    struct Funeral {
        GroupState& state;
        explicit Funeral(GroupState& of) : state(of) {}
        Funeral(const Funeral&) = delete;
        Funeral& operator=(const Funeral&) = delete;
        ~Funeral() { state.let_go_of_arrays(); }
    };
    template <class Body>
    void run(Body& body) {
        bury();
        expect_open();
        body();
        bury();
    }
    void expect_open() const;
    void bury();  // destroys doomed handles, whose arrays are to be released
    void let_go_of_arrays();

    std::shared_ptr<CommunicatorState> communicator_;
    ncclEpGroup_t group_;
    bool is_low_latency_;
    bool is_closed_ = false;
    std::mutex mutex_;
    std::mutex doomed_mutex_;
    std::vector<Doomed> doomed_;
    std::vector<std::vector<Array>> buried_;  // arrays of handles that are gone
    std::atomic<bool> has_doomed_ = false;    // or buried ones
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
