// SPDX-License-Identifier: Apache-2.0
// Low-latency dispatch: one kernel, both halves or one of them. contract: nccl_ep.h, ncclEpDispatch; protocol:
// docs/protocol.md.
#pragma once

#include "kernels/ll/dispatch_receive.h"
#include "kernels/ll/dispatch_send.h"
#include "kernels/ll/run_operation.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

CROSSDOCK_DEVICE void ll_dispatch(const Ctx& ctx, const auto& args) {
    LlOperation op(ctx, args);
    DispatchSend send(op);
    DispatchReceive receive(op);
    run_operation(op, args.common.expert_major ? 0 : args.direct, send, receive);
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
