// SPDX-License-Identifier: Apache-2.0
// ncclGin: one-sided puts, signals and counters, with NCCL's semantics. A context orders only itself. A put is
// unordered; a strong signal follows all earlier puts of its context to that peer, a weak one only its own put. Flushes
// and counters tell that sources may be reused. The simulator makes use of all that this leaves open.
//
// Every wait is bounded: CROSSDOCK_GIN_TIMEOUT_MS (60000). One that expires ends the kernel with a message.
#pragma once

#include "crossdock/device/atomic.hpp"
#include "crossdock/device/coop.hpp"
#include "crossdock/device/core.hpp"

struct ncclGin_None {};
struct ncclGin_StrongSignalInc {
    ncclGinSignal_t signal;
};
struct ncclGin_WeakSignalInc {
    ncclGinSignal_t signal;
};
struct ncclGin_SignalInc {  // strong here
    ncclGinSignal_t signal;
};
struct ncclGin_StrongSignalAdd {
    ncclGinSignal_t signal;
    uint64_t value;
};
struct ncclGin_WeakSignalAdd {
    ncclGinSignal_t signal;
    uint64_t value;
};
struct ncclGin_SignalAdd {  // strong here
    ncclGinSignal_t signal;
    uint64_t value;
};
// VA signals: a word of a window instead of a numbered signal, at a multiple of 8 bytes.
struct ncclGin_StrongVASignalInc {
    ncclWindow_t signalWindow;
    size_t signalOffset;
};
struct ncclGin_WeakVASignalInc {
    ncclWindow_t signalWindow;
    size_t signalOffset;
};
struct ncclGin_VASignalInc {  // strong here
    ncclWindow_t signalWindow;
    size_t signalOffset;
};
struct ncclGin_StrongVASignalAdd {
    ncclWindow_t signalWindow;
    size_t signalOffset;
    uint64_t value;
};
struct ncclGin_WeakVASignalAdd {
    ncclWindow_t signalWindow;
    size_t signalOffset;
    uint64_t value;
};
struct ncclGin_VASignalAdd {  // strong here
    ncclWindow_t signalWindow;
    size_t signalOffset;
    uint64_t value;
};
struct ncclGin_WeakCounterInc {
    ncclGinCounter_t counter;
};
struct ncclGin_CounterInc {
    ncclGinCounter_t counter;
};

// Room for a descriptor in shared memory: accepted and not used.
struct ncclGinDescriptorSmem {
    alignas(16) char space[64];
};
struct ncclGin_DescriptorSmem {
    ncclGinDescriptorSmem* descriptor;
};
// Where a buffer's memory is: all of it is the host's here.
struct ncclGin_SegmentDevice {};
struct ncclGin_SegmentMixed {};
struct ncclGin_SegmentHostNuma {};

enum ncclGinOptFlags {
    ncclGinOptFlagsDefault = 0,
    ncclGinOptFlagsMaySkipCreditCheck = (1 << 0),
    ncclGinOptFlagsAggregateRequests = (1 << 1),
};
// Contexts may be shared by all threads in every mode.
enum ncclGinResourceSharingMode : uint8_t {
    NCCL_GIN_RESOURCE_SHARING_GPU = 0,
    NCCL_GIN_RESOURCE_SHARING_CTA = 1,
    NCCL_GIN_RESOURCE_SHARING_THREAD = 2,
};

namespace crossdock::device {

constexpr bool kStrong = true, kWeak = false;
constexpr crossdockRemoteAction inc(bool is_strong, ncclGinSignal_t signal) {
    return {crossdockSignalInc, is_strong, signal, 1, nullptr, 0};
}
constexpr crossdockRemoteAction add(bool is_strong, ncclGinSignal_t signal, uint64_t value) {
    return {crossdockSignalAdd, is_strong, signal, value, nullptr, 0};
}
// A null window would stand for a numbered signal; the library finds no window behind this one.
inline ncclWindow_t not_null(ncclWindow_t window) {
    return window != nullptr ? window : reinterpret_cast<ncclWindow_t>(1);
}
template <typename VASignal>
crossdockRemoteAction inc_va(bool is_strong, VASignal a) {
    return {crossdockSignalInc, is_strong, 0, 1, not_null(a.signalWindow), a.signalOffset};
}
template <typename VASignal>
crossdockRemoteAction add_va(bool is_strong, VASignal a) {
    return {crossdockSignalAdd, is_strong, 0, a.value, not_null(a.signalWindow), a.signalOffset};
}
constexpr crossdockRemoteAction action(ncclGin_None) { return {crossdockNoSignal, false, 0, 0, nullptr, 0}; }
constexpr crossdockRemoteAction action(ncclGin_StrongSignalInc a) { return inc(kStrong, a.signal); }
constexpr crossdockRemoteAction action(ncclGin_WeakSignalInc a) { return inc(kWeak, a.signal); }
constexpr crossdockRemoteAction action(ncclGin_SignalInc a) { return inc(kStrong, a.signal); }
constexpr crossdockRemoteAction action(ncclGin_StrongSignalAdd a) { return add(kStrong, a.signal, a.value); }
constexpr crossdockRemoteAction action(ncclGin_WeakSignalAdd a) { return add(kWeak, a.signal, a.value); }
constexpr crossdockRemoteAction action(ncclGin_SignalAdd a) { return add(kStrong, a.signal, a.value); }
inline crossdockRemoteAction action(ncclGin_StrongVASignalInc a) { return inc_va(kStrong, a); }
inline crossdockRemoteAction action(ncclGin_WeakVASignalInc a) { return inc_va(kWeak, a); }
inline crossdockRemoteAction action(ncclGin_VASignalInc a) { return inc_va(kStrong, a); }
inline crossdockRemoteAction action(ncclGin_StrongVASignalAdd a) { return add_va(kStrong, a); }
inline crossdockRemoteAction action(ncclGin_WeakVASignalAdd a) { return add_va(kWeak, a); }
inline crossdockRemoteAction action(ncclGin_VASignalAdd a) { return add_va(kStrong, a); }

struct Counter {
    bool is_there;
    ncclGinCounter_t counter;
};
constexpr Counter counter_of(ncclGin_None) { return {false, 0}; }
constexpr Counter counter_of(ncclGin_WeakCounterInc a) { return {true, a.counter}; }
constexpr Counter counter_of(ncclGin_CounterInc a) { return {true, a.counter}; }

}  // namespace crossdock::device

class ncclGin {
    using Location = crossdock::device::Location;

  public:
    const ncclDevComm& comm;
    uint32_t contextId;
    ncclGinResourceSharingMode resourceSharingMode;

    ncclGin(const ncclDevComm& devComm, int contextIndex,
            ncclGinResourceSharingMode mode = NCCL_GIN_RESOURCE_SHARING_GPU, Location location = Location::current())
        : comm(devComm), contextId(static_cast<uint32_t>(contextIndex)), resourceSharingMode(mode) {
        crossdockGinOpen(comm.crossdockId, contextIndex, crossdock::device::where(location));
    }

    template <typename RemoteAction = ncclGin_None, typename LocalAction = ncclGin_None, typename Coop = ncclCoopThread,
              typename DescriptorSmem = ncclGin_None, typename SegmentType = ncclGin_SegmentDevice>
    void put(ncclTeam team, int peer, ncclWindow_t dstWnd, size_t dstOffset, ncclWindow_t srcWnd, size_t srcOffset,
             size_t bytes, RemoteAction remoteAction = {}, LocalAction localAction = {}, Coop coop = {},
             DescriptorSmem = {}, cuda::thread_scope = cuda::thread_scope_thread,
             cuda::thread_scope = cuda::thread_scope_device, uint32_t = ncclGinOptFlagsDefault, SegmentType = {},
             Location location = Location::current()) const {
        crossdockPut put = posted(team, peer, remoteAction, location);
        put.target = dstWnd;
        put.target_offset = dstOffset;
        put.source = srcWnd;
        put.source_offset = srcOffset;
        put.bytes = bytes;
        put.has_counter = crossdock::device::counter_of(localAction).is_there;
        put.counter = crossdock::device::counter_of(localAction).counter;
        post(put, coop);
    }
    template <typename T, typename RemoteAction = ncclGin_None, typename LocalAction = ncclGin_None,
              typename Coop = ncclCoopThread, typename DescriptorSmem = ncclGin_None,
              typename SegmentType = ncclGin_SegmentDevice>
    void put(ncclTeam team, int peer, ncclSymPtr<T> dstElts, ncclSymPtr<T> srcElts, size_t nElts,
             RemoteAction remoteAction = {}, LocalAction localAction = {}, Coop coop = {},
             DescriptorSmem descriptor = {}, cuda::thread_scope givenRelease = cuda::thread_scope_thread,
             cuda::thread_scope requiredRelease = cuda::thread_scope_device, uint32_t optFlags = ncclGinOptFlagsDefault,
             SegmentType bufType = {}, Location location = Location::current()) const {
        put(team, peer, dstElts.window, dstElts.offset, srcElts.window, srcElts.offset, nElts * sizeof(T), remoteAction,
            localAction, coop, descriptor, givenRelease, requiredRelease, optFlags, bufType, location);
    }

    template <typename T, typename RemoteAction = ncclGin_None, typename Coop = ncclCoopThread,
              typename DescriptorSmem = ncclGin_None>
    void putValue(ncclTeam team, int peer, ncclWindow_t dstWnd, size_t dstOffset, T value,
                  RemoteAction remoteAction = {}, Coop coop = {}, DescriptorSmem = {},
                  cuda::thread_scope = cuda::thread_scope_thread, cuda::thread_scope = cuda::thread_scope_device,
                  uint32_t = ncclGinOptFlagsDefault, Location location = Location::current()) const {
        static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "putValue sends at most 8 bytes");
        crossdockPut put = posted(team, peer, remoteAction, location);
        put.target = dstWnd;
        put.target_offset = dstOffset;
        std::memcpy(&put.value, &value, sizeof(T));
        put.bytes = sizeof(T);
        post(put, coop);
    }
    template <typename T, typename RemoteAction = ncclGin_None, typename Coop = ncclCoopThread,
              typename DescriptorSmem = ncclGin_None>
    void putValue(ncclTeam team, int peer, ncclSymPtr<T> dst, T value, RemoteAction remoteAction = {}, Coop coop = {},
                  DescriptorSmem descriptor = {}, cuda::thread_scope givenRelease = cuda::thread_scope_thread,
                  cuda::thread_scope requiredRelease = cuda::thread_scope_device,
                  uint32_t optFlags = ncclGinOptFlagsDefault, Location location = Location::current()) const {
        putValue(team, peer, dst.window, dst.offset, value, remoteAction, coop, descriptor, givenRelease,
                 requiredRelease, optFlags, location);
    }

    template <typename RemoteAction, typename Coop = ncclCoopThread, typename DescriptorSmem = ncclGin_None>
    void signal(ncclTeam team, int peer, RemoteAction remoteAction, Coop coop = {}, DescriptorSmem = {},
                cuda::thread_scope = cuda::thread_scope_thread, cuda::thread_scope = cuda::thread_scope_device,
                uint32_t = ncclGinOptFlagsDefault, Location location = Location::current()) const {
        post(posted(team, peer, remoteAction, location), coop);
    }

    // Copies from the peer's window to the own one, at some time before a flush, or a wait for flushAsync, returns.
    template <typename Coop = ncclCoopThread, typename DescriptorSmem = ncclGin_None,
              typename SegmentType = ncclGin_SegmentDevice>
    void get(ncclTeam team, int peer, ncclWindow_t remoteWnd, size_t remoteOffset, ncclWindow_t localWnd,
             size_t localOffset, size_t bytes, Coop coop = {}, DescriptorSmem = {}, uint32_t = ncclGinOptFlagsDefault,
             SegmentType = {}, Location location = Location::current()) const {
        const crossdockGet get = {comm.crossdockId,
                                  static_cast<int>(contextId),
                                  crossdock::device::team_of(team),
                                  peer,
                                  remoteWnd,
                                  remoteOffset,
                                  localWnd,
                                  localOffset,
                                  bytes,
                                  crossdock::device::where(location)};
        coop.sync();
        if (coop.thread_rank() == 0) crossdockGinGet(&get);
        coop.sync();
    }

    // A request for a flush of what the calling threads know to have been posted to the peer: of whatever thread, in
    // this context. outRequest: of the group's first thread.
    template <typename Coop = ncclCoopThread, typename DescriptorSmem = ncclGin_None>
    void flushAsync(ncclTeam team, uint32_t peer, ncclGinRequest_t* outRequest, Coop coop = {},
                    uint32_t = ncclGinOptFlagsDefault, DescriptorSmem = {},
                    Location location = Location::current()) const {
        coop.sync();
        if (coop.thread_rank() == 0) {
            crossdockGinFlushAsync(comm.crossdockId, static_cast<int>(contextId), crossdock::device::team_of(team),
                                   static_cast<int>(peer), outRequest->opaque, crossdock::device::where(location));
        }
        coop.sync();
    }
    template <typename Coop = ncclCoopThread, typename DescriptorSmem = ncclGin_None>
    void wait(ncclGinRequest_t& outRequest, Coop coop = {}, DescriptorSmem = {},
              cuda::memory_order ord = cuda::memory_order_acquire, Location location = Location::current()) const {
        coop.sync();
        if (coop.thread_rank() == 0) {
            crossdockGinWaitRequest(comm.crossdockId, static_cast<int>(contextId), outRequest.opaque,
                                    crossdock::device::acquires(ord), crossdock::device::where(location));
        }
        coop.sync();
    }

    // The sources of what threads of coop have put may be reused, and what they have got is there.
    template <typename Coop, typename DescriptorSmem = ncclGin_None>
    void flush(Coop coop, cuda::memory_order = cuda::memory_order_acquire, DescriptorSmem = {},
               Location location = Location::current()) const {
        coop.sync();
        crossdockGinFlush(comm.crossdockId, static_cast<int>(contextId), crossdock::device::where(location));
        coop.sync();
    }

    uint64_t readCounter(ncclGinCounter_t counter, int bits = 56, cuda::memory_order ord = cuda::memory_order_acquire,
                         Location location = Location::current()) const {
        return read(slot(true, counter), bits, ord, location);
    }
    template <typename Coop>
    void waitCounter(Coop coop, ncclGinCounter_t counter, uint64_t least, int bits = 56,
                     cuda::memory_order ord = cuda::memory_order_acquire,
                     Location location = Location::current()) const {
        wait_for(coop, slot(true, counter), least, bits, ord, location);
    }
    void resetCounter(ncclGinCounter_t counter, Location location = Location::current()) const {
        crossdockGinReset(slot(true, counter), crossdock::device::where(location));
    }

    uint64_t readSignal(ncclGinSignal_t signal, int bits = 64, cuda::memory_order ord = cuda::memory_order_acquire,
                        Location location = Location::current()) const {
        return read(slot(false, signal), bits, ord, location);
    }
    // Until the signal, of which `bits` bits count, has reached `least`.
    template <typename Coop>
    void waitSignal(Coop coop, ncclGinSignal_t signal, uint64_t least, int bits = 64,
                    cuda::memory_order ord = cuda::memory_order_acquire,
                    Location location = Location::current()) const {
        wait_for(coop, slot(false, signal), least, bits, ord, location);
    }
    // VA signals: the own word.
    uint64_t readSignal(ncclWindow_t signalWindow, size_t signalOffset, int bits = 64,
                        cuda::memory_order ord = cuda::memory_order_acquire,
                        Location location = Location::current()) const {
        return read(slot(signalWindow, signalOffset), bits, ord, location);
    }
    template <typename Coop>
    void waitSignal(Coop coop, ncclWindow_t signalWindow, size_t signalOffset, uint64_t least, int bits = 64,
                    cuda::memory_order ord = cuda::memory_order_acquire,
                    Location location = Location::current()) const {
        wait_for(coop, slot(signalWindow, signalOffset), least, bits, ord, location);
    }
    void resetSignal(ncclWindow_t signalWindow, size_t signalOffset, Location location = Location::current()) const {
        crossdockGinReset(slot(signalWindow, signalOffset), crossdock::device::where(location));
    }
    template <typename Coop>
    void waitSignalMeetShadow(Coop coop, ncclGinSignal_t signal, int bits = 64,
                              cuda::memory_order ord = cuda::memory_order_acquire,
                              Location location = Location::current()) const {
        wait_for(coop, slot(false, signal), *getSignalShadowPtr(signal, location), bits, ord, location);
    }
    // Until the signal exceeds its shadow by leastDelta; then the shadow becomes the signal.
    template <typename Coop, typename Uint>
    void waitSignalFollowShadow(Coop coop, ncclGinSignal_t signal, Uint leastDelta, Uint* before, Uint* delta,
                                int bits = 64, cuda::memory_order ord = cuda::memory_order_acquire,
                                Location location = Location::current()) const {
        uint64_t* shadow = getSignalShadowPtr(signal, location);
        const uint64_t old_value = *shadow;
        wait_for(coop, slot(false, signal), old_value + leastDelta, bits, ord, location);
        const uint64_t new_value = read(slot(false, signal), 64, ord, location);
        coop.sync();
        if (coop.thread_rank() == 0) *shadow = new_value;
        coop.sync();
        // Every thread gives what the first one stored: the signal may have grown between two reads of it.
        *before = static_cast<Uint>(low_bits(old_value, bits));
        *delta = static_cast<Uint>(low_bits(*shadow - old_value, bits));
    }
    // Signal and shadow become 0. Not while others may still raise it.
    void resetSignal(ncclGinSignal_t signal, Location location = Location::current()) const {
        crossdockGinReset(slot(false, signal), crossdock::device::where(location));
        *getSignalShadowPtr(signal, location) = 0;
    }
    uint64_t* getSignalShadowPtr(ncclGinSignal_t signal, Location location = Location::current()) const {
        return crossdockGinShadow(slot(false, signal), crossdock::device::where(location));
    }
    void increaseSignalShadow(ncclGinSignal_t signal, uint64_t delta, Location location = Location::current()) const {
        *getSignalShadowPtr(signal, location) += delta;
    }

  private:
    static uint64_t low_bits(uint64_t value, int bits) { return value & ~uint64_t{0} >> (64 - bits); }

    crossdockSlot slot(bool is_counter, uint32_t index) const {
        return {comm.crossdockId, static_cast<int>(contextId), is_counter, index, nullptr, 0};
    }
    crossdockSlot slot(ncclWindow_t window, size_t offset) const {
        return {comm.crossdockId, static_cast<int>(contextId), false, 0, crossdock::device::not_null(window), offset};
    }
    template <typename RemoteAction>
    crossdockPut posted(ncclTeam team, int peer, RemoteAction remoteAction, Location location) const {
        crossdockPut put = {};
        put.dev_comm = comm.crossdockId;
        put.context = static_cast<int>(contextId);
        put.team = crossdock::device::team_of(team);
        put.peer = peer;
        put.remote = crossdock::device::action(remoteAction);
        put.where = crossdock::device::where(location);
        return put;
    }
    template <typename Coop>
    static void post(const crossdockPut& put, Coop coop) {
        coop.sync();
        if (coop.thread_rank() == 0) crossdockGinPut(&put);
        coop.sync();
    }
    static uint64_t read(crossdockSlot slot, int bits, cuda::memory_order ord, Location location) {
        if (bits < 1 || bits > 64) {
            crossdockTrap("a read of a number of bits that is not 1..64", crossdock::device::where(location));
        }
        return low_bits(crossdockGinRead(slot, crossdock::device::acquires(ord), crossdock::device::where(location)),
                        bits);
    }
    template <typename Coop>
    static void wait_for(Coop coop, crossdockSlot slot, uint64_t least, int bits, cuda::memory_order ord,
                         Location location) {
        coop.sync();
        if (coop.thread_rank() == 0) {
            crossdockGinWait(slot, least, bits, crossdock::device::acquires(ord), crossdock::device::where(location));
        }
        coop.sync();
    }
};
