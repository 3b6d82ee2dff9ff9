// SPDX-License-Identifier: Apache-2.0
// Device communicators, their requirements, teams, windows and pointers, by NCCL's names and with its meanings
// (2.30.7). Functions that take a window in a kernel know the windows of the launch's communicator.
#pragma once

#include "crossdock.h"
#include "crossdock/device/words.hpp"

struct ncclTeam {
    int nRanks, rank, stride;
};
typedef ncclTeam ncclTeam_t;
struct ncclTeamTagWorld {};
struct ncclTeamTagLsa {};
struct ncclTeamTagRail {};

typedef uint32_t ncclGinSignal_t;
typedef uint32_t ncclGinCounter_t;
typedef struct {
    uint64_t opaque[2];
} ncclGinRequest_t;

struct ncclLsaBarrierHandle {
    uint32_t handle;
    int nBarriers;
};
typedef ncclLsaBarrierHandle ncclLsaBarrierHandle_t;
struct ncclGinBarrierHandle {
    ncclGinSignal_t signal0;
    int nBarriers;
};
typedef ncclGinBarrierHandle ncclGinBarrierHandle_t;

typedef enum {
    NCCL_GIN_CONNECTION_NONE,
    NCCL_GIN_CONNECTION_FULL,
    NCCL_GIN_CONNECTION_RAIL,
} ncclGinConnectionType_t;

typedef enum {
    NCCL_GIN_TYPE_NONE = 0,
    NCCL_GIN_TYPE_PROXY = 2,
    NCCL_GIN_TYPE_GDAKI = 3,
    NCCL_GIN_TYPE_GPI = 4,
} ncclGinType_t;

// Counts are of this communicator; signals and counters exist once per context. Barriers: barrierCount for
// ncclBarrierSession, the others for the sessions of their own kind.
struct ncclDevCommRequirements {
    size_t size;
    unsigned int magic;
    bool lsaMultimem;  // not there on CPUs: true is refused
    int barrierCount;
    int lsaBarrierCount;
    int railGinBarrierCount;
    bool ginForceEnable;  // GIN is always there
    int ginContextCount;
    int ginSignalCount;
    int ginCounterCount;
    ncclGinConnectionType_t ginConnectionType;
    bool ginExclusiveContexts;
    int ginQueueDepth;
    int ginTrafficClass;
    int worldGinBarrierCount;
    bool ginStrongSignalsRequired;
    bool ginVaSignalsRequired;
};
typedef ncclDevCommRequirements ncclDevCommRequirements_t;
inline constexpr unsigned kCrossdockRequirementsMagic = 0xcd0c6e72;
#define NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER                                                        \
    {                                                                                                 \
        sizeof(ncclDevCommRequirements), kCrossdockRequirementsMagic, false, 0, 0, 0, false, 4, 0, 0, \
            NCCL_GIN_CONNECTION_NONE, false, 0, 0, 0, true, true                                      \
    }

struct ncclDevComm {
    int rank, nRanks;
    int lsaRank, lsaSize;
    uint32_t ginContextCount;
    int ginSignalCount, ginCounterCount;
    ncclLsaBarrierHandle lsaBarrier, hybridLsaBarrier;
    ncclGinBarrierHandle railGinBarrier, worldGinBarrier, hybridRailGinBarrier, hybridWorldGinBarrier;
    uint64_t crossdockId;
};
typedef ncclDevComm ncclDevComm_t;

struct ncclCommProperties {
    size_t size;
    unsigned int magic;
    int rank;
    int nRanks;
    int cudaDev;
    int nvmlDev;
    bool deviceApiSupport;
    bool multimemSupport;
    ncclGinType_t ginType;
    int nLsaTeams;
    bool hostRmaSupport;
    ncclGinType_t railedGinType;
};
typedef ncclCommProperties ncclCommProperties_t;
#define NCCL_COMM_PROPERTIES_INITIALIZER                                                                          \
    {                                                                                                             \
        sizeof(ncclCommProperties), kCrossdockRequirementsMagic, 0, 0, 0, 0, false, false, NCCL_GIN_TYPE_NONE, 0, \
            false, NCCL_GIN_TYPE_NONE                                                                             \
    }

// ---- Host functions. Static, so that a program may load NCCL's library too. ----

// Collective: the same requirements on every rank. NCCL_LSA_TEAM_SIZE in the environment splits the ranks of a host
// into LSA teams of that size.
static inline ncclResult_t ncclDevCommCreate(ncclComm_t comm, const ncclDevCommRequirements_t* reqs,
                                             ncclDevComm_t* outDevComm) {
    crossdockDevCommNeeds needs = {};
    const bool is_whole = reqs != nullptr && outDevComm != nullptr && reqs->size == sizeof(*reqs) &&
                          reqs->magic == kCrossdockRequirementsMagic;
    if (is_whole) {
        needs = {reqs->barrierCount,        reqs->lsaBarrierCount,
                 reqs->railGinBarrierCount, reqs->worldGinBarrierCount,
                 reqs->ginContextCount,     reqs->ginSignalCount,
                 reqs->ginCounterCount,     static_cast<int>(reqs->ginConnectionType),
                 reqs->lsaMultimem};
        needs.no_strong_signals = !reqs->ginStrongSignalsRequired;
        needs.no_va_signals = !reqs->ginVaSignalsRequired;
    }
    crossdockDevCommView view = {};
    // Without requirements the library says what is missing.
    const ncclResult_t result = crossdockDevCommCreate(comm, is_whole ? &needs : nullptr, &view);
    if (result != ncclSuccess) return result;
    const int rails = view.rail_gin_barriers, worlds = view.world_gin_barriers, hybrids = view.hybrid_barriers;
    *outDevComm = {view.rank,
                   view.num_ranks,
                   view.lsa_rank,
                   view.lsa_size,
                   static_cast<uint32_t>(view.num_contexts),
                   view.num_signals,
                   view.num_counters,
                   {view.lsa_handle, view.lsa_barriers},
                   {view.hybrid_lsa_handle, hybrids},
                   {view.rail_signal0, rails},
                   {view.world_signal0, worlds},
                   {view.hybrid_rail_signal0, hybrids},
                   {view.hybrid_world_signal0, hybrids},
                   view.id};
    return ncclSuccess;
}
static inline ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const ncclDevComm_t* devComm) {
    return crossdockDevCommDestroy(comm, devComm == nullptr ? 0 : devComm->crossdockId);
}

static inline ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t* props) {
    crossdockDevCommView view = {};
    if (props == nullptr) return ncclInvalidArgument;
    const ncclResult_t result = crossdockDevCommTeams(comm, &view);
    if (result != ncclSuccess) return result;
    props->rank = view.rank;
    props->nRanks = view.num_ranks;
    props->cudaDev = props->nvmlDev = -1;
    props->deviceApiSupport = true;
    props->multimemSupport = false;
    props->ginType = props->railedGinType = NCCL_GIN_TYPE_GPI;
    props->nLsaTeams = view.num_ranks / view.lsa_size;
    props->hostRmaSupport = false;
    return ncclSuccess;
}

static inline ncclResult_t ncclMemAlloc(void** ptr, size_t size) { return crossdockMemAlloc(ptr, size); }
static inline ncclResult_t ncclMemFree(void* ptr) { return crossdockMemFree(ptr); }
static inline ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                                                  int winFlags) {
    return crossdockCommWindowRegister(comm, buff, size, win, winFlags & ~NCCL_WIN_COLL_SYMMETRIC);
}
static inline ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
    return crossdockCommWindowDeregister(comm, win);
}
static inline ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) { return crossdockCommUserRank(comm, rank); }
static inline ncclResult_t ncclCommCount(ncclComm_t comm, int* count) { return crossdockCommCount(comm, count); }
static inline ncclResult_t ncclCommDestroy(ncclComm_t comm) { return crossdockCommDestroy(comm); }
static inline const char* ncclGetLastError(ncclComm_t) { return crossdockGetLastError(); }

// ---- Teams ----

inline ncclTeam ncclTeamWorld(const ncclDevComm& comm) { return {comm.nRanks, comm.rank, 1}; }
inline ncclTeam ncclTeamLsa(const ncclDevComm& comm) { return {comm.lsaSize, comm.lsaRank, 1}; }
inline ncclTeam ncclTeamRail(const ncclDevComm& comm) {
    return {comm.nRanks / comm.lsaSize, comm.rank / comm.lsaSize, comm.lsaSize};
}
namespace crossdock::device {
inline crossdockDevCommView teams_of(ncclComm_t comm) {
    crossdockDevCommView view = {};
    view.lsa_size = 1;
    crossdockDevCommTeams(comm, &view);
    return view;
}
}  // namespace crossdock::device
static inline ncclTeam_t ncclTeamWorld(ncclComm_t comm) {
    const crossdockDevCommView view = crossdock::device::teams_of(comm);
    return {view.num_ranks, view.rank, 1};
}
static inline ncclTeam_t ncclTeamLsa(ncclComm_t comm) {
    const crossdockDevCommView view = crossdock::device::teams_of(comm);
    return {view.lsa_size, view.lsa_rank, 1};
}
static inline ncclTeam_t ncclTeamRail(ncclComm_t comm) {
    const crossdockDevCommView view = crossdock::device::teams_of(comm);
    return {view.num_ranks / view.lsa_size, view.rank / view.lsa_size, view.lsa_size};
}

// Which rank of team a is rank bPeer of team b? Both teams contain the calling rank.
inline bool ncclTeamRankIsMember(ncclTeam_t a, ncclTeam_t b, int bPeer) {
    const int distance = (bPeer - b.rank) * b.stride;
    if (distance % a.stride != 0) return false;
    const int rank = a.rank + distance / a.stride;
    return rank >= 0 && rank < a.nRanks;
}
inline int ncclTeamRankToTeam(ncclTeam_t a, ncclTeam_t b, int bPeer) {
    return a.rank + (bPeer - b.rank) * b.stride / a.stride;
}
inline int ncclTeamRankToWorld(const ncclDevComm& comm, ncclTeam team, int rank) {
    return comm.rank + (rank - team.rank) * team.stride;
}
inline int ncclTeamRankToLsa(const ncclDevComm& comm, ncclTeam team, int rank) {
    return comm.lsaRank + (rank - team.rank) * team.stride;
}
inline ncclTeam_t ncclTeamInnerFactor(ncclTeam_t parent, int innerSize) {
    return {innerSize, parent.rank % innerSize, parent.stride};
}
inline ncclTeam_t ncclTeamOuterFactor(ncclTeam_t parent, int innerSize) {
    return {parent.nRanks / innerSize, parent.rank / innerSize, parent.stride * innerSize};
}
// The index-th rank of parent that is not in subset.
inline int ncclTeamRankInDifference(ncclTeam_t parent, ncclTeam_t subset, int index) {
    for (int rank = 0; rank < parent.nRanks; ++rank) {
        if (ncclTeamRankIsMember(subset, parent, rank)) continue;
        if (index-- == 0) return rank;
    }
    return -1;
}

// ---- Pointers ----

namespace crossdock::device {
inline crossdockTeam team_of(ncclTeam team) { return {team.nRanks, team.rank, team.stride}; }
}  // namespace crossdock::device

inline void* ncclGetLocalPointer(ncclWindow_t w, size_t offset,
                                 crossdock::device::Location location = crossdock::device::Location::current()) {
    return crossdockWindowPointer(w, offset, crossdockPointerLocal, {}, 0, crossdock::device::where(location));
}
// peer: a rank of the LSA team.
inline void* ncclGetLsaPointer(ncclWindow_t w, size_t offset, int peer,
                               crossdock::device::Location location = crossdock::device::Location::current()) {
    return crossdockWindowPointer(w, offset, crossdockPointerLsa, {}, peer, crossdock::device::where(location));
}
// peer: a rank of the world, which the LSA team contains.
inline void* ncclGetPeerPointer(ncclWindow_t w, size_t offset, int peer,
                                crossdock::device::Location location = crossdock::device::Location::current()) {
    return crossdockWindowPointer(w, offset, crossdockPointerWorld, {}, peer, crossdock::device::where(location));
}
inline void* ncclGetPeerPointer(ncclWindow_t w, size_t offset, ncclTeam team, int peer,
                                crossdock::device::Location location = crossdock::device::Location::current()) {
    return crossdockWindowPointer(w, offset, crossdockPointerTeam, crossdock::device::team_of(team), peer,
                                  crossdock::device::where(location));
}

template <typename T>
struct ncclSymPtr {
    using ElementType = T;
    ncclWindow_t window;
    size_t offset;

    constexpr ncclSymPtr(ncclWindow_t w = nullptr, size_t o = 0) : window(w), offset(o) {}
    template <typename U>
    operator ncclSymPtr<U>() const {
        return {window, offset};
    }
    template <typename Int>
    ncclSymPtr& operator+=(Int elements) {
        offset += static_cast<size_t>(static_cast<ptrdiff_t>(elements)) * sizeof(T);
        return *this;
    }
    template <typename Int>
    ncclSymPtr& operator-=(Int elements) {
        offset -= static_cast<size_t>(static_cast<ptrdiff_t>(elements)) * sizeof(T);
        return *this;
    }
    T* localPtr(crossdock::device::Location location = crossdock::device::Location::current()) const {
        return static_cast<T*>(ncclGetLocalPointer(window, offset, location));
    }
    T* lsaPtr(int peer, crossdock::device::Location location = crossdock::device::Location::current()) const {
        return static_cast<T*>(ncclGetLsaPointer(window, offset, peer, location));
    }
    T* peerPtr(int peer, crossdock::device::Location location = crossdock::device::Location::current()) const {
        return static_cast<T*>(ncclGetPeerPointer(window, offset, peer, location));
    }
    T* peerPtr(ncclTeam team, int peer,
               crossdock::device::Location location = crossdock::device::Location::current()) const {
        return static_cast<T*>(ncclGetPeerPointer(window, offset, team, peer, location));
    }
};
template <typename T, typename Int>
ncclSymPtr<T> operator+(ncclSymPtr<T> p, Int elements) {
    return p += elements;
}
template <typename T, typename Int>
ncclSymPtr<T> operator-(ncclSymPtr<T> p, Int elements) {
    return p -= elements;
}
template <typename T>
ptrdiff_t operator-(ncclSymPtr<T> a, ncclSymPtr<T> b) {
    return (static_cast<ptrdiff_t>(a.offset) - static_cast<ptrdiff_t>(b.offset)) / static_cast<ptrdiff_t>(sizeof(T));
}
template <typename T>
bool operator==(ncclSymPtr<T> a, ncclSymPtr<T> b) {
    return a.window == b.window && a.offset == b.offset;
}
