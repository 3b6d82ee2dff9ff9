// SPDX-License-Identifier: Apache-2.0
// GPUs without bulk copies (before sm_90): copies between global and shared memory that one lane asks for and its whole
// warp carries out. RowStage's contract lets a single lane load and store, with addresses that only this lane knows. By
// that lane alone a row would take an instruction per 16 bytes.
//
// While a lane leads (WarpLead), the other lanes wait for its requests. Lead and followers meet at warp barriers, each
// at its own place in the program, which needs the independent threads of sm_70 and later.
//
// Order: a request's copies come after all that the leading lane has read and written before, and what it does after
// the request comes after the copies of all lanes, since both are on the other side of a warp barrier. So a flag that
// it stores with a release at system scope afterwards publishes the whole row. Loads are asynchronous; a barrier in
// shared memory counts one arrival per lane when they have landed.
#pragma once

#include "device/context.h"

#if defined(__CUDACC__)

namespace crossdock {
namespace {

inline constexpr int kMostRequestingWarps = 32;  // of a block

// Addresses and sizes are multiples of 16.
class WarpRequest {
  public:
    // barrier: gets an arrival of each lane; null: the next request is a load with a barrier.
    CROSSDOCK_DEVICE static WarpRequest load(std::byte* target, const std::byte* source, uint32_t bytes,
                                             uint64_t* barrier) {
        return {reinterpret_cast<uint64_t>(source), ptx::shared_address(target), bytes,
                barrier != nullptr ? ptx::shared_address(barrier) : 0, Kind::kLoad};
    }
    // The source may be overwritten after the request.
    CROSSDOCK_DEVICE static WarpRequest store(std::byte* target, const std::byte* source, uint32_t bytes) {
        return {reinterpret_cast<uint64_t>(target), ptx::shared_address(source), bytes, 0, Kind::kStore};
    }

    // The leading lane.
    CROSSDOCK_DEVICE void make(const Ctx& ctx) const {
        of_warp(ctx) = *this;
        ctx.warp_sync();
        carry_out(ctx);
        ctx.warp_sync();
    }

    // The leading lane needs the others no longer.
    CROSSDOCK_DEVICE static WarpRequest none() { return {0, 0, 0, 0, Kind::kNone}; }

    // The other lanes: carry out requests until there is none.
    CROSSDOCK_DEVICE static void follow(const Ctx& ctx) {
        CROSSDOCK_ROLLED
        for (bool is_led = true; is_led;) {
            ctx.warp_sync();
            const WarpRequest request = of_warp(ctx);
            request.carry_out(ctx);
            is_led = request.kind_ != Kind::kNone;
            ctx.warp_sync();
        }
    }

  private:
    enum class Kind : uint32_t { kNone, kLoad, kStore };

    CROSSDOCK_DEVICE WarpRequest(uint64_t global, uint32_t shared, uint32_t bytes, uint32_t barrier, Kind kind)
        : global_(global), shared_(shared), bytes_(bytes), barrier_(barrier), kind_(kind) {}

    // Static, so that the host, which lays out the rest of shared memory, need not know of it.
    CROSSDOCK_DEVICE static WarpRequest& of_warp(const Ctx& ctx) {
        __shared__ __align__(16) unsigned char memory[kMostRequestingWarps * sizeof(WarpRequest)];
        return reinterpret_cast<WarpRequest*>(memory)[ctx.warp_idx()];
    }

    CROSSDOCK_DEVICE void carry_out(const Ctx& ctx) const {
        constexpr uint32_t kStep = kLanes * 16;
        const uint32_t own = ctx.lane() * 16;
        std::byte* const global = reinterpret_cast<std::byte*>(global_);
        if (kind_ == Kind::kLoad) {
            CROSSDOCK_ROLLED
            for (uint32_t at = own; at < bytes_; at += kStep) ptx::async_copy_16(shared_ + at, global + at);
            if (barrier_ != 0) ptx::async_copies_arrive(barrier_);
        } else if (kind_ == Kind::kStore) {
            constexpr uint32_t kAtOnce = 4;
            CROSSDOCK_ROLLED
            for (uint32_t first = own; first < bytes_; first += kAtOnce * kStep) {
                Bytes16 parts[kAtOnce];
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < kAtOnce; ++i) {
                    const uint32_t at = first + i * kStep;
                    if (at < bytes_) ptx::load_shared_16(shared_ + at, parts[i].low, parts[i].high);
                }
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < kAtOnce; ++i) {
                    const uint32_t at = first + i * kStep;
                    if (at < bytes_) *reinterpret_cast<Bytes16*>(global + at) = parts[i];
                }
            }
        }
    }

    uint64_t global_;
    uint32_t shared_;
    uint32_t bytes_;
    uint32_t barrier_;
    Kind kind_;
};

// `if (const WarpLead lead{ctx, lane}) ...`, by one warp: true for that lane, which may make requests while `lead`
// lives. The others first carry them out.
class WarpLead {
  public:
    CROSSDOCK_DEVICE WarpLead(const Ctx& ctx, int lane) : ctx_(ctx), leads_(ctx.lane() == lane) {
        if (!leads_) WarpRequest::follow(ctx);
    }
    CROSSDOCK_DEVICE ~WarpLead() {
        if (leads_) WarpRequest::none().make(ctx_);
    }
    WarpLead(const WarpLead&) = delete;
    WarpLead& operator=(const WarpLead&) = delete;
    CROSSDOCK_DEVICE explicit operator bool() const { return leads_; }

  private:
    const Ctx& ctx_;
    bool leads_;
};

// `for (WarpTurns turns(ctx, acts); turns.next();) ...`, by one warp: the lanes whose `acts` is true lead one after the
// other.
class WarpTurns {
  public:
    CROSSDOCK_DEVICE WarpTurns(const Ctx& ctx, bool acts) : ctx_(ctx), left_(ctx.warp_ballot(acts)) {}
    // True for the lane that leads; false at the end.
    CROSSDOCK_DEVICE bool next() {
        if (leads_) WarpRequest::none().make(ctx_);
        CROSSDOCK_ROLLED
        for (leads_ = false; left_ != 0 && !leads_;) {
            const int lane = __ffs(static_cast<int>(left_)) - 1;
            left_ &= left_ - 1;
            leads_ = ctx_.lane() == lane;
            if (!leads_) WarpRequest::follow(ctx_);
        }
        return leads_;
    }

  private:
    const Ctx& ctx_;
    uint32_t left_;  // lanes that have not led yet
    bool leads_ = false;
};

}  // namespace
}  // namespace crossdock

#endif
