// SPDX-License-Identifier: Apache-2.0
// Chooses the kernel of an LL operation. The operations that inference runs most, whole or as a half, have kernels of
// their own, compiled with constants for arguments that never change there; the general kernel serves all others.
//
// A config is what such a kernel knows, and what a call is: a kernel serves the calls with the same config. The tables
// have a line for each kernel. A kernel's arguments are the call's: constants hide those of the same name, so all
// kernels share one source.
#pragma once

#include <bit>
#include <iterator>
#include <type_traits>

#include "kernels/ll/arguments.h"

namespace crossdock {

// A dispatch counts so many choices of a token at once: more would take 0.4 us of every dispatch. A combine reads one
// per lane.
inline constexpr uint32_t kTopkOfDispatch = 8;
inline constexpr uint32_t kTopkOfCombine = 32;

inline constexpr uint32_t kBothHalves = kSendHalf | kReceiveHalf;

enum class By : uint32_t { kRank, kExpert };  // rank-major and expert-major

struct LlDispatchConfig {
    uint32_t halves;
    By order;
    LlForm form;
    LlDispatchWire wire = LlDispatchWire::kBytes;
    bool transposed_scales = false;
    bool is_elastic = false;
    bool has_given_scales = false;  // next to rows that travel as they are
    bool overlaps = false;          // publishes rows

    constexpr bool operator==(const LlDispatchConfig&) const = default;
    static LlDispatchConfig of(const LlDispatchArgs& args) {
        const LlCommon& c = args.common;
        const bool places_scales = (c.halves & kReceiveHalf) != 0;
        return {c.halves,
                c.expert_major ? By::kExpert : By::kRank,
                c.own_rows_are_ll128 ? LlForm::kLl128 : LlForm::kPlain,
                args.wire,
                args.transposed_scales && places_scales,
                args.is_elastic,
                args.wire == LlDispatchWire::kBytes && args.scale_bytes > 0,
                c.overlap.memory != nullptr && places_scales};
    }
};

// The first one that serves a call runs.
inline constexpr LlDispatchConfig kDispatchKernels[] = {
    {kBothHalves, By::kRank, LlForm::kLl128},
    {kBothHalves, By::kRank, LlForm::kPlain},
    {kBothHalves, By::kExpert, LlForm::kLl128},
    {kBothHalves, By::kExpert, LlForm::kPlain},
    {kBothHalves, By::kExpert, LlForm::kLl128, LlDispatchWire::kFp8},
    {kBothHalves, By::kExpert, LlForm::kPlain, LlDispatchWire::kFp8},
    {kSendHalf, By::kRank, LlForm::kLl128},
    {kSendHalf, By::kRank, LlForm::kPlain},
    {kSendHalf, By::kExpert, LlForm::kLl128},
    {kSendHalf, By::kExpert, LlForm::kPlain},
    {kSendHalf, By::kExpert, LlForm::kLl128, LlDispatchWire::kFp8},
    {kSendHalf, By::kExpert, LlForm::kPlain, LlDispatchWire::kFp8},
    {kReceiveHalf, By::kRank, LlForm::kLl128},
    {kReceiveHalf, By::kRank, LlForm::kPlain},
    {kReceiveHalf, By::kExpert, LlForm::kLl128},
    {kReceiveHalf, By::kExpert, LlForm::kPlain},
    {kReceiveHalf, By::kExpert, LlForm::kLl128, LlDispatchWire::kFp8},
    {kReceiveHalf, By::kExpert, LlForm::kPlain, LlDispatchWire::kFp8},
    // DeepEP's scales.
    {kBothHalves, By::kExpert, LlForm::kLl128, LlDispatchWire::kFp8, true},
    {kBothHalves, By::kExpert, LlForm::kPlain, LlDispatchWire::kFp8, true},
    {kReceiveHalf, By::kExpert, LlForm::kLl128, LlDispatchWire::kFp8, true},
    {kReceiveHalf, By::kExpert, LlForm::kPlain, LlDispatchWire::kFp8, true},
    // DeepEP's ElasticBuffer.
    {kBothHalves, By::kRank, LlForm::kLl128, LlDispatchWire::kBytes, false, true},
    {kBothHalves, By::kRank, LlForm::kPlain, LlDispatchWire::kBytes, false, true},
    {kBothHalves, By::kExpert, LlForm::kLl128, LlDispatchWire::kBytes, false, true},
    {kBothHalves, By::kExpert, LlForm::kPlain, LlDispatchWire::kBytes, false, true},
};

struct LlCombineConfig {
    uint32_t halves;
    By order;
    LlCombineWire wire;
    // Masks are an argument of dispatches and of send halves, where they cost nothing. A combine that looks at them has
    // fewer registers left for its sums.
    bool masks;
    bool own_rows_stay = false;  // only if both halves run (core/ll/plan.cpp)
    bool is_elastic = false;
    DType dtype = DType::kBf16;
    // On GPUs all rows of a combine of one LSA team are LL128 rows, unless they are long or quantised.
    RowForms forms = RowForms::kLl128;
    LlForm form = LlForm::kLl128;
    bool overlaps = false;  // waits for experts

    constexpr bool operator==(const LlCombineConfig&) const = default;
    static LlCombineConfig of(const LlCombineArgs& args) {
        const LlCommon& c = args.common;
        // Who receives sums from senders does what a rank-major combine does.
        const bool receives_sums = c.halves == kReceiveHalf && args.wire == LlCombineWire::kSums;
        return {c.halves,
                c.expert_major && !receives_sums ? By::kExpert : By::kRank,
                receives_sums ? LlCombineWire::kRows : args.wire,
                c.scope.masking != 0 && c.halves != kSendHalf,
                args.own_rows_stay,
                args.is_elastic,
                args.dtype,
                args.forms,
                c.own_rows_are_ll128 ? LlForm::kLl128 : LlForm::kPlain,
                c.overlap.done_value != 0 && c.halves != kReceiveHalf};
    }
};

inline constexpr LlCombineConfig kCombineKernels[] = {
    {kBothHalves, By::kRank, LlCombineWire::kRows, false},
    {kBothHalves, By::kRank, LlCombineWire::kRows, false, true},
    {kBothHalves, By::kExpert, LlCombineWire::kRows, false},
    {kBothHalves, By::kExpert, LlCombineWire::kRows, false, true},
    {kBothHalves, By::kExpert, LlCombineWire::kSums, false},
    {kSendHalf, By::kRank, LlCombineWire::kRows, false},
    {kSendHalf, By::kExpert, LlCombineWire::kRows, false},
    {kSendHalf, By::kExpert, LlCombineWire::kSums, false},
    {kReceiveHalf, By::kRank, LlCombineWire::kRows, false},
    {kReceiveHalf, By::kExpert, LlCombineWire::kRows, false},
    {kBothHalves, By::kRank, LlCombineWire::kRows, true},
    {kBothHalves, By::kRank, LlCombineWire::kRows, true, true},
    {kBothHalves, By::kExpert, LlCombineWire::kRows, true},
    {kBothHalves, By::kExpert, LlCombineWire::kRows, true, true},
    {kBothHalves, By::kExpert, LlCombineWire::kSums, true},
    {kReceiveHalf, By::kRank, LlCombineWire::kRows, true},
    {kReceiveHalf, By::kExpert, LlCombineWire::kRows, true},
    // DeepEP's ElasticBuffer.
    {kBothHalves, By::kRank, LlCombineWire::kRows, false, false, true},
    {kBothHalves, By::kRank, LlCombineWire::kRows, false, true, true},
    {kBothHalves, By::kExpert, LlCombineWire::kSums, false, false, true},
    {kBothHalves, By::kExpert, LlCombineWire::kRows, false, false, true},
};

// What kernels with a config receive.
template <auto kConfig, uint32_t kTopk, typename Scope = WaitScope>
struct LlCommonKnown : LlCommonOf<Scope> {
    static constexpr uint32_t kMostTopk = kTopk;
    static constexpr LlForm kForm = kConfig.form;
    static constexpr bool kFewTokens = true;
    static constexpr bool expert_major = kConfig.order == By::kExpert;
    static constexpr uint32_t halves = kConfig.halves;
};

template <LlDispatchConfig kConfig>
struct LlDispatchKnownAlways : LlDispatchArgsOf<LlCommonKnown<kConfig, kTopkOfDispatch>> {
    static constexpr bool kOneBatch = true;
    static constexpr bool kMayOverlap = kConfig.overlaps;
    static constexpr bool is_elastic = kConfig.is_elastic;
    static constexpr LlDispatchWire wire = kConfig.wire;
    static constexpr bool transposed_scales = kConfig.transposed_scales;
};
template <LlDispatchConfig kConfig>
struct LlDispatchKnown : LlDispatchKnownAlways<kConfig> {};
template <LlDispatchConfig kConfig>
requires(kConfig.wire == LlDispatchWire::kBytes && !kConfig.is_elastic) struct LlDispatchKnown<kConfig>
    : LlDispatchKnownAlways<kConfig> {
    static constexpr uint32_t scale_bytes = 0;
};
template <LlDispatchConfig kConfig>
requires(kConfig.is_elastic) struct LlDispatchKnown<kConfig> : LlDispatchKnownAlways<kConfig> {
    static constexpr uint32_t scale_bytes = 0;
    static constexpr uint32_t direct = 0;
};

template <bool kMasks>
struct KnownScope : WaitScope {
    static constexpr uint32_t masking = kMasks ? 1 : 0;
};
template <LlCombineConfig kConfig>
using ScopeOf = std::conditional_t<kConfig.halves == kSendHalf, WaitScope, KnownScope<kConfig.masks>>;
template <LlCombineConfig kConfig>
struct LlCombineKnown : LlCombineArgsOf<LlCommonKnown<kConfig, kTopkOfCombine, ScopeOf<kConfig>>> {
    static constexpr uint32_t kRowsAtOnce = kConfig.own_rows_stay && kConfig.order == By::kExpert ? 8 : 4;
    static constexpr bool kMayOverlap = kConfig.overlaps;
    static constexpr bool is_elastic = kConfig.is_elastic;
    static constexpr DType dtype = kConfig.dtype;
    static constexpr LlCombineWire wire = kConfig.wire;
    static constexpr RowForms forms = kConfig.forms;
    static constexpr bool own_rows_stay = kConfig.own_rows_stay;
};

namespace {

bool is_small_enough(const LlCommon& c, uint32_t most_topk) {
    return c.num_tokens <= c.warp_layout.warps_per_block * kLanes && c.topk <= most_topk;
}
[[maybe_unused]] bool may_be_known(const LlDispatchArgs& args) {
    const LlWarpLayout& warp_layout = args.common.warp_layout;
    return is_small_enough(args.common, kTopkOfDispatch) && args.common.tokens_per_block <= warp_layout.num_stages &&
           args.row_bytes <= warp_layout.chunk_bytes;
}
[[maybe_unused]] bool may_be_known(const LlCombineArgs& args) { return is_small_enough(args.common, kTopkOfCombine); }

// Runs run(args), with the arguments cast to those of the kernel that serves the call, or unchanged for the general
// kernel. Groups with GIN peers, and on CPUs builds for users and sanitizers, have only the general one.
template <const auto& kKernels, template <auto> typename Known, size_t kFirst = 0>
void with_variant(const auto& args, const auto& config, auto run) {
    if constexpr (kHasKnownKernels && kFirst < std::size(kKernels)) {
        using Args = Known<kKernels[kFirst]>;
        static_assert(sizeof(Args) == sizeof(args), "a constant takes no room");
        if (config != kKernels[kFirst]) return with_variant<kKernels, Known, kFirst + 1>(args, config, run);
        return may_be_known(args) ? run(std::bit_cast<Args>(args)) : run(args);
    } else {
        run(args);
    }
}
void with_dispatch_variant(const LlDispatchArgs& args, auto run) {
    with_variant<kDispatchKernels, LlDispatchKnown>(args, LlDispatchConfig::of(args), run);
}
void with_combine_variant(const LlCombineArgs& args, auto run) {  // run<kDType>(args)
    with_variant<kCombineKernels, LlCombineKnown>(
        args, LlCombineConfig::of(args), [&]<typename Args>(const Args& known) {
            if constexpr (std::is_same_v<Args, LlCombineArgs>) {
                with_dtype(known.dtype, [&]<DType kDType>() { run.template operator()<kDType>(known); });
            } else {
                run.template operator()<Args::dtype>(known);
            }
        });
}

}  // namespace
}  // namespace crossdock
