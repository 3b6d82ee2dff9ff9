// SPDX-License-Identifier: Apache-2.0
// What options are called in reports.
#include "bench/options.h"

namespace crossdock::bench {

const char* operation_name(Operation operation) {
    switch (operation) {
        case Operation::kUpdate:
            return "update";
        case Operation::kDispatch:
            return "dispatch";
        case Operation::kCombine:
            return "combine";
        case Operation::kPair:
            return "pair";
    }
    return "";
}

const char* mode_name(Mode mode) { return mode == Mode::kLowLatency ? "ll" : "ht"; }

const char* layout_name(const Options& options) {
    switch (options.layout) {
        case NCCL_EP_LAYOUT_EXPERT_MAJOR:
            return "expert-major";
        case NCCL_EP_LAYOUT_RANK_MAJOR:
            return "rank-major";
        case NCCL_EP_LAYOUT_FLAT:
            return "flat";
        case NCCL_EP_LAYOUT_UNSET:
            break;
    }
    return "";
}

const char* recipe_name(const Options& options) {
    switch (options.recipe) {
        case NCCL_EP_DISP_QUANT_NONE:
            return "none";
        case NCCL_EP_DISP_QUANT_FWD:
            return "fwd";
        case NCCL_EP_DISP_QUANT_DS_FP8E3M4:
            return "fp8";
    }
    return "";
}

const char* dtype_name(const Options& options) {
    return options.dtype == ncclBfloat16 ? "bf16" : options.dtype == ncclFloat16 ? "fp16" : "fp32";
}

}  // namespace crossdock::bench
