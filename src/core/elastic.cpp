// SPDX-License-Identifier: Apache-2.0
#include "core/elastic.h"

#include <algorithm>

#include "core/error.h"

namespace crossdock {
namespace {

constexpr size_t kScaleBytes = 4;

// Outputs that are written as they are received: int32 or fp32, dense.
class Reader {
  public:
    Reader(Communicator& communicator, CallMemory& memory) : communicator_(communicator), memory_(memory) {}

    Tensor required(const ncclEpTensor_t* caller, const char* name) const {
        return read_tensor(communicator_, caller, name);
    }
    // One of `type` and this shape, or null.
    template <typename Element>
    Element* optional_output(const ncclEpTensor_t* caller, const char* name, ncclDataType_t type,
                             std::initializer_list<size_t> sizes, const char* meaning) const {
        if (caller == nullptr) return nullptr;
        const Tensor tensor = required(caller, name);
        expect_dtype(tensor, {type});
        expect_shape(tensor, sizes, meaning);
        memory_.writes(tensor);
        return reinterpret_cast<Element*>(tensor.data);
    }

  private:
    Communicator& communicator_;
    CallMemory& memory_;
};

void expect_rows(const Tensor& tensor, const ElasticSizes& sizes, size_t beside) {
    const size_t bytes = tensor.row_bytes();
    require(bytes > 0 && bytes % kRowGranule == 0, ncclInvalidArgument,
            "{} has rows of {} bytes, allowed: positive multiples of {}", tensor.name, bytes, kRowGranule);
    require(bytes + beside <= sizes.max_token_bytes, ncclInvalidArgument,
            "{} has rows of {} bytes and {} bytes beside them, allowed: together at most max_token_bytes ({})",
            tensor.name, bytes, beside, sizes.max_token_bytes);
    expect_aligned(tensor);
}

// Rows are numbered by int32 in outputs.
void expect_countable(const Tensor& tensor) {
    require(tensor.sizes[0] <= INT32_MAX, ncclInvalidArgument, "{} has {} rows, allowed: at most {}", tensor.name,
            tensor.sizes[0], INT32_MAX);
}

ElasticScales read_scales(const Tensor& tensor, const int64_t (&caller)[2], const char* name, size_t& span) {
    ElasticScales scales{tensor.data, {caller[0], caller[1]}};
    if (caller[0] == 0 && caller[1] == 0) {
        scales.strides[0] = static_cast<int64_t>(tensor.sizes[1]);
        scales.strides[1] = 1;
    }
    span = 0;
    if (tensor.num_elements() == 0) return scales;
    uint64_t last = 0;
    bool fits = true;
    for (unsigned int dim = 0; dim < 2; ++dim) {
        require(scales.strides[dim] >= 0, ncclInvalidArgument, "{}[{}] is {}, allowed: 0 and more", name, dim,
                scales.strides[dim]);
        uint64_t step = 0;
        fits = fits &&
               !__builtin_mul_overflow(tensor.sizes[dim] - 1, static_cast<uint64_t>(scales.strides[dim]), &step) &&
               !__builtin_add_overflow(last, step, &last);
    }
    require(fits && last < uint64_t{1} << 60, ncclInvalidArgument,
            "{} is {}, {}, which is too far for a tensor of {} x {} elements", name, caller[0], caller[1],
            tensor.sizes[0], tensor.sizes[1]);
    span = (last + 1) * kScaleBytes;
    return scales;
}

}  // namespace

ElasticDispatch read_elastic_dispatch(Communicator& communicator, const crossdockElasticDispatch_t& call,
                                      const ElasticSizes& sizes, CallMemory& memory) {
    const Reader reader(communicator, memory);
    ElasticDispatch read{
        reader.required(call.tokens, "call->tokens"), reader.required(call.out_tokens, "call->out_tokens"), {}};
    ElasticDispatchArgs& args = read.args;
    expect_carried(read.tokens);
    expect_dtype(read.out_tokens, {read.tokens.dtype});
    expect_shape(read.out_tokens, {kAnySize, kAnySize}, "[rows, hidden]");
    expect_shape(read.tokens, {sizes.tokens, sizes.tokens == 0 ? kAnySize : read.out_tokens.sizes[1]},
                 "[rows of topk_idx, hidden of call->out_tokens]");
    expect_aligned(read.tokens);
    expect_countable(read.out_tokens);
    memory.reads(read.tokens);
    memory.writes(read.out_tokens);
    const size_t rows = read.out_tokens.sizes[0];
    args.rows = static_cast<uint32_t>(rows);

    require((call.scales == nullptr) == (call.out_scales == nullptr), ncclInvalidArgument,
            "one of call->scales and call->out_scales is NULL, expected both or none");
    if (call.scales != nullptr) {
        const Tensor scales = reader.required(call.scales, "call->scales");
        const Tensor out_scales = reader.required(call.out_scales, "call->out_scales");
        expect_dtype(scales, {ncclFloat32, ncclInt32, ncclUint32});
        expect_dtype(out_scales, {scales.dtype});
        expect_shape(out_scales, {rows, kAnySize}, "[rows of call->out_tokens, scales per token]");
        expect_shape(scales, {sizes.tokens, sizes.tokens == 0 ? kAnySize : out_scales.sizes[1]},
                     "[rows of topk_idx, scales per token of call->out_scales]");
        args.num_scales = static_cast<uint32_t>(std::min<size_t>(out_scales.sizes[1], UINT32_MAX));
        size_t span = 0;
        args.scales = read_scales(scales, call.scale_strides, "call->scale_strides", span);
        memory.reads(scales.name, scales.data, span);
        args.out_scales = read_scales(out_scales, call.out_scale_strides, "call->out_scale_strides", span);
        memory.writes(out_scales.name, out_scales.data, span);
    }
    expect_rows(read.out_tokens, sizes, args.num_scales * kScaleBytes);

    if (call.topk_weights != nullptr) {
        const Tensor weights = reader.required(call.topk_weights, "call->topk_weights");
        expect_dtype(weights, {ncclFloat32});
        expect_shape(weights, {sizes.tokens, sizes.topk}, "[rows of topk_idx, the handle's top-k]");
        memory.reads(weights);
        args.topk_weights = reinterpret_cast<const float*>(weights.data);
        args.with_weights = true;
    }
    require(call.topk_weights != nullptr || call.out_topk_weights == nullptr, ncclInvalidArgument,
            "call->out_topk_weights is not NULL, expected NULL without call->topk_weights");
    const bool by_expert = sizes.by_expert;
    args.out_weights =
        by_expert ? reader.optional_output<float>(call.out_topk_weights, "call->out_topk_weights", ncclFloat32, {rows},
                                                  "[rows of call->out_tokens]")
                  : reader.optional_output<float>(call.out_topk_weights, "call->out_topk_weights", ncclFloat32,
                                                  {rows, sizes.topk}, "[rows of call->out_tokens, the handle's top-k]");
    if (call.out_topk_idx != nullptr) {
        require(!by_expert, ncclInvalidArgument,
                "call->out_topk_idx is not NULL, expected NULL in expert-major layout");
        const Tensor ids = reader.required(call.out_topk_idx, "call->out_topk_idx");
        expect_dtype(ids, {ncclInt32, ncclInt64});
        expect_shape(ids, {rows, sizes.topk}, "[rows of call->out_tokens, the handle's top-k]");
        memory.writes(ids);
        args.out_topk_idx = ids.data;
        args.ids_are_64_bit = ids.dtype == ncclInt64;
    }
    if (call.sources != nullptr) {
        const Tensor sources = reader.required(call.sources, "call->sources");
        expect_dtype(sources, {ncclInt32});
        expect_shape(sources, {kAnySize, sizes.topk + 2}, "[received tokens, the handle's top-k + 2]");
        expect_countable(sources);
        memory.writes(sources);
        args.sources = reinterpret_cast<int32_t*>(sources.data);
        args.source_rows = static_cast<uint32_t>(sources.sizes[0]);
    }
    const auto counts = [&](const ncclEpTensor_t* caller, const char* name) {
        return reader.optional_output<int32_t>(caller, name, ncclInt32, {sizes.local_experts}, "[experts per rank]");
    };
    args.rank_ends =
        reader.optional_output<int32_t>(call.rank_ends, "call->rank_ends", ncclInt32, {sizes.ranks}, "[ranks]");
    args.expert_counts = counts(call.expert_counts, "call->expert_counts");
    args.expert_ends = counts(call.expert_ends, "call->expert_ends");
    args.statistics = counts(call.statistics, "call->statistics");

    if (call.topk_idx_copy != nullptr) {
        const Tensor copy = reader.required(call.topk_idx_copy, "call->topk_idx_copy");
        require(sizes.id_type.has_value(), ncclInvalidArgument,
                "call->topk_idx_copy is not NULL, expected NULL in HT mode, where ncclEpUpdateHandle copies topk_idx");
        expect_dtype(copy, {*sizes.id_type});
        expect_shape(copy, {sizes.tokens, sizes.topk}, "[rows of topk_idx, the handle's top-k]");
        memory.writes(copy);
        args.topk_idx_copy = copy.data;
    }
    require(call.alignment <= INT32_MAX, ncclInvalidArgument, "call->alignment is {}, allowed: 0..{}", call.alignment,
            INT32_MAX);
    require(call.zero_padding == 0 || (call.zero_padding == 1 && by_expert), ncclInvalidArgument,
            "call->zero_padding is {}, allowed: 0, and in expert-major layout 1", call.zero_padding);
    require(call.own_weights_only == 0 || (call.own_weights_only == 1 && !by_expert), ncclInvalidArgument,
            "call->own_weights_only is {}, allowed: 0, and in layouts by rank 1", call.own_weights_only);
    args.alignment = std::max(call.alignment, 1u);
    args.origin_stride = call.origin_stride;
    args.zero_padding = call.zero_padding != 0;
    args.own_weights_only = call.own_weights_only != 0;
    memory.expect_apart();
    return read;
}

ElasticCombine read_elastic_combine(Communicator& communicator, const crossdockElasticCombine_t& call,
                                    const ElasticSizes& sizes, CallMemory& memory) {
    const Reader reader(communicator, memory);
    ElasticCombine read{
        reader.required(call.tokens, "call->tokens"), reader.required(call.out_tokens, "call->out_tokens"), {}};
    ElasticCombineArgs& args = read.args;
    expect_dtype(read.tokens, {ncclBfloat16, ncclFloat16, ncclFloat32});
    expect_dtype(read.out_tokens, {read.tokens.dtype});
    expect_shape(read.tokens, {kAnySize, kAnySize}, "[received rows, hidden]");
    expect_shape(read.out_tokens, {sizes.tokens, read.tokens.sizes[1]}, "[rows of topk_idx, hidden of call->tokens]");
    expect_countable(read.tokens);
    expect_rows(read.tokens, sizes, 0);
    expect_aligned(read.out_tokens);
    memory.reads(read.tokens);
    memory.writes(read.out_tokens);
    const size_t rows = read.tokens.sizes[0];
    args.rows = static_cast<uint32_t>(rows);

    require((call.topk_weights == nullptr) == (call.out_topk_weights == nullptr), ncclInvalidArgument,
            "one of call->topk_weights and call->out_topk_weights is NULL, expected both or none");
    if (call.topk_weights != nullptr) {
        const Tensor weights = reader.required(call.topk_weights, "call->topk_weights");
        expect_dtype(weights, {ncclFloat32});
        if (sizes.by_expert) {
            expect_shape(weights, {rows}, "[rows of call->tokens]");
        } else {
            expect_shape(weights, {rows, sizes.topk}, "[rows of call->tokens, the handle's top-k]");
        }
        memory.reads(weights);
        args.weights = reinterpret_cast<const float*>(weights.data);
        args.with_weights = true;
        args.out_weights =
            reader.optional_output<float>(call.out_topk_weights, "call->out_topk_weights", ncclFloat32,
                                          {sizes.tokens, sizes.topk}, "[rows of topk_idx, the handle's top-k]");
    }
    static constexpr const char* kBiases[] = {"call->bias[0]", "call->bias[1]"};
    for (size_t i = 0; i < std::size(kBiases); ++i) {
        if (call.bias[i] == nullptr) continue;
        const Tensor bias = reader.required(call.bias[i], kBiases[i]);
        expect_dtype(bias, {read.tokens.dtype});
        expect_shape(bias, {sizes.tokens, read.tokens.sizes[1]}, "[rows of topk_idx, hidden of call->tokens]");
        expect_aligned(bias);
        memory.reads(bias);
        args.bias[i] = bias.data;
    }
    memory.expect_apart();
    return read;
}

}  // namespace crossdock
