// SPDX-License-Identifier: Apache-2.0
// Low-latency combine: one kernel, both halves or one of them. contract: nccl_ep.h, ncclEpCombine; protocol:
// docs/protocol.md.
#pragma once

#include "kernels/ll/combine_receive.h"
#include "kernels/ll/combine_send.h"
#include "kernels/ll/run_operation.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

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
