// SPDX-License-Identifier: Apache-2.0
// NCCL's helpers that sum up and copy elements between ranks of the LSA team. The threads of the group share the
// elements out; no thread waits for another. Multimem sources and targets are loops over the LSA team.
#pragma once

#include <concepts>

#include "crossdock/device/coop.hpp"
#include "crossdock/device/core.hpp"

namespace crossdock::device {

template <typename T>
struct Sum {
    T operator()(const T& a, const T& b) const { return static_cast<T>(a + b); }
};

// For each element: target(j)[i] = the reduction of source(k)[i].
template <typename T, typename Coop, typename Source, typename Target, typename Reduce, std::integral IntCount>
void reduce_copy(Coop coop, Source source, int num_sources, Target target, int num_targets, const Reduce& reduce,
                 IntCount count) {
    // Not of the count's type, which may not hold the group's size or the index behind the last element.
    const uint64_t end = count > 0 ? static_cast<uint64_t>(count) : 0;
    for (auto i = static_cast<uint64_t>(coop.thread_rank()); i < end; i += static_cast<uint64_t>(coop.size())) {
        T value = source(0)[i];
        for (int k = 1; k < num_sources; ++k) value = reduce(value, static_cast<const T&>(source(k)[i]));
        for (int j = 0; j < num_targets; ++j) target(j)[i] = value;
    }
}

// What a multimem pointer stands for: the same place at each rank of the LSA team. pointers(k), k in
// 0..count * size - 1, of `count` multimem pointers.
template <typename T, typename Pointers>
auto at_all_ranks(Pointers pointers, Location location) {
    const int size = crossdockLsaTeamSize();
    return [=](int k) {
        size_t offset = 0;
        const ncclWindow_t window = crossdockFindWindow(pointers(k / size), &offset, where(location));
        return static_cast<T*>(ncclGetLsaPointer(window, offset, k % size, location));
    };
}
template <typename T>
auto of_team(ncclSymPtr<T> pointer, ncclTeam team, Location location) {
    return [=](int rank) { return pointer.peerPtr(team, rank, location); };
}
template <typename T>
auto only(T* pointer) {
    return [=](int) { return pointer; };
}
template <typename T>
auto strided(T* first, size_t elements) {
    return [=](int k) { return first + static_cast<size_t>(k) * elements; };
}
inline ncclTeam team_of(ncclMultimemHandle handle, Location location) {
    if (handle.team.nRanks == 0) {
        crossdockTrap("multimem, but the device communicator was made without it (lsaMultimem)", where(location));
    }
    return handle.team;
}

}  // namespace crossdock::device

// The parameters that all of the functions below end with.
#define CROSSDOCK_HERE crossdock::device::Location location = crossdock::device::Location::current()
#define CROSSDOCK_UNROLL_ELEMENTS int kUnroll = 4 * 16 / sizeof(T)

// ---- Sources and targets by functions: pointer k of as many ----

template <typename T, typename Coop, typename Src, typename Dst, typename RedOp, std::integral IntCount,
          CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceLsaCopy(Coop coop, Src src, int nSrc, Dst dst, int nDst, const RedOp& redOp, IntCount count) {
    crossdock::device::reduce_copy<T>(coop, src, nSrc, dst, nDst, redOp, count);
}
template <typename T, typename Coop, typename Src, typename Dst, typename RedOp, std::integral IntCount,
          CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceMultimemCopy(Coop coop, Src src, int nSrc, Dst dst, int nDst, const RedOp& redOp, IntCount count,
                               CROSSDOCK_HERE) {
    crossdock::device::reduce_copy<T>(coop, src, nSrc, crossdock::device::at_all_ranks<T>(dst, location),
                                      nDst * crossdockLsaTeamSize(), redOp, count);
}
template <typename T, typename Coop, typename Src, typename Dst, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSumLsaCopy(Coop coop, Src src, int nSrc, Dst dst, int nDst, IntCount count) {
    crossdock::device::reduce_copy<T>(coop, src, nSrc, dst, nDst, crossdock::device::Sum<T>(), count);
}
template <typename T, typename Coop, typename Src, typename Dst, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSumMultimemCopy(Coop coop, Src src, int nSrc, Dst dst, int nDst, IntCount count, CROSSDOCK_HERE) {
    ncclLsaReduceMultimemCopy<T>(coop, src, nSrc, dst, nDst, crossdock::device::Sum<T>(), count, location);
}
template <typename T, typename Coop, typename Src, typename Dst, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemReduceSumLsaCopy(Coop coop, Src src, int nSrc, Dst dst, int nDst, IntCount count, CROSSDOCK_HERE) {
    crossdock::device::reduce_copy<T>(coop, crossdock::device::at_all_ranks<T>(src, location),
                                      nSrc * crossdockLsaTeamSize(), dst, nDst, crossdock::device::Sum<T>(), count);
}
template <typename T, typename Coop, typename Src, typename Dst, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemReduceSumMultimemCopy(Coop coop, Src src, int nSrc, Dst dst, int nDst, IntCount count,
                                       CROSSDOCK_HERE) {
    ncclMultimemReduceSumLsaCopy<T>(coop, src, nSrc, crossdock::device::at_all_ranks<T>(dst, location),
                                    nDst * crossdockLsaTeamSize(), count, location);
}

// ---- Sums into the own memory ----

template <typename T, typename Coop, typename Src, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSum(Coop coop, Src src, int nSrc, T* dst, IntCount count) {
    ncclLsaReduceSumLsaCopy<T>(coop, src, nSrc, crossdock::device::only(dst), 1, count);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSum(Coop coop, ncclSymPtr<T> src, T* dst, IntCount count, ncclTeam team, CROSSDOCK_HERE) {
    ncclLsaReduceSum<T>(coop, crossdock::device::of_team(src, team, location), team.nRanks, dst, count);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSum(Coop coop, ncclSymPtr<T> src, T* dst, IntCount count, ncclDevComm_t comm, CROSSDOCK_HERE) {
    ncclLsaReduceSum<T>(coop, src, dst, count, ncclTeamLsa(comm), location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSum(Coop coop, ncclWindow_t window, size_t offset, T* dst, IntCount count, ncclTeam team,
                      CROSSDOCK_HERE) {
    ncclLsaReduceSum<T>(coop, ncclSymPtr<T>(window, offset), dst, count, team, location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSum(Coop coop, ncclWindow_t window, size_t offset, T* dst, IntCount count, ncclDevComm_t comm,
                      CROSSDOCK_HERE) {
    ncclLsaReduceSum<T>(coop, ncclSymPtr<T>(window, offset), dst, count, ncclTeamLsa(comm), location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemReduceSum(Coop coop, ncclSymPtr<T> src, T* dst, IntCount count, ncclMultimemHandle handle,
                           CROSSDOCK_HERE) {
    ncclLsaReduceSum<T>(coop, src, dst, count, crossdock::device::team_of(handle, location), location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemReduceSum(Coop coop, T* mcSrc, T* dst, IntCount count, CROSSDOCK_HERE) {
    ncclMultimemReduceSumLsaCopy<T>(coop, crossdock::device::only(mcSrc), 1, crossdock::device::only(dst), 1, count,
                                    location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemReduceSum(Coop coop, ncclWindow_t window, size_t offset, T* dst, IntCount count,
                           ncclMultimemHandle handle, CROSSDOCK_HERE) {
    ncclMultimemReduceSum<T>(coop, ncclSymPtr<T>(window, offset), dst, count, handle, location);
}
template <typename T, typename Coop, typename Src, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLocalReduceSum(Coop coop, Src src, int nSrc, T* dst, IntCount count) {
    ncclLsaReduceSum<T>(coop, src, nSrc, dst, count);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLocalReduceSum(Coop coop, int nSrc, T* base, size_t displ, T* dst, IntCount count) {
    ncclLsaReduceSum<T>(coop, crossdock::device::strided(base, displ), nSrc, dst, count);
}

// ---- Copies of the own memory to several places ----

template <typename T, typename Coop, typename Dst, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaCopy(Coop coop, T* src, Dst dst, int nDst, IntCount count) {
    ncclLsaReduceSumLsaCopy<T>(coop, crossdock::device::only(src), 1, dst, nDst, count);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaCopy(Coop coop, T* src, ncclSymPtr<T> dst, IntCount count, ncclTeam team, CROSSDOCK_HERE) {
    ncclLsaCopy<T>(coop, src, crossdock::device::of_team(dst, team, location), team.nRanks, count);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaCopy(Coop coop, T* src, ncclSymPtr<T> dst, IntCount count, ncclDevComm_t comm, CROSSDOCK_HERE) {
    ncclLsaCopy<T>(coop, src, dst, count, ncclTeamLsa(comm), location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaCopy(Coop coop, T* src, ncclWindow_t window, size_t offset, IntCount count, ncclTeam team, CROSSDOCK_HERE) {
    ncclLsaCopy<T>(coop, src, ncclSymPtr<T>(window, offset), count, team, location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaCopy(Coop coop, T* src, ncclWindow_t window, size_t offset, IntCount count, ncclDevComm_t comm,
                 CROSSDOCK_HERE) {
    ncclLsaCopy<T>(coop, src, ncclSymPtr<T>(window, offset), count, ncclTeamLsa(comm), location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemCopy(Coop coop, T* src, ncclSymPtr<T> dst, IntCount count, ncclMultimemHandle handle, CROSSDOCK_HERE) {
    ncclLsaCopy<T>(coop, src, dst, count, crossdock::device::team_of(handle, location), location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemCopy(Coop coop, T* src, T* mcDst, IntCount count, CROSSDOCK_HERE) {
    ncclLsaReduceSumMultimemCopy<T>(coop, crossdock::device::only(src), 1, crossdock::device::only(mcDst), 1, count,
                                    location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemCopy(Coop coop, T* src, ncclWindow_t window, size_t offset, IntCount count, ncclMultimemHandle handle,
                      CROSSDOCK_HERE) {
    ncclMultimemCopy<T>(coop, src, ncclSymPtr<T>(window, offset), count, handle, location);
}
template <typename T, typename Coop, typename Dst, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLocalCopy(Coop coop, T* src, Dst dst, int nDst, IntCount count) {
    ncclLsaCopy<T>(coop, src, dst, nDst, count);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLocalCopy(Coop coop, T* src, int nDst, T* base, size_t displ, IntCount count) {
    ncclLsaCopy<T>(coop, src, crossdock::device::strided(base, displ), nDst, count);
}

// ---- Sums to several places ----

template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSumCopy(Coop coop, ncclSymPtr<T> src, ncclTeam srcTeam, ncclSymPtr<T> dst, ncclTeam dstTeam,
                          IntCount count, CROSSDOCK_HERE) {
    ncclLsaReduceSumLsaCopy<T>(coop, crossdock::device::of_team(src, srcTeam, location), srcTeam.nRanks,
                               crossdock::device::of_team(dst, dstTeam, location), dstTeam.nRanks, count);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSumCopy(Coop coop, ncclSymPtr<T> src, ncclSymPtr<T> dst, IntCount count, ncclTeam team,
                          CROSSDOCK_HERE) {
    ncclLsaReduceSumCopy<T>(coop, src, team, dst, team, count, location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSumCopy(Coop coop, ncclSymPtr<T> src, ncclSymPtr<T> dst, IntCount count, ncclDevComm_t comm,
                          CROSSDOCK_HERE) {
    ncclLsaReduceSumCopy<T>(coop, src, dst, count, ncclTeamLsa(comm), location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSumCopy(Coop coop, ncclWindow_t srcWindow, size_t srcOffset, ncclWindow_t dstWindow, size_t dstOffset,
                          IntCount count, ncclTeam team, CROSSDOCK_HERE) {
    ncclLsaReduceSumCopy<T>(coop, ncclSymPtr<T>(srcWindow, srcOffset), ncclSymPtr<T>(dstWindow, dstOffset), count, team,
                            location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSumCopy(Coop coop, ncclWindow_t srcWindow, size_t srcOffset, ncclWindow_t dstWindow, size_t dstOffset,
                          IntCount count, ncclDevComm_t comm, CROSSDOCK_HERE) {
    ncclLsaReduceSumCopy<T>(coop, srcWindow, srcOffset, dstWindow, dstOffset, count, ncclTeamLsa(comm), location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemReduceSumCopy(Coop coop, ncclSymPtr<T> src, ncclMultimemHandle srcHandle, ncclSymPtr<T> dst,
                               ncclMultimemHandle dstHandle, IntCount count, CROSSDOCK_HERE) {
    ncclLsaReduceSumCopy<T>(coop, src, crossdock::device::team_of(srcHandle, location), dst,
                            crossdock::device::team_of(dstHandle, location), count, location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemReduceSumCopy(Coop coop, T* mcSrc, T* mcDst, IntCount count, CROSSDOCK_HERE) {
    ncclMultimemReduceSumMultimemCopy<T>(coop, crossdock::device::only(mcSrc), 1, crossdock::device::only(mcDst), 1,
                                         count, location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemReduceSumCopy(Coop coop, ncclWindow_t srcWindow, size_t srcOffset, ncclMultimemHandle srcHandle,
                               ncclWindow_t dstWindow, size_t dstOffset, ncclMultimemHandle dstHandle, IntCount count,
                               CROSSDOCK_HERE) {
    ncclMultimemReduceSumCopy<T>(coop, ncclSymPtr<T>(srcWindow, srcOffset), srcHandle,
                                 ncclSymPtr<T>(dstWindow, dstOffset), dstHandle, count, location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSumMultimemCopy(Coop coop, ncclSymPtr<T> src, ncclTeam srcTeam, ncclSymPtr<T> dst,
                                  ncclMultimemHandle dstHandle, IntCount count, CROSSDOCK_HERE) {
    ncclLsaReduceSumCopy<T>(coop, src, srcTeam, dst, crossdock::device::team_of(dstHandle, location), count, location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLsaReduceSumMultimemCopy(Coop coop, ncclSymPtr<T> src, ncclTeam srcTeam, T* mcDst, IntCount count,
                                  CROSSDOCK_HERE) {
    ncclLsaReduceSumMultimemCopy<T>(coop, crossdock::device::of_team(src, srcTeam, location), srcTeam.nRanks,
                                    crossdock::device::only(mcDst), 1, count, location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemReduceSumLsaCopy(Coop coop, ncclSymPtr<T> src, ncclMultimemHandle srcHandle, ncclSymPtr<T> dst,
                                  ncclTeam dstTeam, IntCount count, CROSSDOCK_HERE) {
    ncclLsaReduceSumCopy<T>(coop, src, crossdock::device::team_of(srcHandle, location), dst, dstTeam, count, location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclMultimemReduceSumLsaCopy(Coop coop, T* mcSrc, ncclSymPtr<T> dst, ncclTeam dstTeam, IntCount count,
                                  CROSSDOCK_HERE) {
    ncclMultimemReduceSumLsaCopy<T>(coop, crossdock::device::only(mcSrc), 1,
                                    crossdock::device::of_team(dst, dstTeam, location), dstTeam.nRanks, count,
                                    location);
}
template <typename T, typename Coop, std::integral IntCount, CROSSDOCK_UNROLL_ELEMENTS>
void ncclLocalReduceSumCopy(Coop coop, int nSrc, T* srcBase, size_t srcDispl, int nDst, T* dstBase, size_t dstDispl,
                            IntCount count) {
    ncclLsaReduceSumLsaCopy<T>(coop, crossdock::device::strided(srcBase, srcDispl), nSrc,
                               crossdock::device::strided(dstBase, dstDispl), nDst, count);
}

#undef CROSSDOCK_UNROLL_ELEMENTS
#undef CROSSDOCK_HERE
