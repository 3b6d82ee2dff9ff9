// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/ll/combine.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

// The low-latency combine for the type of its rows; CPUs choose the form of rows as they go.
inline void run_ll_combine(const Ctx& ctx, const auto& args) {
    switch (args.dtype) {
        case DType::kBf16:
            return ll_combine<DType::kBf16, RowForms::kBoth>(ctx, args);
        case DType::kF16:
            return ll_combine<DType::kF16, RowForms::kBoth>(ctx, args);
        case DType::kF32:
            return ll_combine<DType::kF32, RowForms::kBoth>(ctx, args);
    }
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
