// SPDX-License-Identifier: Apache-2.0
// What the kernels of dispatch and combine do, in which order; what each step means is the halves' matter. As much as
// possible happens before the operation is known, so that little is left when it is.
#pragma once

#include "kernels/ll/gin_peers.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

// Steps of the halves: init needs nothing, fetch what earlier kernels have written, start what this block has counted,
// run the operation's epoch and buffer.
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
    if (op.sends()) send.start();
    const bool runs = op.begin();
    ctx.mark(send.kSteps.head);
    if (runs) receive.start();
    if (runs && op.sends()) send.run();
    if (runs && op.cancels()) await_stragglers(op);
    if (!runs && op.sends()) send.abandon();
    op.receive_for_good(runs, [&](const WorkShare& share, bool is_first) { receive.run(share, is_first); });
    ctx.mark(send.kSteps.end);
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
