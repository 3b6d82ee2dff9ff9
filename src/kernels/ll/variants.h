// SPDX-License-Identifier: Apache-2.0
// Chooses the kernel of an LL operation. The operations that inference runs most have kernels of their own, compiled
// with constants for arguments that never change there; the general kernel serves all others.
//
// A constant hides the argument of the same name, so all kernels share one source. Every constant needs its check in
// `serves`, or a kernel runs with arguments that it does not support.
#pragma once

#include <bit>
#include <type_traits>

#include "kernels/ll/arguments.h"

namespace crossdock {

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
};

template <bool kExpertMajor, LlForm kRowForm, LlDispatchWire kWire>
struct LlDispatchKnown : LlDispatchArgsOf<LlCommonKnown<kExpertMajor, kRowForm>> {
    static constexpr bool kOneBatch = true;
    static constexpr LlDispatchWire wire = kWire;
    static constexpr bool transposed_scales = false;
};

template <bool kExpertMajor, LlForm kRowForm>
struct LlPlainDispatchKnown : LlDispatchKnown<kExpertMajor, kRowForm, LlDispatchWire::kBytes> {
    static constexpr uint32_t scale_bytes = 0;
};

// These names appear in the kernels' names in profilers and resources.txt.
struct RankMajorLl128 : LlPlainDispatchKnown<false, LlForm::kLl128> {};
struct RankMajorRows : LlPlainDispatchKnown<false, LlForm::kPlain> {};
struct ExpertMajorLl128 : LlPlainDispatchKnown<true, LlForm::kLl128> {};
struct ExpertMajorRows : LlPlainDispatchKnown<true, LlForm::kPlain> {};
struct ExpertMajorFp8Ll128 : LlDispatchKnown<true, LlForm::kLl128, LlDispatchWire::kFp8> {};
struct ExpertMajorFp8Rows : LlDispatchKnown<true, LlForm::kPlain, LlDispatchWire::kFp8> {};

// On GPUs all rows of a combine of one LSA team are LL128 rows, unless they are long or quantised.
template <bool kExpertMajor, bool kOwnRowsStay, LlCombineWire kWire = LlCombineWire::kRows>
struct LlCombineKnown : LlCombineArgsOf<LlCommonKnown<kExpertMajor, LlForm::kLl128>> {
    static constexpr DType dtype = DType::kBf16;
    static constexpr LlCombineWire wire = kWire;
    static constexpr RowForms forms = RowForms::kLl128;
    static constexpr bool own_rows_stay = kOwnRowsStay;
};
struct RankMajorCombine : LlCombineKnown<false, false> {};
struct RankMajorCombineOwnStay : LlCombineKnown<false, true> {};
struct ExpertMajorCombine : LlCombineKnown<true, false> {};
struct ExpertMajorCombineOwnStay : LlCombineKnown<true, true> {
    static constexpr uint32_t kRowsAtOnce = 8;
};
struct ExpertMajorSendersSums : LlCombineKnown<true, false, LlCombineWire::kSums> {};

namespace {

template <typename Known>
bool has_what_is_known(const LlCommon& c) {
    const bool are_few = c.num_tokens <= c.warp_layout.warps_per_block * uint32_t{kLanes};
    return are_few && c.ids_are_64_bit == Known::ids_are_64_bit && c.expert_major == Known::expert_major &&
           c.halves == Known::halves && c.scope.masking == UnmaskedScope::masking && c.topk <= Known::kMostTopk &&
           c.own_rows_are_ll128 == (Known::kForm == LlForm::kLl128);
}

template <typename Known>
bool serves(const LlDispatchArgs& args) {
    const LlWarpLayout& warp_layout = args.common.warp_layout;
    const bool in_one_batch =
        args.common.tokens_per_block <= warp_layout.num_stages && args.row_bytes <= warp_layout.chunk_bytes;
    return has_what_is_known<decltype(Known::common)>(args.common) && in_one_batch && args.wire == Known::wire &&
           args.transposed_scales == Known::transposed_scales &&
           (Known::wire != LlDispatchWire::kBytes || args.scale_bytes == 0);  // LlPlainDispatchKnown
}

template <typename Known>
bool serves(const LlCombineArgs& args) {
    return has_what_is_known<decltype(Known::common)>(args.common) && args.dtype == Known::dtype &&
           args.wire == Known::wire && args.forms == Known::forms && args.own_rows_stay == Known::own_rows_stay;
}

// Calls run with the arguments cast to those of the first listed kernel that serves them, or unchanged for the general
// kernel. Groups with GIN peers, and sanitizer builds, have only the general one.
template <typename First, typename... Others, typename Args, typename Run>
void with_known(const Args& args, Run run) {
    static_assert(sizeof(First) == sizeof(Args), "a constant takes no room");
    if constexpr (kHasKnownKernels) {
        if (serves<First>(args)) return run(std::bit_cast<First>(args));
        if constexpr (sizeof...(Others) > 0) return with_known<Others...>(args, run);
    }
    run(args);
}

template <typename Run>
void with_dispatch_variant(const LlDispatchArgs& args, Run run) {
    with_known<RankMajorLl128, RankMajorRows, ExpertMajorLl128, ExpertMajorRows, ExpertMajorFp8Ll128,
               ExpertMajorFp8Rows>(args, run);
}
template <typename Run>
void with_combine_variant(const LlCombineArgs& args, Run run) {  // run<kDType>(args)
    with_known<RankMajorCombine, RankMajorCombineOwnStay, ExpertMajorCombine, ExpertMajorCombineOwnStay,
               ExpertMajorSendersSums>(args, [&]<typename Args>(const Args& known) {
        if constexpr (std::is_same_v<Args, LlCombineArgs>) {
            with_dtype(known.dtype, [&]<DType kDType>() { run.template operator()<kDType>(known); });
        } else {
            run.template operator()<Args::dtype>(known);
        }
    });
}

}  // namespace
}  // namespace crossdock
