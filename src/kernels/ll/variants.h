// SPDX-License-Identifier: Apache-2.0
// Chooses the kernel of an LL operation. The operations that inference runs most, whole or as a half, have kernels of
// their own, compiled with constants for arguments that never change there; the general kernel serves all others.
//
// A constant hides the argument of the same name, so all kernels share one source. Every constant needs its check in
// `serves`, or a kernel runs with arguments that it does not support.
#pragma once

#include <bit>
#include <type_traits>

#include "kernels/ll/arguments.h"

namespace crossdock {

// Masks are an argument of dispatches, where they cost nothing. A combine that looks at them has fewer registers left
// for its sums: without masks it has kernels of its own.
struct UnmaskedScope : WaitScope {
    static constexpr uint32_t masking = 0;
};
struct MaskedScope : WaitScope {
    static constexpr uint32_t masking = 1;
};

// A dispatch counts so many choices of a token at once: more would take 0.4 us of every dispatch. A combine reads one
// per lane.
inline constexpr uint32_t kTopkOfDispatch = 8;
inline constexpr uint32_t kTopkOfCombine = 32;

// The halves of an operation that a kernel runs.
struct Both {
    static constexpr uint32_t halves = kSendHalf | kReceiveHalf;
};
struct Send {
    static constexpr uint32_t halves = kSendHalf;
};
struct Receive {
    static constexpr uint32_t halves = kReceiveHalf;
};

template <typename Halves, bool kExpertMajor, LlForm kRowForm, uint32_t kTopk, typename Scope = WaitScope>
struct LlCommonKnown : LlCommonOf<Scope> {
    static constexpr uint32_t kMostTopk = kTopk;
    static constexpr LlForm kForm = kRowForm;
    static constexpr bool kFewTokens = true;
    static constexpr bool expert_major = kExpertMajor;
    static constexpr uint32_t halves = Halves::halves;
};

template <typename Halves, bool kExpertMajor, LlForm kRowForm, LlDispatchWire kWire, bool kTransposedScales = false>
struct LlDispatchKnown : LlDispatchArgsOf<LlCommonKnown<Halves, kExpertMajor, kRowForm, kTopkOfDispatch>> {
    static constexpr bool is_elastic = false;
    static constexpr bool kOneBatch = true;
    static constexpr LlDispatchWire wire = kWire;
    static constexpr bool transposed_scales = kTransposedScales;
};

template <typename Halves, bool kExpertMajor, LlForm kRowForm>
struct LlPlainDispatchKnown : LlDispatchKnown<Halves, kExpertMajor, kRowForm, LlDispatchWire::kBytes> {
    static constexpr uint32_t scale_bytes = 0;
};

// These names appear in the kernels' names in profilers and resources.txt.
template <typename Halves>
struct RankMajorLl128 : LlPlainDispatchKnown<Halves, false, LlForm::kLl128> {};
template <typename Halves>
struct RankMajorRows : LlPlainDispatchKnown<Halves, false, LlForm::kPlain> {};
template <typename Halves>
struct ExpertMajorLl128 : LlPlainDispatchKnown<Halves, true, LlForm::kLl128> {};
template <typename Halves>
struct ExpertMajorRows : LlPlainDispatchKnown<Halves, true, LlForm::kPlain> {};
template <typename Halves>
struct ExpertMajorFp8Ll128 : LlDispatchKnown<Halves, true, LlForm::kLl128, LlDispatchWire::kFp8> {};
template <typename Halves>
struct ExpertMajorFp8Rows : LlDispatchKnown<Halves, true, LlForm::kPlain, LlDispatchWire::kFp8> {};
// DeepEP's scales.
template <typename Halves>
struct ExpertMajorFp8Ll128Transposed : LlDispatchKnown<Halves, true, LlForm::kLl128, LlDispatchWire::kFp8, true> {};
template <typename Halves>
struct ExpertMajorFp8RowsTransposed : LlDispatchKnown<Halves, true, LlForm::kPlain, LlDispatchWire::kFp8, true> {};

// DeepEP's ElasticBuffer.
template <bool kExpertMajor, LlForm kRowForm>
struct ElasticKnown : LlDispatchKnown<Both, kExpertMajor, kRowForm, LlDispatchWire::kBytes> {
    static constexpr bool is_elastic = true;
    static constexpr uint32_t direct = 0;
};
struct ElasticByRankLl128 : ElasticKnown<false, LlForm::kLl128> {};
struct ElasticByRankRows : ElasticKnown<false, LlForm::kPlain> {};
struct ElasticByExpertLl128 : ElasticKnown<true, LlForm::kLl128> {};
struct ElasticByExpertRows : ElasticKnown<true, LlForm::kPlain> {};

// On GPUs all rows of a combine of one LSA team are LL128 rows, unless they are long or quantised. Rows stay only if
// both halves run (core/ll/plan.cpp).
template <typename Halves, typename Scope, bool kExpertMajor, bool kOwnRowsStay,
          LlCombineWire kWire = LlCombineWire::kRows>
struct LlCombineKnown : LlCombineArgsOf<LlCommonKnown<Halves, kExpertMajor, LlForm::kLl128, kTopkOfCombine, Scope>> {
    static constexpr bool is_elastic = false;
    static constexpr DType dtype = DType::kBf16;
    static constexpr LlCombineWire wire = kWire;
    static constexpr RowForms forms = RowForms::kLl128;
    static constexpr bool own_rows_stay = kOwnRowsStay;
};
template <typename Halves, typename Scope>
struct RankMajorCombine : LlCombineKnown<Halves, Scope, false, false> {};
template <typename Scope>
struct RankMajorCombineOwnStay : LlCombineKnown<Both, Scope, false, true> {};
template <typename Halves, typename Scope>
struct ExpertMajorCombine : LlCombineKnown<Halves, Scope, true, false> {};
template <typename Scope>
struct ExpertMajorCombineOwnStay : LlCombineKnown<Both, Scope, true, true> {
    static constexpr uint32_t kRowsAtOnce = 8;
};
template <typename Halves, typename Scope>
struct ExpertMajorSendersSums : LlCombineKnown<Halves, Scope, true, false, LlCombineWire::kSums> {};
struct ElasticByRankCombine : LlCombineKnown<Both, UnmaskedScope, false, false> {
    static constexpr bool is_elastic = true;
};
struct ElasticByRankCombineOwnStay : LlCombineKnown<Both, UnmaskedScope, false, true> {
    static constexpr bool is_elastic = true;
};
struct ElasticByExpertCombine : LlCombineKnown<Both, UnmaskedScope, true, false, LlCombineWire::kSums> {
    static constexpr bool is_elastic = true;
};

namespace {

template <typename Known>
bool has_what_is_known(const LlCommon& c) {
    const bool are_few = c.num_tokens <= c.warp_layout.warps_per_block * uint32_t{kLanes};
    return are_few && c.expert_major == Known::expert_major && c.halves == Known::halves &&
           c.topk <= Known::kMostTopk && c.own_rows_are_ll128 == (Known::kForm == LlForm::kLl128);
}

template <typename Known>
bool serves(const LlDispatchArgs& args) {
    const LlWarpLayout& warp_layout = args.common.warp_layout;
    const bool in_one_batch =
        args.common.tokens_per_block <= warp_layout.num_stages && args.row_bytes <= warp_layout.chunk_bytes;
    using Common = decltype(Known::common);
    const bool places_scales = (Common::halves & kReceiveHalf) != 0;
    return has_what_is_known<Common>(args.common) && in_one_batch && args.wire == Known::wire &&
           args.is_elastic == Known::is_elastic &&
           (args.transposed_scales == Known::transposed_scales || !places_scales) &&
           (Known::wire != LlDispatchWire::kBytes || args.scale_bytes == 0);  // LlPlainDispatchKnown
}

template <typename Known>
bool serves(const LlCombineArgs& args) {
    using Common = decltype(Known::common);
    return has_what_is_known<Common>(args.common) && args.common.scope.masking == decltype(Common::scope)::masking &&
           args.is_elastic == Known::is_elastic && args.dtype == Known::dtype && args.wire == Known::wire &&
           args.forms == Known::forms && args.own_rows_stay == Known::own_rows_stay;
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

template <typename Halves, typename... More>
void with_dispatch_variant_of(const LlDispatchArgs& args, auto run) {
    with_known<RankMajorLl128<Halves>, RankMajorRows<Halves>, ExpertMajorLl128<Halves>, ExpertMajorRows<Halves>,
               ExpertMajorFp8Ll128<Halves>, ExpertMajorFp8Rows<Halves>, More...>(args, run);
}
void with_dispatch_variant(const LlDispatchArgs& args, auto run) {
    switch (args.common.halves) {
        case Send::halves:
            return with_dispatch_variant_of<Send>(args, run);
        case Receive::halves:
            return with_dispatch_variant_of<Receive, ExpertMajorFp8Ll128Transposed<Receive>,
                                            ExpertMajorFp8RowsTransposed<Receive>>(args, run);
        default:
            return with_dispatch_variant_of<Both, ExpertMajorFp8Ll128Transposed<Both>,
                                            ExpertMajorFp8RowsTransposed<Both>, ElasticByRankLl128, ElasticByRankRows,
                                            ElasticByExpertLl128, ElasticByExpertRows>(args, run);
    }
}

template <typename... Known>
void with_known_combine(const LlCombineArgs& args, auto run) {
    with_known<Known...>(args, [&]<typename Args>(const Args& known) {
        if constexpr (std::is_same_v<Args, LlCombineArgs>) {
            with_dtype(known.dtype, [&]<DType kDType>() { run.template operator()<kDType>(known); });
        } else {
            run.template operator()<Args::dtype>(known);
        }
    });
}
template <typename Halves, typename Scope, typename... More>
void with_combine_variant_of(const LlCombineArgs& args, auto run) {
    with_known_combine<RankMajorCombine<Halves, Scope>, ExpertMajorCombine<Halves, Scope>,
                       ExpertMajorSendersSums<Halves, Scope>, More...>(args, run);
}
template <typename Scope>
void with_combine_variant_in(const LlCombineArgs& args, auto run) {
    switch (args.common.halves) {
        case Send::halves:
            return with_combine_variant_of<Send, Scope>(args, run);
        case Receive::halves:
            return with_combine_variant_of<Receive, Scope>(args, run);
        default:
            return with_combine_variant_of<Both, Scope, RankMajorCombineOwnStay<Scope>,
                                           ExpertMajorCombineOwnStay<Scope>>(args, run);
    }
}
void with_combine_variant(const LlCombineArgs& args, auto run) {  // run<kDType>(args)
    if (args.is_elastic) {
        return with_known_combine<ElasticByRankCombine, ElasticByRankCombineOwnStay, ElasticByExpertCombine>(args, run);
    }
    if (args.common.scope.masking != 0) return with_combine_variant_in<MaskedScope>(args, run);
    with_combine_variant_in<UnmaskedScope>(args, run);
}

}  // namespace
}  // namespace crossdock
