// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/ht/combine.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

// The high-throughput combine for the type of its rows.
inline void run_ht_combine(const Ctx& ctx, const HtCombineArgs& args) {
    if (args.wire == HtWire::kMxfp8) return ht_combine<DType::kBf16, HtWire::kMxfp8>(ctx, args);
    switch (args.dtype) {
        case DType::kBf16:
            return ht_combine<DType::kBf16>(ctx, args);
        case DType::kF16:
            return ht_combine<DType::kF16>(ctx, args);
        case DType::kF32:
            return ht_combine<DType::kF32>(ctx, args);
    }
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
