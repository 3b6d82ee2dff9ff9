// SPDX-License-Identifier: Apache-2.0
// Device communicators, their requirements, teams, windows and pointers, by NCCL's names and with its meanings
// (2.30.7). Functions that take a window in a kernel know the windows of the launch's communicator.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

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

// A buffer that a requirement list asks for: its place in the resource window, in 128 bytes.
typedef uint32_t ncclDevResourceHandle;
typedef ncclDevResourceHandle ncclDevResourceHandle_t;

// Multimem: loads that sum up and stores that reach all, by loops over the ranks of a team. No team: none.
struct ncclMultimemHandle {
    ncclTeam team;
};
typedef ncclMultimemHandle ncclMultimemHandle_t;

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

// What a library wants for itself, beside others: a buffer in the resource window, signals and counters of its own
// numbers. ncclDevCommCreate writes where they are.
struct ncclDevResourceRequirements {
    ncclDevResourceRequirements* next;
    size_t bufferSize, bufferAlign;
    ncclDevResourceHandle_t* outBufferHandle;
    int ginSignalCount;
    int ginCounterCount;
    ncclGinSignal_t* outGinSignalStart;
    ncclGinCounter_t* outGinCounterStart;
};
typedef ncclDevResourceRequirements ncclDevResourceRequirements_t;

// Multimem for the ranks of a team, which the LSA team contains.
struct ncclTeamRequirements {
    ncclTeamRequirements* next;
    ncclTeam_t team;
    bool multimem;
    ncclMultimemHandle_t* outMultimemHandle;
};
typedef ncclTeamRequirements ncclTeamRequirements_t;

// Counts are of this communicator; signals and counters exist once per context. Barriers: barrierCount for
// ncclBarrierSession, the others for the sessions of their own kind.
struct ncclDevCommRequirements {
    size_t size;
    unsigned int magic;
    unsigned int version;
    ncclDevResourceRequirements_t* resourceRequirementsList;
    ncclTeamRequirements_t* teamRequirementsList;
    bool lsaMultimem;
    int barrierCount;
    int lsaBarrierCount;
    int railGinBarrierCount;
    int lsaLLA2ABlockCount, lsaLLA2ASlotCount;  // must be 0: ncclLLA2ACreateRequirement
    bool ginForceEnable;                        // GIN is always there
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
#define NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER                                                                   \
    {                                                                                                            \
        sizeof(ncclDevCommRequirements), kCrossdockRequirementsMagic, 0, nullptr, nullptr, false, 0, 0, 0, 0, 0, \
            false, 4, 0, 0, NCCL_GIN_CONNECTION_NONE, false, 0, 0, 0, true, true                                 \
    }

struct ncclDevComm {
    int rank, nRanks;
    int lsaRank, lsaSize;
    uint32_t ginContextCount;
    int ginSignalCount, ginCounterCount;
    ncclLsaBarrierHandle lsaBarrier, hybridLsaBarrier;
    ncclGinBarrierHandle railGinBarrier, worldGinBarrier, hybridRailGinBarrier, hybridWorldGinBarrier;
    ncclMultimemHandle lsaMultimem;
    ncclWindow_t resourceWindow;
    void* crossdockResources;  // its memory
    uint64_t crossdockId;
};
typedef ncclDevComm ncclDevComm_t;

struct ncclCommProperties {
    size_t size;
    unsigned int magic;
    unsigned int version;
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
#define NCCL_COMM_PROPERTIES_INITIALIZER                                                                             \
    {                                                                                                                \
        sizeof(ncclCommProperties), kCrossdockRequirementsMagic, 0, 0, 0, 0, 0, false, false, NCCL_GIN_TYPE_NONE, 0, \
            false, NCCL_GIN_TYPE_NONE                                                                                \
    }

// ---- Host functions. Static, so that a program may load NCCL's library too. ----

namespace crossdock::device {

// A buffer alignment that asks for bufferSize LSA barriers instead of a buffer.
inline constexpr size_t kLsaBarriersInstead = 0xcd0c1b;

// Sums of counts and of bytes that the library refuses if one of them is negative, or all are too much.
inline int sum_of(int sum, int count) {
    if (sum < 0 || count < 0) return -1;
    return count > INT_MAX - sum ? INT_MAX : sum + count;
}
inline size_t sum_of(size_t sum, size_t bytes) {
    constexpr size_t kMost = SIZE_MAX / 4;  // leaves room for alignment
    return bytes > kMost || sum > kMost - bytes ? kMost : sum + bytes;
}
inline int clamped(int64_t count) { return static_cast<int>(std::clamp<int64_t>(count, INT_MIN, INT_MAX)); }

// Where the buffers and numbers of a requirement list begin, of which the sums are what is asked for.
struct Resources {
    size_t bytes = 0;
    int lsa_barriers = 0, signals = 0, counters = 0;
    const ncclDevResourceRequirements* misaligned = nullptr;

    // Calls take(requirement, *this) for each; then the sums contain it.
    template <typename Take>
    void add(const ncclDevResourceRequirements* list, Take take) {
        for (const auto* each = list; each != nullptr; each = each->next) {
            const size_t align = each->bufferAlign < 128 ? 128 : each->bufferAlign;
            const bool is_barrier = each->bufferAlign == kLsaBarriersInstead;
            if (!is_barrier && ((align & (align - 1)) != 0 || align > NCCL_WIN_REQUIRED_ALIGNMENT)) misaligned = each;
            if (!is_barrier) bytes = (bytes + align - 1) / align * align;
            take(*each, *this);
            if (is_barrier) {
                lsa_barriers = sum_of(lsa_barriers, static_cast<int>(each->bufferSize));
            } else {
                bytes = sum_of(bytes, each->bufferSize);
            }
            signals = sum_of(signals, each->ginSignalCount);
            counters = sum_of(counters, each->ginCounterCount);
        }
    }
};

}  // namespace crossdock::device

static inline ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const ncclDevComm_t* devComm) {
    const ncclResult_t result = crossdockDevCommDestroy(comm, devComm == nullptr ? 0 : devComm->crossdockId);
    if (result != ncclSuccess || devComm->resourceWindow == nullptr) return result;
    const ncclResult_t deregistered = crossdockCommWindowDeregister(comm, devComm->resourceWindow);
    return deregistered != ncclSuccess ? deregistered : crossdockMemFree(devComm->crossdockResources);
}

// Collective: the same requirements on every rank. NCCL_LSA_TEAM_SIZE in the environment splits the ranks of a host
// into LSA teams of that size.
static inline ncclResult_t ncclDevCommCreate(ncclComm_t comm, const ncclDevCommRequirements_t* reqs,
                                             ncclDevComm_t* outDevComm) {
    crossdockDevCommNeeds needs = {};
    const bool is_whole = reqs != nullptr && outDevComm != nullptr && reqs->size == sizeof(*reqs) &&
                          reqs->magic == kCrossdockRequirementsMagic;
    crossdock::device::Resources sums;
    if (is_whole) {
        needs = {reqs->barrierCount,         reqs->lsaBarrierCount, reqs->railGinBarrierCount,
                 reqs->worldGinBarrierCount, reqs->ginContextCount, reqs->ginSignalCount,
                 reqs->ginCounterCount,      reqs->ginQueueDepth,   static_cast<int>(reqs->ginConnectionType),
                 reqs->lsaMultimem};
        needs.no_strong_signals = !reqs->ginStrongSignalsRequired;
        needs.no_va_signals = !reqs->ginVaSignalsRequired;
        sums.add(reqs->resourceRequirementsList, [](const auto&, const auto&) {});
        needs.signals = crossdock::device::sum_of(needs.signals, sums.signals);
        needs.counters = crossdock::device::sum_of(needs.counters, sums.counters);
        needs.list_lsa_barriers = sums.lsa_barriers;
        needs.resource_bytes = sums.bytes;
        needs.bad_alignment = sums.misaligned == nullptr ? 0 : sums.misaligned->bufferAlign;
        needs.ll_a2a_blocks = reqs->lsaLLA2ABlockCount;
        needs.ll_a2a_slots = reqs->lsaLLA2ASlotCount;
        for (const auto* each = reqs->teamRequirementsList; each != nullptr; each = each->next) {
            const int64_t span = int64_t{each->team.nRanks} * each->team.stride;
            if (each->multimem) needs.max_team = std::max(needs.max_team, crossdock::device::clamped(span));
        }
    }
    crossdockDevCommView view = {};
    // Without requirements the library says what is missing.
    const ncclResult_t result = crossdockDevCommCreate(comm, is_whole ? &needs : nullptr, &view);
    if (result != ncclSuccess) return result;
    const int rails = view.rail_gin_barriers, worlds = view.world_gin_barriers, hybrids = view.hybrid_barriers;
    const ncclTeam lsa = {view.lsa_size, view.lsa_rank, 1};
    ncclDevComm made = {view.rank,
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
                        {view.multimem ? lsa : ncclTeam{}},
                        nullptr,
                        nullptr,
                        view.id};
    if (sums.bytes > 0) {
        ncclResult_t registered = crossdockMemAlloc(&made.crossdockResources, sums.bytes);
        if (registered == ncclSuccess) {
            std::memset(made.crossdockResources, 0, sums.bytes);
            registered =
                crossdockCommWindowRegister(comm, made.crossdockResources, sums.bytes, &made.resourceWindow, 0);
        }
        if (registered != ncclSuccess) {
            crossdockDevCommDestroy(comm, view.id);
            if (made.crossdockResources != nullptr) crossdockMemFree(made.crossdockResources);
            return registered;
        }
    }
    crossdock::device::Resources before;
    before.add(reqs->resourceRequirementsList, [&](const ncclDevResourceRequirements& each, const auto& at) {
        if (each.outBufferHandle != nullptr) {
            *each.outBufferHandle = each.bufferAlign == crossdock::device::kLsaBarriersInstead
                                        ? view.list_lsa_handle + static_cast<uint32_t>(at.lsa_barriers)
                                        : static_cast<uint32_t>(at.bytes / 128);
        }
        if (each.outGinSignalStart != nullptr) {
            *each.outGinSignalStart = static_cast<uint32_t>(reqs->ginSignalCount + at.signals);
        }
        if (each.outGinCounterStart != nullptr) {
            *each.outGinCounterStart = static_cast<uint32_t>(reqs->ginCounterCount + at.counters);
        }
    });
    for (const auto* each = reqs->teamRequirementsList; each != nullptr; each = each->next) {
        if (each->outMultimemHandle != nullptr) *each->outMultimemHandle = {each->multimem ? each->team : ncclTeam{}};
    }
    *outDevComm = made;
    return ncclSuccess;
}

// What sessions of a library's own need, for its requirement list. The handles are written by ncclDevCommCreate.
static inline ncclResult_t ncclLsaBarrierCreateRequirement(ncclTeam_t, int nBarriers, ncclLsaBarrierHandle_t* outHandle,
                                                           ncclDevResourceRequirements_t* outReq) {
    if (outHandle == nullptr || outReq == nullptr || nBarriers < 0) return ncclInvalidArgument;
    *outReq = {};
    *outHandle = {0, nBarriers};
    outReq->bufferSize = static_cast<size_t>(nBarriers);
    outReq->bufferAlign = crossdock::device::kLsaBarriersInstead;
    outReq->outBufferHandle = &outHandle->handle;
    return ncclSuccess;
}
static inline ncclResult_t ncclGinBarrierCreateRequirement(ncclComm_t, ncclTeam_t team, int nBarriers,
                                                           ncclGinBarrierHandle_t* outHandle,
                                                           ncclDevResourceRequirements_t* outReq) {
    if (outHandle == nullptr || outReq == nullptr || nBarriers < 0) return ncclInvalidArgument;
    *outReq = {};
    *outHandle = {0, nBarriers};
    // As DeviceComm counts for its own barriers.
    outReq->ginSignalCount = crossdock::device::clamped(int64_t{2} * nBarriers * team.nRanks);
    outReq->outGinSignalStart = &outHandle->signal0;
    return ncclSuccess;
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
    props->multimemSupport = true;
    props->ginType = props->railedGinType = static_cast<ncclGinType_t>(view.gin_type);
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

static inline int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank) {
    return crossdock::device::teams_of(comm).rank + (rank - team.rank) * team.stride;
}
static inline int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank) {
    return crossdock::device::teams_of(comm).lsa_rank + (rank - team.rank) * team.stride;
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

// A multimem pointer is the own rank's; ncclMultimem... functions and sessions know that it stands for all ranks of the
// LSA team. Code that loads or stores there by itself needs assembler on a GPU, too.
inline void* ncclGetMultimemPointer(ncclWindow_t w, size_t offset, ncclMultimemHandle mmHandle,
                                    crossdock::device::Location location = crossdock::device::Location::current()) {
    if (mmHandle.team.nRanks == 0) {
        crossdockTrap("a multimem pointer, but the device communicator was made without multimem (lsaMultimem)",
                      crossdock::device::where(location));
    }
    if (mmHandle.team.nRanks != crossdockLsaTeamSize()) {
        crossdockTrap("a multimem pointer for a part of the LSA team: use the functions that take its handle",
                      crossdock::device::where(location));
    }
    return ncclGetLocalPointer(w, offset, location);
}
inline void* ncclGetLsaMultimemPointer(ncclWindow_t w, size_t offset, const ncclDevComm& comm,
                                       crossdock::device::Location location = crossdock::device::Location::current()) {
    return ncclGetMultimemPointer(w, offset, comm.lsaMultimem, location);
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
    T* multimemPtr(ncclMultimemHandle mmHandle,
                   crossdock::device::Location location = crossdock::device::Location::current()) const {
        return static_cast<T*>(ncclGetMultimemPointer(window, offset, mmHandle, location));
    }
    T* lsaMultimemPtr(const ncclDevComm& comm,
                      crossdock::device::Location location = crossdock::device::Location::current()) const {
        return static_cast<T*>(ncclGetLsaMultimemPointer(window, offset, comm, location));
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
template <typename T>
bool operator!=(ncclSymPtr<T> a, ncclSymPtr<T> b) {
    return !(a == b);
}

// ---- Resource buffers: what a requirement list has asked for ----

inline size_t ncclGetResourceBufferOffset(ncclDevResourceHandle_t h) { return size_t{h} * 128; }
inline ncclSymPtr<char> ncclGetResourceBuffer(const ncclDevComm& comm, ncclDevResourceHandle h) {
    return {comm.resourceWindow, ncclGetResourceBufferOffset(h)};
}
inline void* ncclGetResourceBufferLocalPointer(
    const ncclDevComm& comm, ncclDevResourceHandle h,
    crossdock::device::Location location = crossdock::device::Location::current()) {
    return ncclGetResourceBuffer(comm, h).localPtr(location);
}
inline void* ncclGetResourceBufferLsaPointer(
    const ncclDevComm& comm, ncclDevResourceHandle h, int peer,
    crossdock::device::Location location = crossdock::device::Location::current()) {
    return ncclGetResourceBuffer(comm, h).lsaPtr(peer, location);
}
inline void* ncclGetResourceBufferPeerPointer(
    const ncclDevComm& comm, ncclDevResourceHandle h, ncclTeam team, int peer,
    crossdock::device::Location location = crossdock::device::Location::current()) {
    return ncclGetResourceBuffer(comm, h).peerPtr(team, peer, location);
}
inline void* ncclGetResourceBufferMultimemPointer(
    const ncclDevComm& comm, ncclDevResourceHandle h, ncclMultimemHandle mm,
    crossdock::device::Location location = crossdock::device::Location::current()) {
    return ncclGetResourceBuffer(comm, h).multimemPtr(mm, location);
}
inline void* ncclGetResourceBufferLsaMultimemPointer(
    const ncclDevComm& comm, ncclDevResourceHandle h,
    crossdock::device::Location location = crossdock::device::Location::current()) {
    return ncclGetResourceBuffer(comm, h).lsaMultimemPtr(comm, location);
}
