// SPDX-License-Identifier: Apache-2.0
// What kernels call (crossdock/device/entry.hpp): NCCL's Device API. Outside of the simulation a put to a rank of this
// host is a copy and a signal an atomic addition, by the calling thread or by the proxy; the network has the others.
#include <array>
#include <cstring>

#include "core/error.h"
#include "device_api/arguments.h"
#include "device_api/device_comm.h"
#include "device_api/kernel_thread.h"
#include "device_api/own_kernels.h"
#include "device_api/posting.h"

using namespace crossdock;
using namespace crossdock::device_api;

namespace crossdock::device_api {

Caller beginning(const KernelThread& thread, const char* what, crossdockWhere where) {
    return {thread.who(), what, where};
}

WindowView find_window(KernelThread& thread, ncclWindow_t handle, size_t offset, size_t bytes, const char* what,
                       crossdockWhere where) {
    cpu::CpuCommunicator& communicator = *thread.launch().communicator;
    // The last lookup of this thread.
    struct Found {
        const cpu::CpuCommunicator* communicator = nullptr;
        ncclWindow_t handle = nullptr;
        uint64_t num_changes = 0;
        WindowView window;
    };
    thread_local Found t_found;
    WindowView& window = t_found.window;
    const uint64_t num_changes = cpu::CpuCommunicator::num_window_changes();
    try {
        if (t_found.communicator != &communicator || t_found.handle != handle || t_found.num_changes != num_changes) {
            t_found = {&communicator, handle, num_changes, communicator.window(handle)};
        }
    } catch (const Error& error) {
        fail(error.code(), "{}: {}", beginning(thread, what, where), error.what());
    }
    require(offset <= window.bytes && bytes <= window.bytes - offset, ncclInvalidArgument,
            "{}: offset {} and {} bytes, allowed: within the window's {} bytes", beginning(thread, what, where), offset,
            bytes, window.bytes);
    if (thread.launch().simulated != nullptr) {
        RaceDetector& races = thread.launch().simulated->races();
        for (int rank = 0; rank < communicator.num_ranks(); ++rank) {
            races.watch(window.peers.at(rank, 0), window.bytes, rank, window.number);
        }
    }
    return window;
}

int world_rank(const KernelThread& thread, const DeviceComm& comm, crossdockTeam team, int peer, const char* what,
               crossdockWhere where) {
    require(peer >= 0 && peer < team.num_ranks, ncclInvalidArgument, "{}: peer {} is outside of the team of {} ranks",
            beginning(thread, what, where), peer, team.num_ranks);
    const int rank = comm.view.rank + (peer - team.rank) * team.stride;
    require(rank >= 0 && rank < comm.view.num_ranks, ncclInvalidArgument,
            "{}: peer {} of the team (rank {} of {}, stride {}) is not a rank of the communicator",
            beginning(thread, what, where), peer, team.rank, team.num_ranks, team.stride);
    constexpr int kRail = 2;
    require(comm.needs.connection != kRail || (rank - comm.view.rank) % comm.view.lsa_size == 0, ncclInvalidArgument,
            "{}: rank {} is on another rail, and ginConnectionType is NCCL_GIN_CONNECTION_RAIL",
            beginning(thread, what, where), rank);
    return rank;
}

std::function<bool()> are_there(const DeviceComm& comm, const std::array<ncclWindow_t, 3>& windows) {
    return [communicator = comm.communicator.get(), windows] {
        for (ncclWindow_t window : windows) {
            try {
                if (window != nullptr) communicator->window(window);
            } catch (const Error&) {
                return false;
            }
        }
        return true;
    };
}

DeviceComm& open_context(const KernelThread& thread, uint64_t id, int context, crossdockWhere where) {
    DeviceComm& comm = device_api::find_device_comm(id);
    require(comm.view.num_contexts > 0, ncclInvalidUsage,
            "{}: the device communicator has no GIN: its ginConnectionType was NCCL_GIN_CONNECTION_NONE",
            beginning(thread, "ncclGin", where));
    require(context >= 0 && context < comm.view.num_contexts, ncclInvalidArgument, "{}: context {}, allowed: 0..{}",
            beginning(thread, "ncclGin", where), context, comm.view.num_contexts - 1);
    return comm;
}

}  // namespace crossdock::device_api

namespace {

// The window of a VA signal.
WindowView window_of_word(KernelThread& thread, const DeviceComm& comm, ncclWindow_t window, size_t offset,
                          const char* what, crossdockWhere where) {
    require(!comm.needs.no_va_signals, ncclInvalidUsage,
            "{}: a VA signal, but ginVaSignalsRequired of the device communicator was false",
            beginning(thread, what, where));
    const WindowView found = find_window(thread, window, offset, sizeof(uint64_t), what, where);
    require(offset % sizeof(uint64_t) == 0, ncclInvalidArgument,
            "{}: a VA signal at offset {}, allowed: multiples of 8", beginning(thread, what, where), offset);
    return found;
}

// A word at the peer.
struct Word {
    uint64_t* address = nullptr;  // null: none
    cpu::RemoteMemory* memory = nullptr;
    uint64_t offset = 0;
};

// The word that a put signals.
Word signal_of(KernelThread& thread, const DeviceComm& comm, const crossdockPut& put, int peer, const char* what) {
    const crossdockRemoteAction& remote = put.remote;
    if (remote.kind == crossdockNoSignal) return {};
    const bool is_barrier = remote.window == nullptr && (remote.signal & kBarrierSignal) != 0;
    require(!remote.is_strong || is_barrier || !comm.needs.no_strong_signals, ncclInvalidUsage,
            "{}: a strong signal, but ginStrongSignalsRequired of the device communicator was false",
            beginning(thread, what, put.where));
    if (remote.window == nullptr) {
        const Caller begin = beginning(thread, what, put.where);
        return {comm.signal(peer, put.context, remote.signal, begin), comm.remote(),
                comm.signal_offset(put.context, remote.signal, begin)};
    }
    const WindowView window = window_of_word(thread, comm, remote.window, remote.offset, what, put.where);
    return {reinterpret_cast<uint64_t*>(window.peers.at(peer, remote.offset)), window.remote, remote.offset};
}

uint64_t* word_of(KernelThread& thread, DeviceComm& comm, crossdockSlot slot, const char* what, crossdockWhere where) {
    if (slot.window != nullptr) {
        const WindowView window = window_of_word(thread, comm, slot.window, slot.offset, what, where);
        return reinterpret_cast<uint64_t*>(window.local + slot.offset);
    }
    const Caller begin = beginning(thread, what, where);
    return slot.is_counter ? comm.counter(slot.context, slot.index, begin)
                           : comm.signal(comm.view.rank, slot.context, slot.index, begin);
}

std::string name_of(crossdockSlot slot) {
    if (slot.window != nullptr) return fmt::format("the VA signal at offset {}", slot.offset);
    const bool is_barrier = !slot.is_counter && (slot.index & device_api::kBarrierSignal) != 0;
    return fmt::format("{} {} of context {}",
                       slot.is_counter ? "counter"
                       : is_barrier    ? "barrier's signal"
                                       : "signal",
                       slot.index & ~device_api::kBarrierSignal, slot.context);
}

bool has_reached(uint64_t seen, uint64_t least, int bits) {
    const uint64_t mask = ~uint64_t{0} >> (64 - bits);
    return ((seen - least) & mask) <= mask >> 1;
}

// For the message of a wait: the state of the proxy or the network.
std::string state_of(const DeviceComm& comm, int context) {
    return comm.outbox == nullptr ? std::string() : comm.outbox->state(context);
}

}  // namespace

void* crossdockWindowPointer(ncclWindow_t handle, size_t offset, crossdockPointerKind kind, crossdockTeam team,
                             int peer, crossdockWhere where) {
    KernelThread& thread = KernelThread::current();
    const WindowView window = find_window(thread, handle, offset, 0, "a window's pointer", where);
    cpu::CpuCommunicator& communicator = *thread.launch().communicator;
    const int rank = communicator.rank();
    const int size = kind == crossdockPointerLocal ? 1 : device_api::lsa_size(communicator);
    const int first = rank / size * size;
    int target = rank;
    switch (kind) {
        case crossdockPointerLocal:
            break;
        case crossdockPointerLsa:
            target = peer >= 0 && peer < size ? first + peer : -1;
            break;
        case crossdockPointerWorld:
            target = peer;
            break;
        case crossdockPointerTeam:
            target = rank + (peer - team.rank) * team.stride;
            break;
    }
    require(target >= first && target < first + size, ncclInvalidArgument,
            "{}: peer {} is outside of the LSA team of ranks {}..{}", beginning(thread, "a window's pointer", where),
            peer, first, first + size - 1);
    return window.peers.at(target, offset);
}

void crossdockGinOpen(uint64_t dev_comm, int context, crossdockWhere where) {
    if (own_kernels_warp() != nullptr) return;
    open_context(KernelThread::current(), dev_comm, context, where);
}

void crossdockGinPut(const crossdockPut* put) {
    if (cpu::Warp* warp = own_kernels_warp()) return post(*warp, *put);
    KernelThread& thread = KernelThread::current();
    const char* what = put->target == nullptr ? "signal" : put->source == nullptr ? "putValue" : "put";
    DeviceComm& comm = open_context(thread, put->dev_comm, put->context, put->where);
    const int peer = world_rank(thread, comm, put->team, put->peer, what, put->where);
    const bool has_data = put->target != nullptr || put->source != nullptr;
    WindowView target_window, source_window;
    std::byte* target = nullptr;
    const std::byte* source = nullptr;
    if (has_data) {
        target_window = find_window(thread, put->target, put->target_offset, put->bytes, what, put->where);
        target = target_window.peers.at(peer, put->target_offset);
        if (put->source != nullptr) {
            source_window = find_window(thread, put->source, put->source_offset, put->bytes, what, put->where);
            source = source_window.local + put->source_offset;
        }
    }
    const Caller begin = beginning(thread, what, put->where);
    const Word signal = signal_of(thread, comm, *put, peer, what);
    uint64_t* counter = put->has_counter ? comm.counter(put->context, put->counter, begin) : nullptr;
    thread.made_progress();

    if (comm.simulated != nullptr) {
        device_api::SimulatedGin::Post post{thread.who(), thread.number, thread.clock,   comm.view.rank, peer,
                                            put->context, put->dev_comm, target,         source,         {},
                                            put->bytes,   put->remote,   signal.address, counter,        put->where,
                                            nullptr};
        if (has_data && source == nullptr) {
            const auto* value = reinterpret_cast<const std::byte*>(&put->value);
            post.value.assign(value, value + put->bytes);
        }
        post.is_there = are_there(comm, {put->target, put->source, put->remote.window});
        comm.simulated->post(std::move(post));
        thread.tick();
        return thread.scheduling_point();
    }
    const bool to_remote = is_remote(comm, peer);
    if (to_remote || comm.outbox->type() == GinType::kProxy) {
        Descriptor descriptor;
        descriptor.bytes = has_data ? put->bytes : 0;
        descriptor.is_value = has_data && source == nullptr;
        descriptor.has_signal = signal.address != nullptr;
        descriptor.is_strong = put->remote.is_strong;
        descriptor.is_remote = to_remote;
        if (descriptor.is_value) {
            descriptor.value = put->value;
        } else {
            descriptor.source = source;
        }
        descriptor.increase = put->remote.value;
        descriptor.counter = counter;
        descriptor.target = target;
        descriptor.signal = signal.address;
        descriptor.target_memory = target_window.remote;
        descriptor.target_offset = put->target_offset;
        descriptor.source_memory = source_window.remote;
        descriptor.source_offset = put->source_offset;
        descriptor.signal_memory = signal.memory;
        descriptor.signal_offset = signal.offset;
        return post(thread, comm, put->context, peer, descriptor, begin);
    }
    if (source != nullptr && put->bytes > 0) {
        thread.warp().put(peer, target, source, put->bytes);
    } else if (target != nullptr && put->bytes > 0) {
        device_api::store_value(target, put->value, put->bytes);
    }
    if (counter != nullptr) __atomic_fetch_add(counter, 1, __ATOMIC_RELEASE);
    if (signal.address != nullptr) thread.warp().signal(peer, signal.address, put->remote.value);
}

void crossdockGinFlush(uint64_t dev_comm, int context, crossdockWhere where) {
    if (cpu::Warp* warp = own_kernels_warp()) return warp->flush_puts();
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = open_context(thread, dev_comm, context, where);
    thread.made_progress();
    if (comm.simulated == nullptr) {
        for (int peer = 0; peer < comm.view.num_ranks; ++peer) {
            wait_until_read(thread, comm, context, peer, comm.outbox->num_posted(context, peer), where);
        }
        return;
    }
    thread.scheduling_point();
    comm.simulated->flush(thread.number, dev_comm, context, thread.clock);
    thread.scheduling_point();
}

uint64_t crossdockGinRead(crossdockSlot slot, bool acquires, crossdockWhere where) {
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = open_context(thread, slot.dev_comm, slot.context, where);
    const uint64_t* word = word_of(thread, comm, slot, "a read", where);
    // Callers poll it in a loop.
    if (comm.outbox != nullptr) comm.outbox->progress(slot.context);
    thread.poll(0);
    const uint64_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if (comm.simulated != nullptr) (acquires ? thread.clock : thread.pending).join(comm.simulated->seen(word));
    return value;
}

void crossdockGinWait(crossdockSlot slot, uint64_t least, int bits, bool acquires, crossdockWhere where) {
    crossdockGinWaitUntil(slot, least, bits, acquires, UINT64_MAX, where);
}

bool crossdockGinWaitUntil(crossdockSlot slot, uint64_t least, int bits, bool acquires, uint64_t deadline_ns,
                           crossdockWhere where) {
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = open_context(thread, slot.dev_comm, slot.context, where);
    const uint64_t* word = word_of(thread, comm, slot, "a wait", where);
    require(bits >= 1 && bits <= 64, ncclInvalidArgument, "{}: {} bits, allowed: 1..64",
            beginning(thread, "a wait", where), bits);
    uint64_t seen = 0;
    const bool has_come = thread.wait_until(
        [&] {
            if (comm.outbox != nullptr) comm.outbox->progress(slot.context);
            seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
            return has_reached(seen, least, bits);
        },
        deadline_ns,
        [&] {
            return fmt::format("{} at {}: expected {}, seen {}{}", name_of(slot), RaceDetector::name(where), least,
                               seen, state_of(comm, slot.context));
        });
    if (has_come && comm.simulated != nullptr) {
        (acquires ? thread.clock : thread.pending).join(comm.simulated->seen(word));
    }
    return has_come;
}

void crossdockGinReset(crossdockSlot slot, crossdockWhere where) {
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = open_context(thread, slot.dev_comm, slot.context, where);
    uint64_t* word = word_of(thread, comm, slot, "a reset", where);
    __atomic_store_n(word, 0, __ATOMIC_RELEASE);
    if (comm.simulated != nullptr) comm.simulated->reset(word);
}

uint64_t* crossdockGinShadow(crossdockSlot slot, crossdockWhere where) {
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = open_context(thread, slot.dev_comm, slot.context, where);
    return comm.shadow(slot.context, slot.index, beginning(thread, "a signal's shadow", where));
}

void crossdockBarrierEnter(const crossdockBarrierUse* use, crossdockWhere where) {
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = device_api::find_device_comm(use->dev_comm);
    const char* kind = use->is_gin ? "a GIN barrier" : "an LSA barrier";
    require(use->index < static_cast<uint32_t>(use->num_barriers), ncclInvalidArgument,
            "{}: barrier {}, but the device communicator has {} of them", beginning(thread, kind, where), use->index,
            use->num_barriers);
    DeviceComm::Use& in_use =
        comm.uses.try_emplace({use->is_gin, use->handle, use->index}, DeviceComm::Use{use->leader, 0}).first->second;
    require(in_use.leader == use->leader, ncclInvalidUsage,
            "{}: barrier {} is in use by other threads (from block {}, thread {} on)", beginning(thread, kind, where),
            use->index, in_use.leader / 1024, in_use.leader % 1024);
    ++in_use.num_threads;
}

void crossdockBarrierLeave(const crossdockBarrierUse* use) {
    try {
        DeviceComm& comm = device_api::find_device_comm(use->dev_comm);
        const auto found = comm.uses.find({use->is_gin, use->handle, use->index});
        if (found != comm.uses.end() && --found->second.num_threads == 0) comm.uses.erase(found);
    } catch (const Error&) {  // the device communicator is gone, and its barriers with it
    }
}

void crossdockLsaArrive(const crossdockBarrierUse* use, int peer, bool releases, crossdockWhere where) {
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = device_api::find_device_comm(use->dev_comm);
    require(peer >= 0 && peer < comm.view.lsa_size, ncclInvalidArgument,
            "{}: rank {} is outside of the LSA team of {} ranks", beginning(thread, "an LSA barrier", where), peer,
            comm.view.lsa_size);
    const uint32_t barrier = use->handle + use->index;
    const int owner = comm.view.rank - comm.view.lsa_rank + peer;
    uint64_t* inbox = comm.lsa_inbox(owner, barrier, comm.view.lsa_rank);
    if (comm.simulated != nullptr) {
        thread.scheduling_point();
        comm.simulated->races().atomics[inbox].join(releases ? thread.clock : thread.fenced);
        thread.tick();
    }
    __atomic_store_n(inbox, ++comm.lsa_epochs(barrier, peer).told, __ATOMIC_RELEASE);
    thread.scheduling_point();
}

void crossdockLsaWait(const crossdockBarrierUse* use, int peer, bool acquires, crossdockWhere where) {
    crossdockLsaWaitUntil(use, peer, acquires, UINT64_MAX, where);
    ++device_api::find_device_comm(use->dev_comm).lsa_epochs(use->handle + use->index, peer).awaited;
}

bool crossdockLsaWaitUntil(const crossdockBarrierUse* use, int peer, bool acquires, uint64_t deadline_ns,
                           crossdockWhere where) {
    KernelThread& thread = KernelThread::current();
    DeviceComm& comm = device_api::find_device_comm(use->dev_comm);
    const uint32_t barrier = use->handle + use->index;
    const uint64_t* inbox = comm.lsa_inbox(comm.view.rank, barrier, peer);
    const uint64_t least = comm.lsa_epochs(barrier, peer).awaited + 1;
    uint64_t seen = 0;
    const bool has_come = thread.wait_until(
        [&] {
            seen = __atomic_load_n(inbox, __ATOMIC_ACQUIRE);
            return seen >= least;
        },
        deadline_ns,
        [&] {
            return fmt::format("LSA rank {} at LSA barrier {} at {}: expected {}, seen {}", peer, use->index,
                               RaceDetector::name(where), least, seen);
        });
    if (has_come && comm.simulated != nullptr) {
        (acquires ? thread.clock : thread.pending).join(comm.simulated->races().atomics[inbox]);
    }
    return has_come;
}

ncclWindow_t crossdockFindWindow(const void* address, size_t* offset, crossdockWhere where) {
    KernelThread& thread = KernelThread::current();
    const ncclWindow_t window = thread.launch().communicator->window_at(static_cast<const std::byte*>(address), offset);
    require(window != nullptr, ncclInvalidArgument, "{}: no window of this rank contains {}",
            beginning(thread, "ncclFindWindow or a multimem pointer", where), address);
    return window;
}

int crossdockLsaTeamSize() { return device_api::lsa_size(*KernelThread::current().launch().communicator); }
