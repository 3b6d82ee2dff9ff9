// SPDX-License-Identifier: Apache-2.0
// Barriers between ranks that reach each other by GIN, and barriers of both kinds. One group of threads of each rank
// uses a barrier at a time.
#pragma once

#include <new>
#include <utility>

#include "crossdock/device/gin.hpp"
#include "crossdock/device/lsa_barrier.hpp"

// What a barrier brings besides. Put: puts of the team's ranks to this one have landed. Get: what the calling threads
// have got is there.
enum ncclGinFenceLevel : uint32_t { None = 0, Put = 1u << 0, Get = 1u << 1, Relaxed = None };
constexpr ncclGinFenceLevel operator|(ncclGinFenceLevel a, ncclGinFenceLevel b) {
    return static_cast<ncclGinFenceLevel>(static_cast<uint32_t>(a) | static_cast<uint32_t>(b));
}
constexpr ncclGinFenceLevel operator&(ncclGinFenceLevel a, ncclGinFenceLevel b) {
    return static_cast<ncclGinFenceLevel>(static_cast<uint32_t>(a) & static_cast<uint32_t>(b));
}
inline constexpr ncclGinFenceLevel kCrossdockWholeFence = ncclGinFenceLevel::Put | ncclGinFenceLevel::Get;

// Instead of a gin: the fence covers the puts and gets of all contexts.
struct ncclGinAllContexts {
    const ncclDevComm& comm;
    constexpr ncclGinAllContexts(const ncclDevComm& devComm) : comm(devComm) {}
};

template <typename Coop>
class ncclGinBarrierSession {
    using Location = crossdock::device::Location;

  public:
    // The fence covers the puts of gin's context.
    ncclGinBarrierSession(Coop coop, ncclGin gin, ncclTeam team, ncclGinBarrierHandle handle, uint32_t index,
                          Location location = Location::current())
        : coop_(coop),
          gin_(gin),
          team_(team),
          strong_signal0_(handle.signal0 + index * static_cast<uint32_t>(team.nRanks)),
          weak_signal0_(strong_signal0_ + static_cast<uint32_t>(handle.nBarriers * team.nRanks)),
          use_{gin.comm.crossdockId, true, handle.signal0, index, handle.nBarriers, crossdock::device::leader_of(coop)},
          location_(location) {
        crossdockBarrierEnter(&use_, crossdock::device::where(location));
    }
    ncclGinBarrierSession(Coop coop, ncclGin gin, ncclTeamTagRail, uint32_t index,
                          Location location = Location::current())
        : ncclGinBarrierSession(coop, gin, ncclTeamRail(gin.comm), gin.comm.railGinBarrier, index, location) {}
    ncclGinBarrierSession(Coop coop, ncclGin gin, ncclTeamTagWorld, uint32_t index,
                          Location location = Location::current())
        : ncclGinBarrierSession(coop, gin, ncclTeamWorld(gin.comm), gin.comm.worldGinBarrier, index, location) {}
    ncclGinBarrierSession(Coop coop, ncclGinAllContexts all, ncclTeam team, ncclGinBarrierHandle handle, uint32_t index,
                          Location location = Location::current())
        : ncclGinBarrierSession(coop, ncclGin(all.comm, 0, NCCL_GIN_RESOURCE_SHARING_GPU, location), team, handle,
                                index, location) {
        num_contexts_ = all.comm.ginContextCount;
    }
    ncclGinBarrierSession(Coop coop, ncclGinAllContexts all, ncclTeamTagRail, uint32_t index,
                          Location location = Location::current())
        : ncclGinBarrierSession(coop, all, ncclTeamRail(all.comm), all.comm.railGinBarrier, index, location) {}
    ncclGinBarrierSession(Coop coop, ncclGinAllContexts all, ncclTeamTagWorld, uint32_t index,
                          Location location = Location::current())
        : ncclGinBarrierSession(coop, all, ncclTeamWorld(all.comm), all.comm.worldGinBarrier, index, location) {}
    ncclGinBarrierSession(const ncclGinBarrierSession&) = delete;
    ~ncclGinBarrierSession() { crossdockBarrierLeave(&use_); }

    void sync(Coop, cuda::memory_order order, ncclGinFenceLevel fence = kCrossdockWholeFence) {
        sync_until(order, fence, UINT64_MAX);
    }
    // ncclTimeout after that many cycles of clock64, for the thread that waited. The barrier cannot be used any more.
    ncclResult_t sync(Coop, cuda::memory_order order, ncclGinFenceLevel fence, uint64_t timeoutCycles) {
        const uint64_t now = crossdockClock();
        return sync_until(order, fence, timeoutCycles > UINT64_MAX - now ? UINT64_MAX : now + timeoutCycles);
    }

  private:
    ncclResult_t sync_until(cuda::memory_order order, ncclGinFenceLevel fence, uint64_t deadline_ns) {
        coop_.sync();
        const bool covers_puts = (fence & ncclGinFenceLevel::Put) != 0;
        // Weak signals overtake strong ones, so they have words of their own: one that is early must not be taken for
        // the strong signal of the barrier before.
        const ncclGinSignal_t signal0 = covers_puts ? strong_signal0_ : weak_signal0_;
        const auto own = static_cast<uint32_t>(team_.rank);
        // With the fence this rank tells itself, too: its puts to itself have landed then. All are told before the
        // first is waited for: a thread that stands for several peers would else wait for one that waits for it.
        const auto for_peers = [&](auto body) {
            for (int i = coop_.thread_rank(); i < team_.nRanks; i += coop_.size()) {
                const int peer = (team_.rank + 1 + i) % team_.nRanks;
                if (peer == team_.rank && !covers_puts) continue;
                for_contexts([&](const ncclGin& gin) { body(gin, peer); });
            }
        };
        const auto tell = [&](const ncclGin& gin, int peer, auto action) {
            gin.signal(team_, peer, action, ncclCoopThread(), ncclGin_None(), cuda::thread_scope_thread,
                       cuda::thread_scope_device, ncclGinOptFlagsDefault, location_);
        };
        for_peers([&](const ncclGin& gin, int peer) {
            if (covers_puts) {
                tell(gin, peer, ncclGin_StrongSignalInc{signal0 + own});
            } else {
                tell(gin, peer, ncclGin_WeakSignalInc{signal0 + own});
            }
        });
        bool have_come = true;
        for_peers([&](const ncclGin& gin, int peer) {
            const ncclGinSignal_t theirs = signal0 + static_cast<uint32_t>(peer);
            const uint64_t least = ++*gin.getSignalShadowPtr(theirs, location_);
            const crossdockSlot slot = {
                gin.comm.crossdockId, static_cast<int>(gin.contextId), false, theirs, nullptr, 0};
            have_come = have_come && crossdockGinWaitUntil(slot, least, 64, crossdock::device::acquires(order),
                                                           deadline_ns, crossdock::device::where(location_));
        });
        if ((fence & ncclGinFenceLevel::Get) != 0) {
            for_contexts([&](const ncclGin& gin) { gin.flush(coop_, order, ncclGin_None(), location_); });
        } else {
            coop_.sync();
        }
        return have_come ? ncclSuccess : ncclTimeout;
    }
    template <typename Body>
    void for_contexts(Body body) {
        if (num_contexts_ == 0) return body(gin_);
        for (uint32_t context = 0; context < num_contexts_; ++context) {
            body(ncclGin(gin_.comm, static_cast<int>(context), gin_.resourceSharingMode, location_));
        }
    }

    Coop coop_;
    ncclGin gin_;
    ncclTeam team_;
    ncclGinSignal_t strong_signal0_, weak_signal0_;
    crossdockBarrierUse use_;
    Location location_;
    uint32_t num_contexts_ = 0;  // 0: gin_'s only
};

namespace crossdock::device {

// A session or none: std::optional ends the program when a destructor throws, and an LSA barrier's may wait.
template <typename Session>
class Maybe {
  public:
    Maybe() = default;
    Maybe(const Maybe&) = delete;
    ~Maybe() noexcept(false) {
        if (session_ != nullptr) session_->~Session();
    }
    template <typename... Arguments>
    void emplace(Arguments&&... arguments) {
        session_ = new (memory_) Session(std::forward<Arguments>(arguments)...);
    }
    explicit operator bool() const { return session_ != nullptr; }
    Session& operator*() { return *session_; }
    Session* operator->() { return session_; }

  private:
    Session* session_ = nullptr;
    alignas(Session) std::byte memory_[sizeof(Session)];
};

}  // namespace crossdock::device

// All ranks (LSA teams inside, rails outside), or those of one kind.
template <typename Coop>
class ncclBarrierSession {
    using Location = crossdock::device::Location;

  public:
    // The teams' product: inside by loads and stores, outside by GIN.
    ncclBarrierSession(Coop coop, ncclTeam innerTeam, ncclTeam outerTeam, ncclGin gin,
                       ncclLsaBarrierHandle innerBarHandle, ncclGinBarrierHandle outerBarHandle, uint32_t index,
                       bool multimem = false, ncclMultimemHandle innerMmHandle = {},
                       Location location = Location::current()) {
        lsa_.emplace(coop, gin.comm, innerTeam, innerBarHandle, index, multimem, innerMmHandle, location);
        rail_.emplace(coop, gin, outerTeam, outerBarHandle, index, location);
    }
    ncclBarrierSession(Coop coop, ncclTeamTagWorld, ncclGin gin, uint32_t index, bool multimem = false,
                       Location location = Location::current()) {
        const ncclDevComm& comm = gin.comm;
        lsa_.emplace(coop, comm, ncclTeamLsa(comm), comm.hybridLsaBarrier, index, multimem, comm.lsaMultimem, location);
        rail_.emplace(coop, gin, ncclTeamRail(comm), comm.hybridRailGinBarrier, index, location);
        world_.emplace(coop, gin, ncclTeamWorld(comm), comm.hybridWorldGinBarrier, index, location);
    }
    ncclBarrierSession(Coop coop, ncclTeamTagLsa, const ncclDevComm& comm, uint32_t index, bool multimem = false,
                       Location location = Location::current()) {
        lsa_.emplace(coop, comm, ncclTeamLsa(comm), comm.hybridLsaBarrier, index, multimem, comm.lsaMultimem, location);
    }
    ncclBarrierSession(Coop coop, ncclTeamTagRail, ncclGin gin, uint32_t index,
                       Location location = Location::current()) {
        rail_.emplace(coop, gin, ncclTeamRail(gin.comm), gin.comm.hybridRailGinBarrier, index, location);
    }
    ncclBarrierSession(const ncclBarrierSession&) = delete;
    ~ncclBarrierSession() noexcept(false) {}

    ncclLsaBarrierSession<Coop>& lsaBarrier() { return *lsa_; }
    ncclGinBarrierSession<Coop>& ginBarrier() { return *rail_; }

    void sync(Coop coop, cuda::memory_order order, ncclGinFenceLevel fence = kCrossdockWholeFence) {
        if (world_ && (fence & ncclGinFenceLevel::Put) != 0) return world_->sync(coop, order, fence);
        if (lsa_) lsa_->sync(coop, order);
        if (rail_) rail_->sync(coop, order, fence);
    }
    ncclResult_t sync(Coop coop, cuda::memory_order order, ncclGinFenceLevel fence, uint64_t timeoutCycles) {
        if (world_ && (fence & ncclGinFenceLevel::Put) != 0) return world_->sync(coop, order, fence, timeoutCycles);
        const uint64_t start = crossdockClock();
        // The second one is entered in any case, since the group's threads do not agree on which rank was too late.
        const ncclResult_t inner = lsa_ ? lsa_->sync(coop, order, timeoutCycles) : ncclSuccess;
        const uint64_t gone = std::min(crossdockClock() - start, timeoutCycles);
        const ncclResult_t outer = rail_ ? rail_->sync(coop, order, fence, timeoutCycles - gone) : ncclSuccess;
        return inner != ncclSuccess ? inner : outer;
    }

  private:
    crossdock::device::Maybe<ncclLsaBarrierSession<Coop>> lsa_;
    crossdock::device::Maybe<ncclGinBarrierSession<Coop>> rail_;
    crossdock::device::Maybe<ncclGinBarrierSession<Coop>> world_;
};

// A session of one barrier.
template <typename Coop, typename Gin>
void ncclGinBarrier(Coop coop, Gin ginOrAllContexts, ncclTeam team, ncclGinBarrierHandle handle, uint32_t index,
                    cuda::memory_order order = cuda::memory_order_acq_rel,
                    ncclGinFenceLevel fence = kCrossdockWholeFence,
                    crossdock::device::Location location = crossdock::device::Location::current()) {
    ncclGinBarrierSession<Coop>(coop, ginOrAllContexts, team, handle, index, location).sync(coop, order, fence);
}
template <typename Coop, typename Gin, typename TeamTag>
void ncclGinBarrier(Coop coop, Gin ginOrAllContexts, TeamTag team, uint32_t index,
                    cuda::memory_order order = cuda::memory_order_acq_rel,
                    ncclGinFenceLevel fence = kCrossdockWholeFence,
                    crossdock::device::Location location = crossdock::device::Location::current()) {
    ncclGinBarrierSession<Coop>(coop, ginOrAllContexts, team, index, location).sync(coop, order, fence);
}
template <typename Coop>
void ncclBarrier(Coop coop, ncclTeamTagWorld team, ncclGin gin, uint32_t index,
                 cuda::memory_order order = cuda::memory_order_acq_rel, ncclGinFenceLevel fence = kCrossdockWholeFence,
                 bool multimem = false, crossdock::device::Location location = crossdock::device::Location::current()) {
    ncclBarrierSession<Coop>(coop, team, gin, index, multimem, location).sync(coop, order, fence);
}
template <typename Coop>
void ncclBarrier(Coop coop, ncclTeamTagRail team, ncclGin gin, uint32_t index,
                 cuda::memory_order order = cuda::memory_order_acq_rel, ncclGinFenceLevel fence = kCrossdockWholeFence,
                 crossdock::device::Location location = crossdock::device::Location::current()) {
    ncclBarrierSession<Coop>(coop, team, gin, index, location).sync(coop, order, fence);
}
