// SPDX-License-Identifier: Apache-2.0
// What kernels call (crossdock/device/entry.hpp): gets, and requests for flushes.
#include <array>

#include "core/error.h"
#include "device_api/arguments.h"
#include "device_api/posting.h"

using namespace crossdock;
using namespace crossdock::device_api;

namespace {

// A request's first word outside of the simulation: the number of operations posted to the peer. Its second word: the
// peer's rank, below bits that identify the device communicator and context, which detects requests of another context
// and those that flushAsync has not made.
constexpr int kRankBits = 24, kContextBits = 8;
constexpr uint64_t kRankMask = (1 << kRankBits) - 1;

uint64_t mark_of(uint64_t dev_comm, int context, uint64_t rank) {
    const uint64_t place = dev_comm << kContextBits | static_cast<uint64_t>(context);
    return (place ^ 0xc0d0'c0c4) << kRankBits | rank;
}

}  // namespace

void crossdockGinGet(const crossdockGet* get) {
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = open_context(thread, get->dev_comm, get->context, get->where);
    const int peer = world_rank(thread, comm, get->team, get->peer, "get", get->where);
    const WindowView source_window =
        find_window(thread, get->source, get->source_offset, get->bytes, "get", get->where);
    const WindowView target_window =
        find_window(thread, get->target, get->target_offset, get->bytes, "get", get->where);
    const std::byte* source = source_window.peers.at(peer, get->source_offset);
    std::byte* target = target_window.local + get->target_offset;
    thread.made_progress();
    if (comm.simulated == nullptr) {
        if (get->bytes == 0) return;
        const bool from_remote = is_remote(comm, peer);
        if (!from_remote && comm.outbox->type() == GinType::kDirect) {
            return thread.warp().put(comm.view.rank, target, source, get->bytes);
        }
        Descriptor descriptor;
        descriptor.bytes = get->bytes;
        descriptor.is_get = true;
        descriptor.is_remote = from_remote;
        descriptor.source = source;
        descriptor.target = target;
        descriptor.source_memory = source_window.remote;
        descriptor.source_offset = get->source_offset;
        descriptor.target_memory = target_window.remote;
        descriptor.target_offset = get->target_offset;
        return post(thread, comm, get->context, peer, descriptor, beginning(thread, "get", get->where));
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
    request[0] = comm.simulated == nullptr ? comm.outbox->num_posted(context, rank)
                                           : comm.simulated->request_flush(thread.clock, dev_comm, context, rank);
    request[1] = mark_of(dev_comm, context, static_cast<uint64_t>(rank));
}

void crossdockGinWaitRequest(uint64_t dev_comm, int context, const uint64_t* request, bool acquires,
                             crossdockWhere where) {
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = open_context(thread, dev_comm, context, where);
    const int rank = static_cast<int>(request[1] & kRankMask);
    const uint64_t number = request[0];
    bool is_known = request[1] == mark_of(dev_comm, context, request[1] & kRankMask);
    if (is_known && comm.simulated == nullptr) {
        is_known = rank < comm.view.num_ranks && number <= comm.outbox->num_posted(context, rank);
    } else if (is_known) {
        is_known = comm.simulated->has_request(request[0]);
    }
    require(is_known, ncclInvalidArgument, "{}: the request is not one that flushAsync of context {} has made",
            beginning(thread, "a wait for a request", where), context);
    thread.made_progress();
    if (comm.simulated == nullptr) return wait_until_read(thread, comm, context, rank, number, where);
    thread.scheduling_point();
    comm.simulated->wait_for_request(request[0], acquires ? thread.clock : thread.pending);
    thread.scheduling_point();
}
