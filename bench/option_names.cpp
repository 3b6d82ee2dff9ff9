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

const std::map<std::string, ncclEpDispQuant_t>& dispatch_recipes() {
    static const std::map<std::string, ncclEpDispQuant_t> recipes = {
        {"none", NCCL_EP_DISP_QUANT_NONE}, {"fwd", NCCL_EP_DISP_QUANT_FWD}, {"fp8", NCCL_EP_DISP_QUANT_DS_FP8E3M4}};
    return recipes;
}

const char* recipe_name(const Options& options) {
    for (const auto& [name, recipe] : dispatch_recipes()) {
        if (recipe == options.recipe) return name.c_str();
    }
    return "";
}

const char* dtype_name(const Options& options) {
    return options.dtype == ncclBfloat16 ? "bf16" : options.dtype == ncclFloat16 ? "fp16" : "fp32";
}

}  // namespace crossdock::bench
