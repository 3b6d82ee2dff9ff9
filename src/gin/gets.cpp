// SPDX-License-Identifier: Apache-2.0
// What kernels call (crossdock/device/entry.hpp): gets, and requests for flushes. Outside of the simulation a get is a
// copy, over when the call returns.
#include <array>

#include "core/error.h"
#include "gin/arguments.h"

using namespace crossdock;
using namespace crossdock::gin;

namespace {

// A request's second word says of which device communicator and context it is: one that no flushAsync has made, or that
// is of another context, is found by it.
uint64_t mark_of(uint64_t dev_comm, int context) {
    return (dev_comm << 16 | static_cast<uint64_t>(context)) ^ 0xc0d0'c0c4'0000'0000;
}

}  // namespace

void crossdockGinGet(const crossdockGet* get) {
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = open_context(thread, get->dev_comm, get->context, get->where);
    const int peer = world_rank(thread, comm, get->team, get->peer, "get", get->where);
    const std::byte* source = find_window(thread, get->source, get->source_offset, get->bytes, "get", get->where)
                                  .peers.at(peer, get->source_offset);
    std::byte* target =
        find_window(thread, get->target, get->target_offset, get->bytes, "get", get->where).local + get->target_offset;
    thread.made_progress();
    if (comm.simulated == nullptr) {
        if (get->bytes > 0) thread.warp().put(comm.view.rank, target, source, get->bytes);
        return;
    }
    SimulatedGin::Post post{};
    post.is_get = true;
    post.who = thread.who();
    post.thread = thread.number;
    post.issued = thread.clock;
    post.rank = comm.view.rank;
    post.peer = peer;
    post.context = get->context;
    post.dev_comm = get->dev_comm;
    post.target = target;
    post.source = source;
    post.bytes = get->bytes;
    post.where = get->where;
    post.is_there = are_there(comm, {get->target, get->source, nullptr});
    comm.simulated->post(std::move(post));
    thread.tick();
    thread.scheduling_point();
}

void crossdockGinFlushAsync(uint64_t dev_comm, int context, crossdockTeam team, int peer, uint64_t* request,
                            crossdockWhere where) {
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = open_context(thread, dev_comm, context, where);
    const int rank = world_rank(thread, comm, team, peer, "flushAsync", where);
    thread.made_progress();
    request[0] = comm.simulated == nullptr ? 0 : comm.simulated->request_flush(thread.clock, dev_comm, context, rank);
    request[1] = mark_of(dev_comm, context);
}

void crossdockGinWaitRequest(uint64_t dev_comm, int context, const uint64_t* request, bool acquires,
                             crossdockWhere where) {
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = open_context(thread, dev_comm, context, where);
    const bool is_known = request[1] == mark_of(dev_comm, context) &&
                          (comm.simulated == nullptr ? request[0] == 0 : comm.simulated->has_request(request[0]));
    require(is_known, ncclInvalidArgument, "{}: the request is not one that flushAsync of context {} has made",
            beginning(thread, "a wait for a request", where), context);
    thread.made_progress();
    if (comm.simulated == nullptr) return;
    thread.scheduling_point();
    comm.simulated->wait_for_request(request[0], acquires ? thread.clock : thread.pending);
    thread.scheduling_point();
}
