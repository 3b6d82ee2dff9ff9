// SPDX-License-Identifier: Apache-2.0
// Barriers between groups of threads of the ranks of an LSA team. One group of each rank uses a barrier at a time.
#pragma once

#include "crossdock/device/atomic.hpp"
#include "crossdock/device/coop.hpp"
#include "crossdock/device/core.hpp"

template <typename Coop>
class ncclLsaBarrierSession {
    using Location = crossdock::device::Location;

  public:
    ncclLsaBarrierSession(Coop coop, const ncclDevComm& comm, ncclTeam team, ncclLsaBarrierHandle handle,
                          uint32_t index, bool /*multimem*/ = false, ncclMultimemHandle = {},
                          Location location = Location::current())
        : coop_(coop),
          team_(team),
          lsa_rank_(comm.lsaRank),
          use_{comm.crossdockId, false, handle.handle, index, handle.nBarriers, crossdock::device::leader_of(coop)},
          location_(location) {
        crossdockBarrierEnter(&use_, crossdock::device::where(location));
    }
    ncclLsaBarrierSession(Coop coop, const ncclDevComm& comm, ncclTeamTagLsa, uint32_t index, bool multimem = false,
                          Location location = Location::current())
        : ncclLsaBarrierSession(coop, comm, ncclTeamLsa(comm), comm.lsaBarrier, index, multimem, comm.lsaMultimem,
                                location) {}
    ncclLsaBarrierSession(const ncclLsaBarrierSession&) = delete;
    ~ncclLsaBarrierSession() noexcept(false) {
        crossdockBarrierLeave(&use_);
        if (!crossdockUnwinding()) coop_.sync();
    }

    void arrive(Coop, cuda::memory_order order) {
        coop_.sync();
        for_peers([&](int peer) {
            crossdockLsaArrive(&use_, peer, crossdock::device::releases(order), crossdock::device::where(location_));
        });
    }
    void wait(Coop, cuda::memory_order order) {
        for_peers([&](int peer) {
            crossdockLsaWait(&use_, peer, crossdock::device::acquires(order), crossdock::device::where(location_));
        });
        coop_.sync();
    }
    void sync(Coop coop, cuda::memory_order order) {
        arrive(coop, order);
        wait(coop, order);
    }
    // ncclTimeout after that many cycles of clock64. The wait may be repeated.
    ncclResult_t wait(Coop coop, cuda::memory_order order, uint64_t timeoutCycles) {
        const uint64_t now = crossdockClock();
        return wait_until(coop, order, timeoutCycles > UINT64_MAX - now ? UINT64_MAX : now + timeoutCycles);
    }
    ncclResult_t sync(Coop coop, cuda::memory_order order, uint64_t timeoutCycles) {
        arrive(coop, order);
        return wait(coop, order, timeoutCycles);
    }

  private:
    ncclResult_t wait_until(Coop, cuda::memory_order order, uint64_t deadline_ns) {
        bool have_come = true;
        for_peers([&](int peer) {
            have_come = have_come && crossdockLsaWaitUntil(&use_, peer, crossdock::device::acquires(order), deadline_ns,
                                                           crossdock::device::where(location_));
        });
        if (have_come) {
            for_peers([&](int peer) { crossdockLsaWait(&use_, peer, false, crossdock::device::where(location_)); });
        }
        coop_.sync();
        return have_come ? ncclSuccess : ncclTimeout;
    }
    template <typename Body>
    void for_peers(Body body) {
        for (int i = coop_.thread_rank(); i < team_.nRanks; i += coop_.size()) {
            if (i != team_.rank) body(lsa_rank_ + (i - team_.rank) * team_.stride);
        }
    }

    Coop coop_;
    ncclTeam team_;
    int lsa_rank_;
    crossdockBarrierUse use_;
    Location location_;
};
