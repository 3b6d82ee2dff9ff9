// SPDX-License-Identifier: Apache-2.0
// NCCL's sessions for small all-to-alls in an LSA team: each element carries its epoch, so no barrier is needed. A line
// of a slot is two words of 64 bits, each with half of 8 bytes of data and the epoch. Two sets of slots take turns.
//
// As NCCL's, epochs are 2 to 2^32 - 1 and then 2 again: 0, which slots begin with, is none. A block's first line keeps
// the epoch less 2 between sessions. Slots are cleared in the last epoch that uses them, so what an epoch of the same
// number has left there does not look new.
#pragma once

#include "crossdock/device/atomic.hpp"
#include "crossdock/device/coop.hpp"
#include "crossdock/device/core.hpp"

struct ncclLLA2AHandle {
    ncclDevResourceHandle_t bufHandle;
    uint32_t nSlots;
};
typedef ncclLLA2AHandle ncclLLA2AHandle_t;

static inline int ncclLLA2ACalcSlots(int maxElts, int maxEltSize) {
    return crossdock::device::clamped(maxElts * ((int64_t{maxEltSize} + 7) / 8));
}
static inline ncclResult_t ncclLLA2ACreateRequirement(int nBlocks, int nSlots, ncclLLA2AHandle_t* outHandle,
                                                      ncclDevResourceRequirements_t* outReq) {
    if (outHandle == nullptr || outReq == nullptr || nBlocks < 0 || nSlots < 0) return ncclInvalidArgument;
    *outReq = {};
    *outHandle = {0, static_cast<uint32_t>(nSlots)};
    // A block has a line for its epoch, then two sets of slots.
    const size_t lines = static_cast<size_t>(nBlocks) * (1 + 2 * static_cast<size_t>(nSlots));
    outReq->bufferSize = lines > SIZE_MAX / 16 ? SIZE_MAX : 16 * lines;
    outReq->bufferAlign = 16;
    outReq->outBufferHandle = &outHandle->bufHandle;
    return ncclSuccess;
}

template <typename Coop>
class ncclLLA2ASession {
    using Location = crossdock::device::Location;

  public:
    // maxElts: of one epoch; element e of more than 8 bytes has lines e, e + maxElts, ...
    ncclLLA2ASession(Coop coop, const ncclDevComm& comm, ncclTeam team, ncclLLA2AHandle handle, uint32_t block,
                     int maxElts, bool multimem = false, ncclMultimemHandle = {},
                     Location location = Location::current())
        : coop_(coop), comm_(comm), team_(team), handle_(handle), block_(block), pitch_(maxElts), location_(location) {
        (void)multimem;
        epoch_ = kFirstEpoch + static_cast<uint32_t>(crossdock::device::atomic_load(
                                   words(comm.lsaRank, line_of_block()), cuda::memory_order_relaxed));
    }
    ncclLLA2ASession(const ncclLLA2ASession&) = delete;
    ~ncclLLA2ASession() noexcept(false) {
        if (crossdockUnwinding()) return;
        // All have taken their epoch from here before.
        coop_.sync();
        if (coop_.thread_rank() == 0) {
            crossdock::device::atomic_store(words(comm_.lsaRank, line_of_block()), uint64_t{epoch_ - kFirstEpoch},
                                            cuda::memory_order_relaxed);
        }
        coop_.sync();
    }

    template <typename T>
    void send(int peer, int slot, T data) {
        static_assert(std::is_trivially_copyable_v<T>, "LL all-to-all sends bytes");
        require_slot<T>(slot);
        uint32_t halves[2 * kLines<T>] = {};
        std::memcpy(halves, &data, sizeof(T));
        const int lsa_peer = comm_.lsaRank + (peer - team_.rank) * team_.stride;
        for (int line = 0; line < kLines<T>; ++line) {
            uint64_t* words_of_line = words(lsa_peer, line_of_slot(slot + line * pitch_));
            for (int half = 0; half < 2; ++half) {
                const uint64_t word = uint64_t{halves[2 * line + half]} << 32 | epoch_;
                crossdock::device::atomic_store(words_of_line + half, word, cuda::memory_order_relaxed);
            }
        }
    }
    template <typename T>
    void bcast(int slot, T data) {
        for (int i = 0; i < team_.nRanks; ++i) send((team_.rank + i) % team_.nRanks, slot, data);
    }
    template <typename T>
    T recv(int slot) {
        require_slot<T>(slot);
        uint32_t halves[2 * kLines<T>];
        for (int line = 0; line < kLines<T>; ++line) {
            const uint64_t* words_of_line = words(comm_.lsaRank, line_of_slot(slot + line * pitch_));
            for (int half = 0; half < 2; ++half) {
                uint64_t word;
                do {
                    word = crossdock::device::atomic_load(words_of_line + half, cuda::memory_order_relaxed);
                } while (static_cast<uint32_t>(word) != epoch_);
                halves[2 * line + half] = static_cast<uint32_t>(word >> 32);
            }
        }
        T data;
        std::memcpy(&data, halves, sizeof(T));
        return data;
    }
    template <int MinEltCount, int MaxEltCount, typename T>
    void recvUnrolled(int eltStart, int eltCount, int eltStride, T (&vals)[MaxEltCount]) {
        for (int i = 0; i < MaxEltCount && (i < MinEltCount || i < eltCount); ++i) {
            vals[i] = recv<T>(eltStart + i * eltStride);
        }
    }
    template <int Unroll, typename Elt, typename EltToAcc, typename Reduce>
    auto recvReduce(int eltStart, int eltCount, int eltStride, EltToAcc eltToAcc, Reduce red)
        -> decltype(eltToAcc(std::declval<Elt>())) {
        using Accumulator = decltype(eltToAcc(std::declval<Elt>()));
        if (eltCount <= 0) return Accumulator();
        Accumulator sum = eltToAcc(recv<Elt>(eltStart));
        for (int i = 1; i < eltCount; ++i) sum = red(sum, eltToAcc(recv<Elt>(eltStart + i * eltStride)));
        return sum;
    }

    // Each rank has sent to each, and received from each. What was received is not sent over before the peer's next
    // element has come, which it sends after its own endEpoch.
    void endEpoch(Coop) {
        coop_.sync();
        // Two sets, so these are the last two epochs. Peers write here again after they have received from this rank in
        // the next epoch, whose elements the fence keeps behind the zeros.
        if (epoch_ >= UINT32_MAX - 1) {
            for (int slot = coop_.thread_rank(); slot < static_cast<int>(handle_.nSlots); slot += coop_.size()) {
                for (int half = 0; half < 2; ++half) {
                    crossdock::device::atomic_store(words(comm_.lsaRank, line_of_slot(slot)) + half, uint64_t{0},
                                                    cuda::memory_order_relaxed);
                }
            }
            crossdockFenceMemory(crossdockFenceSystem);
            coop_.sync();
        }
        epoch_ = epoch_ == UINT32_MAX ? kFirstEpoch : epoch_ + 1;
    }

  private:
    template <typename T>
    static constexpr int kLines = (sizeof(T) + 7) / 8;

    static constexpr uint32_t kFirstEpoch = 2;

    size_t line_of_block() const { return size_t{block_} * (1 + 2 * size_t{handle_.nSlots}); }
    size_t line_of_slot(int slot) const {
        return line_of_block() + 1 + (epoch_ & 1) * size_t{handle_.nSlots} + static_cast<size_t>(slot);
    }
    uint64_t* words(int lsa_rank, size_t line) const {
        const auto buffer = ncclGetResourceBuffer(comm_, handle_.bufHandle) + line * 16;
        return reinterpret_cast<uint64_t*>(buffer.lsaPtr(lsa_rank, location_));
    }
    template <typename T>
    void require_slot(int slot) const {
        const int64_t last = slot + int64_t{kLines<T> - 1} * pitch_;
        if (slot < 0 || pitch_ < 0 || last >= int64_t{handle_.nSlots}) {
            crossdockTrap("an LL all-to-all uses a slot that ncclLLA2ACreateRequirement has not asked for",
                          crossdock::device::where(location_));
        }
    }

    Coop coop_;
    const ncclDevComm& comm_;
    ncclTeam team_;
    ncclLLA2AHandle handle_;
    uint32_t block_;
    int pitch_;
    uint32_t epoch_;
    Location location_;
};
