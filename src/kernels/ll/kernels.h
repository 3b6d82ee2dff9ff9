// SPDX-License-Identifier: Apache-2.0
// The low-latency kernels: dispatch and combine, each with both halves or one of them, by the same steps. As much as
// possible happens before the operation is known, so that little is left when it is. contract: nccl_ep.h,
// ncclEpDispatch and ncclEpCombine; protocol: docs/protocol.md.
#pragma once

#include <type_traits>

#include "kernels/ll/combine_receive.h"
#include "kernels/ll/combine_send.h"
#include "kernels/ll/dispatch_receive.h"
#include "kernels/ll/dispatch_send.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

// The halves' steps: init needs nothing; fetch looks up what earlier kernels have written, prepare adds to it before
// the block's barrier. run begins the operation, by which epoch and buffer are known, when all that needs neither is on
// its way, and does the work, unless the operation does not run; look_ahead asks for what will be needed soon.
CROSSDOCK_DEVICE void run_operation(auto& op, uint32_t direct, auto& send, auto& receive) {
    const Ctx& ctx = op.ctx;
    ctx.mark(send.kSteps.begin);
    send.init();
    op.look_up();
    ctx.wait_for_previous_kernels();
    ctx.mark(send.kSteps.ready);
    receive.fetch();
    if (op.sends()) send.fetch();
    op.enter(direct);
    if (op.sends()) send.prepare();
    ctx.block_sync();
    const auto begin = [&] {
        const bool runs = op.begin();
        ctx.mark(send.kSteps.head);
        if (runs) receive.look_ahead();
        return runs;
    };
    const bool runs = op.sends() ? send.run(begin) : begin();
    if (runs && op.cancels()) await_stragglers(op);
    op.receive_for_good(runs, [&](const WorkShare& share, bool is_first) { receive.run(share, is_first); });
    ctx.mark(send.kSteps.end);
}

CROSSDOCK_DEVICE void ll_dispatch(const Ctx& ctx, const auto& args) {
    LlOperation op(ctx, args);
    DispatchSend send(op);
    DispatchReceive receive(op);
    run_operation(op, args.common.expert_major ? 0 : args.direct, send, receive);
}

template <DType kDType, RowForms kForms>
CROSSDOCK_DEVICE void ll_combine(const Ctx& ctx, const auto& args) {
    using Op = LlOperation<std::remove_cvref_t<decltype(args)>>;
    Op op(ctx, args);
    CombineSend<kDType, kForms, Op> send(op);
    CombineReceive<kDType, kForms, Op> receive(op);
    run_operation(op, 0, send, receive);
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
