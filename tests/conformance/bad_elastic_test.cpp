// SPDX-License-Identifier: Apache-2.0
// Every elastic dispatch and combine that is wrong gets its code and a message that names what is wrong; nothing is
// written and the group goes on.
#include "conformance/support/bad_call.h"
#include "conformance/support/elastic.h"
#include "conformance/support/modes.h"
#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {
namespace {

constexpr size_t kElasticScales = 3;

// What a whole crossdockElasticDispatch points to. Outputs lie one behind the other.
struct WholeElasticDispatch {
    explicit WholeElasticDispatch(Victim& made_for) : victim(made_for), handle(made_for.handle()) {
        const bool by_expert = victim.problem().expert_major();
        const size_t experts = victim.local_experts(), ranks = static_cast<size_t>(victim.problem().num_ranks);
        // Room for every token, and for the zones of 4 rows.
        rows = 2 * kVictimTokens * ranks + 8 * experts;
        std::byte* at = victim.input();
        const auto in = [&](OpenTensor& tensor, ncclDataType_t type, const std::vector<size_t>& sizes) {
            tensor.set(type, sizes, at);
            return &tensor.tensor;
        };
        call.tokens = in(tokens, ncclBfloat16, {kVictimTokens, kVictimHidden});
        call.scales = in(scales, ncclFloat32, {kVictimTokens, kElasticScales});
        call.topk_weights = in(weights, ncclFloat32, {kVictimTokens, kVictimTopk});
        at = victim.output();
        const auto out = [&](OpenTensor& tensor, ncclDataType_t type, const std::vector<size_t>& sizes) {
            in(tensor, type, sizes);
            at += 16384;
            return &tensor.tensor;
        };
        call.out_tokens = out(received, ncclBfloat16, {rows, kVictimHidden});
        call.out_scales = out(received_scales, ncclFloat32, {rows, kElasticScales});
        call.out_topk_weights = by_expert ? out(received_weights, ncclFloat32, {rows})
                                          : out(received_weights, ncclFloat32, {rows, kVictimTopk});
        if (!by_expert) call.out_topk_idx = out(received_ids, ncclInt64, {rows, kVictimTopk});
        call.sources = out(sources, ncclInt32, {kVictimTokens * ranks, kVictimTopk + 2});
        call.rank_ends = out(rank_ends, ncclInt32, {ranks});
        call.expert_counts = out(counts, ncclInt32, {experts});
        call.expert_ends = out(ends, ncclInt32, {experts});
        call.statistics = out(statistics, ncclInt32, {experts});
    }
    ncclResult_t operator()() { return crossdockElasticDispatch(handle, pointer, victim.stream()); }

    Victim& victim;
    ncclEpHandle_t handle;
    size_t rows = 0;
    OpenTensor tokens, scales, weights, received, received_scales, received_weights, received_ids, sources, rank_ends,
        counts, ends, statistics;
    crossdockElasticDispatch_t call = CROSSDOCK_ELASTIC_DISPATCH_INIT;
    const crossdockElasticDispatch_t* pointer = &call;
};

using ElasticD = WholeElasticDispatch&;
const Spoiled<WholeElasticDispatch> kElasticDispatches[] = {
    {"handle NULL", [](ElasticD c) { c.handle = nullptr; }, "handle"},
    {"call NULL", [](ElasticD c) { c.pointer = nullptr; }, "call is NULL"},
    {"too small", [](ElasticD c) { c.call.size = 8; }, "call->size"},
    {"magic", [](ElasticD c) { c.call.magic = 1; }, "call->magic"},
    {"no tokens", [](ElasticD c) { c.call.tokens = nullptr; }, "call->tokens"},
    {"no out_tokens", [](ElasticD c) { c.call.out_tokens = nullptr; }, "call->out_tokens"},
    {"tokens of a type that does not travel", [](ElasticD c) { c.tokens.tensor.datatype = ncclInt64; }, "call->tokens"},
    {"out_tokens of another type", [](ElasticD c) { c.received.tensor.datatype = ncclFloat16; }, "call->out_tokens"},
    {"fewer tokens than the routing", [](ElasticD c) { c.tokens.sizes[0] -= 1; }, "call->tokens"},
    {"out_tokens of another width", [](ElasticD c) { c.received.width() = 32; }, "call->tokens"},
    {"out_tokens of three dimensions", [](ElasticD c) { c.received.tensor.ndim = 3; }, "call->out_tokens"},
    {"rows of 8 bytes", [](ElasticD c) { c.tokens.width() = c.received.width() = 4; }, "multiples of 16"},
    {"rows and scales beyond max_token_bytes",
     [](ElasticD c) {
         c.tokens.width() = c.received.width() = 640;
         c.received.sizes[0] = c.received_scales.sizes[0] = c.received_weights.sizes[0] = c.received_ids.sizes[0] = 1;
     },
     "max_token_bytes"},
    {"rows between multiples of 16",
     [](ElasticD c) { c.received.tensor.data = static_cast<std::byte*>(c.received.tensor.data) + 8; },
     "call->out_tokens"},
    {"scales without room", [](ElasticD c) { c.call.out_scales = nullptr; }, "call->out_scales"},
    {"room without scales", [](ElasticD c) { c.call.scales = nullptr; }, "call->scales"},
    {"scales of 2 bytes", [](ElasticD c) { c.scales.tensor.datatype = ncclFloat16; }, "call->scales"},
    {"out_scales of another type", [](ElasticD c) { c.received_scales.tensor.datatype = ncclInt32; },
     "call->out_scales"},
    {"out_scales of other rows", [](ElasticD c) { c.received_scales.sizes[0] -= 1; }, "call->out_scales"},
    {"scales of another width", [](ElasticD c) { c.scales.width() += 1; }, "call->scales"},
    {"a negative stride", [](ElasticD c) { c.call.scale_strides[1] = -1; }, "call->scale_strides[1]"},
    {"a stride beyond memory", [](ElasticD c) { c.call.out_scale_strides[0] = INT64_MAX; }, "call->out_scale_strides"},
    {"weights of another type", [](ElasticD c) { c.weights.tensor.datatype = ncclFloat16; }, "call->topk_weights"},
    {"weights of another top-k", [](ElasticD c) { c.weights.width() = 1; }, "call->topk_weights"},
    {"out_topk_weights without weights", [](ElasticD c) { c.call.topk_weights = nullptr; }, "call->out_topk_weights"},
    {"out_topk_weights of other rows", [](ElasticD c) { c.received_weights.sizes[0] -= 1; }, "call->out_topk_weights"},
    {"sources of another width", [](ElasticD c) { c.sources.width() = kVictimTopk; }, "call->sources"},
    {"sources of another type", [](ElasticD c) { c.sources.tensor.datatype = ncclInt64; }, "call->sources"},
    {"rank_ends of fewer ranks", [](ElasticD c) { c.rank_ends.sizes[0] -= 1; }, "call->rank_ends"},
    {"expert_counts of all experts", [](ElasticD c) { c.counts.sizes[0] *= 2; }, "call->expert_counts"},
    {"expert_ends of another type", [](ElasticD c) { c.ends.tensor.datatype = ncclUint32; }, "call->expert_ends"},
    {"statistics of two dimensions", [](ElasticD c) { c.statistics.tensor.ndim = 2; }, "call->statistics"},
    {"an alignment of 2^31", [](ElasticD c) { c.call.alignment = 1u << 31; }, "call->alignment"},
    {"zero_padding 2", [](ElasticD c) { c.call.zero_padding = 2; }, "call->zero_padding"},
    {"an output over an input", [](ElasticD c) { c.tokens.tensor.data = c.received.tensor.data; }, "call->tokens"},
};

const Spoiled<WholeElasticDispatch> kElasticDispatchesByRank[] = {
    {"zero_padding", [](ElasticD c) { c.call.zero_padding = 1; }, "call->zero_padding"},
    {"ids of another type", [](ElasticD c) { c.received_ids.tensor.datatype = ncclFloat32; }, "call->out_topk_idx"},
    {"ids of another top-k", [](ElasticD c) { c.received_ids.width() += 1; }, "call->out_topk_idx"},
    {"ids of other rows", [](ElasticD c) { c.received_ids.sizes[0] -= 1; }, "call->out_topk_idx"},
};

const Spoiled<WholeElasticDispatch> kElasticDispatchesByExpert[] = {
    {"ids",
     [](ElasticD c) {
         c.received_ids.set(ncclInt64, {c.rows, kVictimTopk}, c.victim.output() + (1 << 18));
         c.call.out_topk_idx = &c.received_ids.tensor;
     },
     "call->out_topk_idx"},
};

const Spoiled<WholeElasticDispatch> kHtElasticDispatchesByExpert[] = {
    {"another alignment than the handle's", [](ElasticD c) { c.call.alignment = 8; }, "call->alignment"},
};

struct WholeElasticCombine {
    explicit WholeElasticCombine(Victim& made_for) : victim(made_for), handle(made_for.handle()) {
        WholeElasticDispatch before(made_for);
        const bool by_expert = victim.problem().expert_major();
        rows.set(ncclBfloat16, {before.rows, kVictimHidden}, victim.input());
        by_expert ? weights.set(ncclFloat32, {before.rows}, victim.input())
                  : weights.set(ncclFloat32, {before.rows, kVictimTopk}, victim.input());
        for (OpenTensor& tensor : bias) tensor.set(ncclBfloat16, {kVictimTokens, kVictimHidden}, victim.input());
        combined.set(ncclBfloat16, {kVictimTokens, kVictimHidden}, victim.output());
        combined_weights.set(ncclFloat32, {kVictimTokens, kVictimTopk}, victim.output() + 16384);
        call.tokens = &rows.tensor;
        call.topk_weights = &weights.tensor;
        call.bias[0] = &bias[0].tensor;
        call.bias[1] = &bias[1].tensor;
        call.out_tokens = &combined.tensor;
        call.out_topk_weights = &combined_weights.tensor;
    }
    ncclResult_t operator()() { return crossdockElasticCombine(handle, pointer, victim.stream()); }

    Victim& victim;
    ncclEpHandle_t handle;
    OpenTensor rows, weights, bias[2], combined, combined_weights;
    crossdockElasticCombine_t call = CROSSDOCK_ELASTIC_COMBINE_INIT;
    const crossdockElasticCombine_t* pointer = &call;
};

using ElasticC = WholeElasticCombine&;
const Spoiled<WholeElasticCombine> kElasticCombines[] = {
    {"handle NULL", [](ElasticC c) { c.handle = nullptr; }, "handle"},
    {"call NULL", [](ElasticC c) { c.pointer = nullptr; }, "call is NULL"},
    {"too small", [](ElasticC c) { c.call.size = 8; }, "call->size"},
    {"magic", [](ElasticC c) { c.call.magic = 0; }, "call->magic"},
    {"no tokens", [](ElasticC c) { c.call.tokens = nullptr; }, "call->tokens"},
    {"no out_tokens", [](ElasticC c) { c.call.out_tokens = nullptr; }, "call->out_tokens"},
    {"tokens of bytes", [](ElasticC c) { c.rows.tensor.datatype = ncclUint8; }, "call->tokens"},
    {"out_tokens of another type", [](ElasticC c) { c.combined.tensor.datatype = ncclFloat32; }, "call->out_tokens"},
    {"out_tokens of another width", [](ElasticC c) { c.combined.width() = 32; }, "call->out_tokens"},
    {"out_tokens of fewer tokens", [](ElasticC c) { c.combined.sizes[0] -= 1; }, "call->out_tokens"},
    {"rows of 24 bytes", [](ElasticC c) { c.rows.width() = c.combined.width() = 12; }, "multiples of 16"},
    {"rows beyond max_token_bytes", [](ElasticC c) { c.rows.width() = c.combined.width() = 648; }, "max_token_bytes"},
    {"weights without room", [](ElasticC c) { c.call.out_topk_weights = nullptr; }, "call->out_topk_weights"},
    {"room without weights", [](ElasticC c) { c.call.topk_weights = nullptr; }, "call->topk_weights"},
    {"weights of other rows", [](ElasticC c) { c.weights.sizes[0] -= 1; }, "call->topk_weights"},
    {"weights of another type", [](ElasticC c) { c.weights.tensor.datatype = ncclBfloat16; }, "call->topk_weights"},
    {"out_topk_weights of another top-k", [](ElasticC c) { c.combined_weights.width() -= 1; },
     "call->out_topk_weights"},
    {"a bias of another type", [](ElasticC c) { c.bias[0].tensor.datatype = ncclFloat16; }, "call->bias[0]"},
    {"a bias of fewer tokens", [](ElasticC c) { c.bias[1].sizes[0] -= 1; }, "call->bias[1]"},
    {"a bias that is written", [](ElasticC c) { c.bias[1].tensor.data = c.combined.tensor.data; }, "call->bias[1]"},
};

const Spoiled<WholeElasticCombine> kHtElasticCombines[] = {
    {"fewer rows than came", [](ElasticC c) { c.rows.sizes[0] = c.weights.sizes[0] = 1; }, "received ones"},
};

TEST_BOTH_MODES(BadElastic, Dispatches) {
    on_each_elastic_backend(mode, kEveryBackend, [=](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : layouts_of(mode)) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                Victim victim(context, mode, layout);
                check_refusals(context, victim, kElasticDispatches);
                if (layout != NCCL_EP_LAYOUT_EXPERT_MAJOR)
                    return check_refusals(context, victim, kElasticDispatchesByRank);
                check_refusals(context, victim, kElasticDispatchesByExpert);
                if (is_ht(mode)) check_refusals(context, victim, kHtElasticDispatchesByExpert);
            });
        }
    });
}

TEST_BOTH_MODES(BadElastic, Combines) {
    on_each_elastic_backend(mode, kEveryBackend, [=](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : layouts_of(mode)) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                Victim victim(context, mode, layout);
                RANK_REFUSED(context, ncclInvalidUsage, "elastic dispatch", WholeElasticCombine(victim)());
                WholeElasticDispatch dispatch(victim);
                // Somewhere else than where a refused call must not write.
                Buffer elsewhere(context, victim.stream(), Victim::kBufferBytes);
                for (OpenTensor* tensor :
                     {&dispatch.received, &dispatch.received_scales, &dispatch.received_weights, &dispatch.received_ids,
                      &dispatch.sources, &dispatch.rank_ends, &dispatch.counts, &dispatch.ends, &dispatch.statistics}) {
                    std::byte* const data = static_cast<std::byte*>(tensor->tensor.data);
                    if (data != nullptr) tensor->tensor.data = elsewhere.data() + (data - victim.output());
                }
                RANK_OK(context, dispatch());
                context.synchronize(victim.stream());
                check_refusals(context, victim, kElasticCombines);
                if (is_ht(mode)) check_refusals(context, victim, kHtElasticCombines);
            });
        }
    });
}

// A handle without routing, and a group with masks.
TEST_BOTH_MODES(BadElastic, NeedsARoutingAndNoMasks) {
    on_each_backend_as_one_team(kEveryBackend, [=](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : layouts_of(mode)) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                Victim victim(context, mode, layout);
                ncclEpHandle_t fresh = nullptr;
                RANK_OK(context, ncclEpInitHandle(&fresh, victim.group(), layout, nullptr, kVictimTopk, nullptr));
                WholeElasticDispatch dispatch(victim);
                dispatch.handle = fresh;
                RANK_REFUSED(context, ncclInvalidUsage, "ncclEpUpdateHandle", dispatch());
                WholeElasticCombine combine(victim);
                combine.handle = fresh;
                RANK_REFUSED(context, ncclInvalidUsage, "", combine());
                const bool has_alignment = is_ht(mode) && layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
                const auto align = [&](unsigned int rows) { return crossdockHandleSetAlignment(fresh, rows); };
                if (has_alignment) {
                    RANK_OK(context, align(3));
                    RANK_REFUSED(context, ncclInvalidArgument, "alignment is 4294967295", align(~0u));
                } else {
                    RANK_REFUSED(context, ncclInvalidUsage, "crossdockHandleSetAlignment", align(3));
                }
                RANK_OK(context, ncclEpHandleDestroy(fresh));

                ncclEpGroupConfig_t config = group_config_for(context, victim.problem());
                crossdockGroupOptions_t options = CROSSDOCK_GROUP_OPTIONS_INIT;
                if (is_ht(mode)) {
                    options.ht_masks = 1;
                } else {
                    config.enable_mask = 1;
                }
                ncclEpGroup_t masked = nullptr;
                RANK_OK(context, crossdockCreateGroup(&masked, context.comm(), &config, &options));
                RANK_OK(context, ncclEpInitHandle(&fresh, masked, layout, nullptr, kVictimTopk, nullptr));
                dispatch.handle = combine.handle = fresh;
                RANK_REFUSED(context, ncclInvalidUsage, "mask", dispatch());
                RANK_REFUSED(context, ncclInvalidUsage, "mask", combine());
                RANK_OK(context, ncclEpHandleDestroy(fresh));
                RANK_OK(context, ncclEpGroupDestroy(masked));
            });
        }
    });
}

// Low latency, between LSA teams.
TEST(BadElastic, LowLatencyNeedsOneLsaTeam) {
    on_each_backend(kCpuBackends, [](const BackendSpec& spec) {
        const WithLsaTeam team(1);
        expect_clean(spec, 2, std::nullopt, [](RankContext& context) {
            Victim victim(context, kLowLatency, NCCL_EP_LAYOUT_EXPERT_MAJOR);
            RANK_REFUSED(context, ncclInvalidUsage, "LSA team", WholeElasticDispatch(victim)());
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
