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
                          uint32_t index, bool /*multimem*/ = false, Location location = Location::current())
        : coop_(coop),
          team_(team),
          lsa_rank_(comm.lsaRank),
          use_{comm.crossdockId, false, handle.handle, index, handle.nBarriers, crossdock::device::leader_of(coop)},
          location_(location) {
        crossdockBarrierEnter(&use_, crossdock::device::where(location));
    }
    ncclLsaBarrierSession(Coop coop, const ncclDevComm& comm, ncclTeamTagLsa, uint32_t index, bool multimem = false,
                          Location location = Location::current())
        : ncclLsaBarrierSession(coop, comm, ncclTeamLsa(comm), comm.lsaBarrier, index, multimem, location) {}
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

  private:
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
