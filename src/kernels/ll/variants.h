// SPDX-License-Identifier: Apache-2.0
// Which kernel serves a low-latency operation. Those that inference runs all the time have kernels of their own, which
// know at compile time what is the same in each of their launches; the general kernel serves all others.
//
// What is known hides the argument of the same name by a constant, so a kernel's source is the same for all.
#pragma once

#include <bit>

#include "kernels/ll/arguments.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

struct UnmaskedScope : WaitScope {
    static constexpr uint32_t masking = 0;
};

template <bool kExpertMajor, LlForm kRowForm>
struct LlCommonKnown : LlCommonOf<UnmaskedScope> {
    static constexpr uint32_t kMostTopk = 8;
    static constexpr LlForm kForm = kRowForm;
    static constexpr bool kFewTokens = true;
    static constexpr bool expert_major = kExpertMajor;
    static constexpr bool ids_are_64_bit = true;
    static constexpr uint32_t halves = kSendHalf | kReceiveHalf;

    static bool serves(const LlCommon& c) {
        const bool is_ll128 = c.num_tokens <= c.ll128_tokens;
        const bool are_few = c.num_tokens <= c.warp_layout.warps_per_block * uint32_t{kLanes};
        return are_few && c.ids_are_64_bit && c.expert_major == kExpertMajor && c.halves == halves &&
               c.scope.masking == 0 && c.topk <= kMostTopk && is_ll128 == (kForm == LlForm::kLl128);
    }
};

template <bool kExpertMajor, LlForm kRowForm, LlRecipe kRecipe>
struct LlDispatchKnown : LlDispatchArgsOf<LlCommonKnown<kExpertMajor, kRowForm>> {
    static constexpr bool kOneBatch = true;
    static constexpr LlRecipe recipe = kRecipe;
    static constexpr bool transposed_scales = false;

    static bool serves(const LlDispatchArgs& args) {
        const LlWarpLayout& warp_layout = args.common.warp_layout;
        return LlCommonKnown<kExpertMajor, kRowForm>::serves(args.common) && args.recipe == recipe &&
               !args.transposed_scales && args.common.tokens_per_block <= warp_layout.num_stages &&
               args.row_bytes <= warp_layout.chunk_bytes;
    }
};

template <bool kExpertMajor, LlForm kRowForm>
struct LlPlainDispatchKnown : LlDispatchKnown<kExpertMajor, kRowForm, LlRecipe::kBytes> {
    static constexpr uint32_t scale_bytes = 0;

    static bool serves(const LlDispatchArgs& args) {
        return LlDispatchKnown<kExpertMajor, kRowForm, LlRecipe::kBytes>::serves(args) && args.scale_bytes == 0;
    }
};

// Their names are those of the kernels that profilers and resources.txt show.
struct RankMajorLl128 : LlPlainDispatchKnown<false, LlForm::kLl128> {};
struct RankMajorRows : LlPlainDispatchKnown<false, LlForm::kPlain> {};
struct ExpertMajorLl128 : LlPlainDispatchKnown<true, LlForm::kLl128> {};
struct ExpertMajorRows : LlPlainDispatchKnown<true, LlForm::kPlain> {};
struct ExpertMajorFp8Ll128 : LlDispatchKnown<true, LlForm::kLl128, LlRecipe::kFp8> {};
struct ExpertMajorFp8Rows : LlDispatchKnown<true, LlForm::kPlain, LlRecipe::kFp8> {};

// On GPUs all rows of a combine are LL128 rows, unless they are long.
template <bool kExpertMajor>
struct LlCombineKnown : LlCombineArgsOf<LlCommonKnown<kExpertMajor, LlForm::kLl128>> {
    static constexpr LlCombineWire wire = LlCombineWire::kRows;
    static constexpr RowForms forms = RowForms::kLl128;

    static bool serves(const LlCombineArgs& args) {
        return LlCommonKnown<kExpertMajor, LlForm::kLl128>::serves(args.common) && args.dtype == DType::kBf16 &&
               args.wire == wire && args.forms == forms;
    }
};
struct RankMajorCombine : LlCombineKnown<false> {};
struct ExpertMajorCombine : LlCombineKnown<true> {};

// Calls run with the arguments as the first of these kernels that serves them takes them.
template <typename First, typename... Others, typename Args, typename Run>
void with_known(const Args& args, Run run) {
    static_assert(sizeof(First) == sizeof(Args), "a constant takes no room");
    if (First::serves(args)) return run(std::bit_cast<First>(args));
    if constexpr (sizeof...(Others) > 0) return with_known<Others...>(args, run);
    if constexpr (sizeof...(Others) == 0) run(args);
}

template <typename Run>
void with_dispatch_variant(const LlDispatchArgs& args, Run run) {
    with_known<RankMajorLl128, RankMajorRows, ExpertMajorLl128, ExpertMajorRows, ExpertMajorFp8Ll128,
               ExpertMajorFp8Rows>(args, run);
}
template <typename Run>
void with_combine_variant(const LlCombineArgs& args, Run run) {
    with_known<RankMajorCombine, ExpertMajorCombine>(args, run);
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
