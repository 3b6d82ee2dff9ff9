// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/elastic.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "conformance/support/modes.h"
#include "reference/formats.h"

namespace crossdock::testing {
namespace {

using reference::ElasticArrivals;
using Bytes = std::vector<std::byte>;

// What random values are for.
enum class Use : uint64_t { kRouting, kCommon, kOwn, kRow, kScale, kWeight, kSummand, kGradient, kBias };

uint64_t seed_of(uint64_t seed, uint64_t a, uint64_t b = 0) {
    return reference::random_bits(reference::random_bits(seed, a), b);
}
uint64_t seed_of(uint64_t seed, Use use, uint64_t a = 0, uint64_t b = 0) {
    return seed_of(seed_of(seed, static_cast<uint64_t>(use) + 1'000'000), a, b);
}

Bytes random_bytes(uint64_t seed, size_t num) {
    Bytes bytes(num);
    for (size_t at = 0; at < num; at += 8) {
        const uint64_t word = reference::random_bits(seed, at);
        std::memcpy(bytes.data() + at, &word, std::min<size_t>(8, num - at));
    }
    return bytes;
}

// Numbers of different magnitudes, so that another order of additions gives other bits.
Bytes random_row(uint64_t seed, ncclDataType_t type, size_t hidden) {
    Random random(seed);
    std::vector<float> values(hidden);
    for (float& value : values)
        value = static_cast<float>((2 * random.unit() - 1) * std::ldexp(1.0, random.between(-6, 6)));
    return reference::encoded(type, values);
}

float random_weight(uint64_t seed) { return static_cast<float>(seed % 4096) / 64 - 20; }

}  // namespace

void on_each_elastic_backend(ncclEpAlgorithm_t mode, const std::vector<Backend>& kinds,
                             const std::function<void(const BackendSpec&)>& run) {
    is_ht(mode) ? on_each_backend(kinds, run) : on_each_backend_as_one_team(kinds, run);
}

int ElasticShape::most_rows() const {
    return num_ranks * max_tokens * std::min(topk, local_experts) + local_experts * static_cast<int>(alignment - 1);
}

std::string ElasticShape::describe() const {
    return fmt::format("{} ranks, {} experts each, top-{}, {} tokens, {} granules, {} scales, alignment {}{}{}",
                       num_ranks, local_experts, topk, max_tokens, most_granules, most_scales, alignment,
                       is_eager ? ", eager" : "", invariant ? ", invariant" : "");
}

ElasticShape random_elastic_shape(ncclEpAlgorithm_t mode, uint64_t seed, int num_ranks) {
    Random random(seed_of(seed, Use::kCommon));
    ElasticShape shape{.mode = mode, .seed = seed, .num_ranks = num_ranks};
    shape.local_experts = random.pick({1, 2, 3, 5, 8, 20, 70});
    shape.topk = std::min(random.chance(10) ? random.between(9, 64) : random.between(1, 8), shape.num_experts());
    shape.max_tokens = random.chance(20) ? random.between(30, 70) : random.between(1, 16);
    shape.most_granules = static_cast<size_t>(random.pick({1, 2, 5, 8, 33, 64}));
    shape.most_scales = static_cast<size_t>(random.pick({0, 0, 1, 3, 7, 56}));
    shape.alignment = random.pick({1u, 1u, 2u, 4u, 6u, 16u});
    shape.is_eager = random.chance(50);
    shape.invariant = random.chance(30);
    return shape;
}

ncclEpGroupConfig_t elastic_config(RankContext& context, const ElasticShape& shape, uint64_t timeout_ns) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = shape.mode;
    config.num_experts = static_cast<unsigned>(shape.num_experts());
    config.max_dispatch_tokens_per_rank = static_cast<unsigned>(shape.max_tokens);
    config.max_token_bytes = static_cast<unsigned>(16 * (shape.most_granules + (shape.most_scales + 3) / 4));
    config.timeout_ns = timeout_ns != 0 ? timeout_ns : context.is_simulated() ? 1'000'000'000 : 60'000'000'000;
    if (!is_ht(shape.mode)) return config;
    config.num_topk = static_cast<unsigned>(shape.topk);
    if (!shape.is_eager) config.max_recv_tokens_per_rank = static_cast<unsigned>(shape.most_rows());
    return config;
}

// ---- Expected ----

void Expected::set(size_t at, const void* source, size_t num) {
    std::memcpy(bytes_.data() + at, source, num);
    std::fill_n(is_defined_.begin() + static_cast<ptrdiff_t>(at), num, char{1});
}

void Expected::undefined(size_t at, size_t num) {
    std::fill_n(is_defined_.begin() + static_cast<ptrdiff_t>(at), num, char{0});
}

void Expected::check(RankContext& context, const Buffer& buffer, size_t row_bytes, const char* name) const {
    const Bytes seen = buffer.read();
    buffer.check_guards(name);
    Bytes defined(seen.size());
    for (size_t at = 0; at < seen.size(); ++at) defined[at] = is_defined_[at] != 0 ? seen[at] : std::byte{0};
    context.add_to_digest(defined.data(), defined.size());
    for (size_t at = 0; at < bytes_.size(); ++at) {
        if (is_defined_[at] == 0 || seen[at] == bytes_[at]) continue;
        RANK_CHECK(context, false, "{}: row {}, byte {} is {:#04x}, expected {:#04x}{}", name, at / row_bytes,
                   at % row_bytes, static_cast<int>(seen[at]), static_cast<int>(bytes_[at]),
                   seen[at] == kPoison ? " (was not written)" : "");
        throw StopProgram("an output differs");
    }
}

ElasticStrides ElasticStrides::random(Random& random, size_t rows, size_t columns) {
    const size_t spare = static_cast<size_t>(random.below(4));
    const auto of = [](size_t row, size_t column) {
        return ElasticStrides{{static_cast<int64_t>(row), static_cast<int64_t>(column)}, row, column};
    };
    switch (random.below(4)) {
        case 0:
            return {{0, 0}, columns, 1};
        case 1:
            return of(columns + spare, 1);
        case 2:
            return of(1, rows + spare + 1);
        default:
            return of(2 * columns + spare, 2);
    }
}

// ---- Dispatch ----

ElasticDispatchCall::ElasticDispatchCall(RankContext& context, ElasticHandle& handle, uint64_t step,
                                         const ElasticForm& form)
    : context_(context),
      handle_(handle),
      routing_([&] {
          const ElasticShape& shape = handle.shape();
          Random common(seed_of(handle.seed(), Use::kRouting, step));
          reference::ElasticRouting routing = handle.routing();
          routing.alignment = !routing.by_expert  ? common.pick({1u, 4u, 100u})
                              : is_ht(shape.mode) ? shape.alignment
                                                  : common.pick({1u, shape.alignment, 6u});
          return routing;
      }()),
      seed_(seed_of(handle.seed(), step)),
      tensors_(context, handle.stream()) {
    handle.routing().alignment = routing_.alignment;
    const ElasticShape& shape = handle.shape();
    Random common(seed_of(seed_, Use::kCommon));
    Random random(seed_of(seed_, Use::kOwn, static_cast<uint64_t>(context.rank())));
    type_ = form.type.value_or(common.pick({ncclBfloat16, ncclFloat16, ncclFloat32, ncclUint8, ncclFloat8e4m3}));
    const size_t granules = static_cast<size_t>(common.between(1, static_cast<int>(shape.most_granules)));
    row_bytes_ = 16 * form.granules.value_or(granules);
    num_scales_ = form.scales.value_or(static_cast<size_t>(common.between(0, static_cast<int>(shape.most_scales))));
    const bool with_weights = form.weights.value_or(common.chance(60));
    tokens_ = static_cast<size_t>(routing_.num_tokens(context.rank()));
    const ElasticArrivals arrivals = reference::elastic_arrivals(routing_, context.rank());
    rows_ = static_cast<size_t>(arrivals.num_rows + (random.chance(50) ? 0 : random.below(9)));
    make_inputs(common, random, with_weights);
    make_outputs(random);
    RANK_OK(context, crossdockHandleSetTag(handle.get(), form.tag));
}

Bytes ElasticDispatchCall::row_of(int rank, int token) const {
    return random_bytes(seed_of(seed_, Use::kRow, static_cast<uint64_t>(rank), static_cast<uint64_t>(token)),
                        row_bytes_);
}
uint32_t ElasticDispatchCall::scale_of(int rank, int token, size_t column) const {
    const uint64_t at = static_cast<uint64_t>(token) * 1000 + column;
    return static_cast<uint32_t>(seed_of(seed_, Use::kScale, static_cast<uint64_t>(rank), at));
}
float ElasticDispatchCall::weight_of(int rank, int token, size_t column) const {
    const uint64_t at = static_cast<uint64_t>(token) * 1000 + column;
    return random_weight(seed_of(seed_, Use::kWeight, static_cast<uint64_t>(rank), at));
}
float ElasticDispatchCall::weight_of_expert(const ElasticArrivals::Token& came, size_t column) const {
    float sum = 0;
    for (size_t k = 0; k < came.rows.size(); ++k) {
        if (came.rows[k] == came.rows[column]) sum += weight_of(came.source, came.token, k);
    }
    return sum;
}

void ElasticDispatchCall::make_inputs(Random& common, Random& random, bool with_weights) {
    const int rank = context_.rank();
    const size_t topk = static_cast<size_t>(routing_.topk);
    Buffer& given = tensors_.buffer(tokens_ * row_bytes_);
    Bytes all;
    for (size_t token = 0; token < tokens_; ++token) {
        const Bytes row = row_of(rank, static_cast<int>(token));
        all.insert(all.end(), row.begin(), row.end());
    }
    given.write(all);
    const size_t hidden = row_bytes_ / reference::type_bytes(type_);
    call_.tokens = tensors_.tensor(type_, {tokens_, hidden}, given);

    const ncclDataType_t scale_type = common.pick({ncclFloat32, ncclInt32, ncclUint32});
    const ElasticStrides strides = ElasticStrides::random(random, tokens_, num_scales_);
    out_strides_ = ElasticStrides::random(random, rows_, num_scales_);
    scales_ = &tensors_.buffer(4 * out_strides_.elements(rows_, num_scales_));
    if (num_scales_ > 0) {
        std::vector<uint32_t> values(strides.elements(tokens_, num_scales_), 0xEEEEEEEE);
        for (size_t token = 0; token < tokens_; ++token) {
            for (size_t i = 0; i < num_scales_; ++i)
                values[strides.at(token, i)] = scale_of(rank, static_cast<int>(token), i);
        }
        Buffer& scales = tensors_.buffer(4 * values.size());
        scales.write(values.data(), scales.bytes());
        call_.scales = tensors_.tensor(scale_type, {tokens_, num_scales_}, scales);
        call_.out_scales = tensors_.tensor(scale_type, {rows_, num_scales_}, *scales_);
        std::copy_n(strides.given, 2, call_.scale_strides);
        std::copy_n(out_strides_.given, 2, call_.out_scale_strides);
    }
    if (with_weights) {
        std::vector<float> values;
        for (size_t i = 0; i < tokens_ * topk; ++i)
            values.push_back(weight_of(rank, static_cast<int>(i / topk), i % topk));
        Buffer& weights = tensors_.buffer(4 * values.size());
        weights.write(values.data(), weights.bytes());
        call_.topk_weights = tensors_.tensor(ncclFloat32, {tokens_, topk}, weights);
    }
    const bool may_be_unsaid = routing_.alignment == 1 || (routing_.by_expert && is_ht(handle_.shape().mode));
    call_.alignment = may_be_unsaid && random.chance(50) ? 0 : routing_.alignment;
    call_.origin_stride = static_cast<unsigned>(random.pick({0, handle_.shape().max_tokens, 100'000}));
    call_.zero_padding = routing_.by_expert && random.chance(60) ? 1 : 0;
    call_.own_weights_only = !routing_.by_expert && random.chance(40) ? 1 : 0;
}

void ElasticDispatchCall::make_outputs(Random& random) {
    const size_t topk = static_cast<size_t>(routing_.topk);
    const size_t experts = static_cast<size_t>(routing_.local_experts);
    const size_t ranks = static_cast<size_t>(routing_.num_ranks);
    const bool by_expert = routing_.by_expert;
    const auto is_wanted = [&] { return random.chance(70); };
    const auto numbers = [&](size_t num) { return &tensors_.buffer(4 * num); };
    received_ = &tensors_.buffer(rows_ * row_bytes_);
    call_.out_tokens = tensors_.tensor(type_, {rows_, row_bytes_ / reference::type_bytes(type_)}, *received_);
    weights_ = numbers(rows_ * (by_expert ? 1 : topk));
    if (call_.topk_weights != nullptr && is_wanted())
        call_.out_topk_weights = tensors_.tensor(
            ncclFloat32, by_expert ? std::vector<size_t>{rows_} : std::vector<size_t>{rows_, topk}, *weights_);
    ids_are_64_bit_ = random.chance(50);
    ids_ = numbers(rows_ * topk * (ids_are_64_bit_ ? 2 : 1));
    if (!by_expert && is_wanted())
        call_.out_topk_idx = tensors_.tensor(ids_are_64_bit_ ? ncclInt64 : ncclInt32, {rows_, topk}, *ids_);
    const size_t came = reference::elastic_arrivals(routing_, context_.rank()).tokens.size();
    const size_t source_rows = came + (random.chance(50) ? 0 : static_cast<size_t>(random.below(5)));
    sources_ = numbers(source_rows * (topk + 2));
    if (is_wanted()) call_.sources = tensors_.tensor(ncclInt32, {source_rows, topk + 2}, *sources_);
    rank_ends_ = numbers(ranks);
    if (is_wanted()) call_.rank_ends = tensors_.tensor(ncclInt32, {ranks}, *rank_ends_);
    counts_ = numbers(experts);
    if (is_wanted()) call_.expert_counts = tensors_.tensor(ncclInt32, {experts}, *counts_);
    ends_ = numbers(experts);
    if (is_wanted()) call_.expert_ends = tensors_.tensor(ncclInt32, {experts}, *ends_);
    statistics_ = numbers(experts);
    const std::vector<int32_t> before(experts, 1000);
    statistics_->write(before.data(), statistics_->bytes());
    if (is_wanted()) call_.statistics = tensors_.tensor(ncclInt32, {experts}, *statistics_);
}

void ElasticDispatchCall::shrink(size_t rows) {
    const auto shrink = [&](const ncclEpTensor_t*& given, const Buffer& buffer) {
        if (given == nullptr) return;
        std::vector<size_t> sizes(given->sizes, given->sizes + given->ndim);
        sizes[0] = rows;
        given = tensors_.tensor(given->datatype, sizes, buffer);
    };
    shrink(call_.out_tokens, *received_);
    shrink(call_.out_scales, *scales_);
    shrink(call_.out_topk_weights, *weights_);
    shrink(call_.out_topk_idx, *ids_);
}

void ElasticDispatchCall::check_untouched_from(size_t row) const {
    const auto check = [&](const Buffer& buffer, const char* name) {
        Expected expected(buffer.bytes());
        expected.untouched();
        const size_t row_bytes = rows_ == 0 ? 1 : buffer.bytes() / rows_;
        expected.undefined(0, row * row_bytes);
        expected.check(context_, buffer, row_bytes, name);
    };
    check(*received_, "out_tokens behind the last row");
    check(*weights_, "out_topk_weights behind the last row");
    check(*ids_, "out_topk_idx behind the last row");
}

ncclResult_t ElasticDispatchCall::run() {
    handle_.limit_sms(seed_);
    Fleeting<crossdockElasticDispatch_t> copy(call_);
    const ncclResult_t result = crossdockElasticDispatch(handle_.get(), copy.get(), handle_.stream());
    if (result == ncclSuccess) handle_.note_dispatched(rows_);
    return result;
}

void ElasticDispatchCall::check() const {
    const ElasticArrivals arrivals = reference::elastic_arrivals(routing_, context_.rank());
    const crossdockElasticDispatch_t& call = call_;
    const bool by_expert = routing_.by_expert;
    const size_t topk = static_cast<size_t>(routing_.topk), line = topk + 2;
    Expected rows(received_->bytes()), scales(scales_->bytes()), weights(weights_->bytes()), ids(ids_->bytes());
    Expected sources(sources_->bytes());
    scales.untouched();  // between the elements
    for (size_t row = 0; row < rows_; ++row) {
        for (size_t i = 0; i < num_scales_; ++i) scales.undefined(4 * out_strides_.at(row, i), 4);
    }
    const auto set_row = [&](int row, const Bytes& bytes, const auto& scale) {
        rows.set(static_cast<size_t>(row) * row_bytes_, bytes.data(), row_bytes_);
        for (size_t i = 0; i < num_scales_; ++i)
            scales.set_element(out_strides_.at(static_cast<size_t>(row), i), scale(i));
    };
    const auto set_id = [&](size_t index, int id) {
        ids_are_64_bit_ ? ids.set_element(index, int64_t{id}) : ids.set_element(index, int32_t{id});
    };
    for (size_t n = 0; n < arrivals.tokens.size(); ++n) {
        const ElasticArrivals::Token& came = arrivals.tokens[n];
        for (const int row : came.distinct())
            set_row(row, row_of(came.source, came.token),
                    [&](size_t i) { return scale_of(came.source, came.token, i); });
        sources.set_element(
            n * line, static_cast<uint32_t>(came.source) * call.origin_stride + static_cast<uint32_t>(came.token));
        sources.set_element(n * line + 1, static_cast<int32_t>(n));
        for (size_t k = 0; k < topk; ++k) {
            sources.set_element(n * line + 2 + k, by_expert ? came.rows[k] : -1);
            if (!by_expert) {
                const bool is_wanted = came.experts[k] >= 0 || call.own_weights_only == 0;
                weights.set_element(n * topk + k, is_wanted ? weight_of(came.source, came.token, k) : 0.0f);
                set_id(n * topk + k, came.experts[k]);
            } else if (came.rows[k] >= 0) {
                weights.set_element(static_cast<size_t>(came.rows[k]), weight_of_expert(came, k));
            }
        }
    }
    for (size_t i = arrivals.tokens.size() * topk; !by_expert && i < rows_ * topk; ++i) set_id(i, -1);
    for (size_t expert = 0; call.zero_padding != 0 && expert + 1 < arrivals.starts.size(); ++expert) {
        const int next = std::min(arrivals.starts[expert + 1], arrivals.num_rows);
        for (int row = arrivals.expert_ends[expert]; row < next; ++row) {
            set_row(row, Bytes(row_bytes_), [](size_t) { return uint32_t{0}; });
            weights.set_element(static_cast<size_t>(row), 0.0f);
        }
    }
    rows.check(context_, *received_, row_bytes_, "out_tokens");
    if (num_scales_ > 0) scales.check(context_, *scales_, 4, "out_scales, by elements");
    if (call.out_topk_weights != nullptr) weights.check(context_, *weights_, 4, "out_topk_weights, by elements");
    if (call.out_topk_idx != nullptr) ids.check(context_, *ids_, topk * (ids_are_64_bit_ ? 8 : 4), "out_topk_idx");
    if (call.sources != nullptr) sources.check(context_, *sources_, 4 * line, "sources");
    check_numbers();
}

void ElasticDispatchCall::check_numbers() const {
    const ElasticArrivals arrivals = reference::elastic_arrivals(routing_, context_.rank());
    const auto check = [&](const ncclEpTensor_t* asked, const Buffer& buffer, const std::vector<int>& numbers, int more,
                           const char* name) {
        Expected expected(buffer.bytes());
        for (size_t i = 0; i < numbers.size(); ++i) expected.set_element(i, numbers[i] + more);
        if (asked != nullptr) expected.check(context_, buffer, 4, name);
    };
    const crossdockElasticDispatch_t& call = call_;
    check(call.rank_ends, *rank_ends_, arrivals.rank_ends, 0, "rank_ends");
    check(call.expert_counts, *counts_, arrivals.counts, 0, "expert_counts");
    check(call.expert_ends, *ends_, arrivals.expert_ends, 0, "expert_ends");
    check(call.statistics, *statistics_, arrivals.counts, 1000, "statistics");
}

// ---- Combine ----

ElasticCombineCall::ElasticCombineCall(RankContext& context, ElasticHandle& handle, uint64_t step,
                                       const ElasticForm& form)
    : context_(context),
      handle_(handle),
      routing_(handle.routing()),
      arrivals_(handle.arrivals()),
      seed_(seed_of(handle.seed(), step)),
      tensors_(context, handle.stream()) {
    const ElasticShape& shape = handle.shape();
    Random common(seed_of(seed_, Use::kCommon));
    Random random(seed_of(seed_, Use::kOwn, static_cast<uint64_t>(context.rank())));
    type_ = form.type.value_or(common.pick({ncclBfloat16, ncclBfloat16, ncclFloat16, ncclFloat32}));
    const size_t granules = static_cast<size_t>(common.between(1, static_cast<int>(shape.most_granules)));
    row_bytes_ = 16 * form.granules.value_or(granules);
    hidden_ = row_bytes_ / reference::type_bytes(type_);
    with_weights_ = form.weights.value_or(common.chance(50));
    RANK_OK(context, crossdockHandleSetTag(handle.get(), form.tag));
    tokens_ = static_cast<size_t>(routing_.num_tokens(context.rank()));
    const ElasticArrivals& arrivals = arrivals_[static_cast<size_t>(context.rank())];
    const size_t rows = handle.dispatched_rows();

    Buffer& given = tensors_.buffer(rows * row_bytes_);
    Bytes all(given.bytes(), kPoison);  // padding, too
    for (const ElasticArrivals::Token& came : arrivals.tokens) {
        for (const int row : came.distinct()) {
            const Bytes bytes = row_of(context.rank(), row);
            std::memcpy(all.data() + static_cast<size_t>(row) * row_bytes_, bytes.data(), row_bytes_);
        }
    }
    given.write(all);
    call_.tokens = tensors_.tensor(type_, {rows, hidden_}, given);
    const size_t topk = static_cast<size_t>(routing_.topk), columns = routing_.by_expert ? 1 : topk;
    returned_ = &tensors_.buffer(4 * tokens_ * topk);
    if (with_weights_) {
        std::vector<float> values;
        for (size_t i = 0; i < rows * columns; ++i)
            values.push_back(weight_of(context.rank(), static_cast<int>(i / columns), i % columns));
        Buffer& weights = tensors_.buffer(4 * values.size());
        weights.write(values.data(), weights.bytes());
        call_.topk_weights = tensors_.tensor(
            ncclFloat32, routing_.by_expert ? std::vector<size_t>{rows} : std::vector<size_t>{rows, topk}, weights);
        call_.out_topk_weights = tensors_.tensor(ncclFloat32, {tokens_, topk}, *returned_);
    }
    num_biases_ = static_cast<size_t>(random.below(3));
    for (size_t i = 0; i < num_biases_; ++i) {
        Bytes bytes;
        for (size_t token = 0; token < tokens_; ++token) {
            const Bytes row = bias_of(i, token);
            bytes.insert(bytes.end(), row.begin(), row.end());
        }
        Buffer& bias = tensors_.buffer(bytes.size());
        bias.write(bytes);
        call_.bias[num_biases_ == 1 ? static_cast<size_t>(random.below(2)) : i] =
            tensors_.tensor(type_, {tokens_, hidden_}, bias);
    }
    combined_ = &tensors_.buffer(tokens_ * row_bytes_);
    call_.out_tokens = tensors_.tensor(type_, {tokens_, hidden_}, *combined_);
}

Bytes ElasticCombineCall::row_of(int rank, int row) const {
    return random_row(seed_of(seed_, Use::kSummand, static_cast<uint64_t>(rank), static_cast<uint64_t>(row)), type_,
                      hidden_);
}
float ElasticCombineCall::weight_of(int rank, int row, size_t column) const {
    const uint64_t at = static_cast<uint64_t>(row) * 1000 + column;
    return random_weight(seed_of(seed_, Use::kGradient, static_cast<uint64_t>(rank), at));
}
Bytes ElasticCombineCall::bias_of(size_t index, size_t token) const {
    const uint64_t at = static_cast<uint64_t>(context_.rank()) * 10 + index;
    return random_row(seed_of(seed_, Use::kBias, at, token), type_, hidden_);
}
float ElasticCombineCall::returned_weight(size_t token, size_t column) const {
    const int64_t id = routing_.id(context_.rank(), static_cast<int>(token), static_cast<int>(column));
    if (id < 0) return 0;
    const int rank = static_cast<int>(id / routing_.local_experts);
    const ElasticArrivals& there = arrivals_[static_cast<size_t>(rank)];
    const int n = there.find(context_.rank(), static_cast<int>(token));
    const int row = there.tokens[static_cast<size_t>(n)].rows[column];
    return row < handle_.shape().budget ? weight_of(rank, row, routing_.by_expert ? 0 : column) : 0.0f;
}

ncclResult_t ElasticCombineCall::run() {
    handle_.limit_sms(seed_);
    Fleeting<crossdockElasticCombine_t> copy(call_);
    return crossdockElasticCombine(handle_.get(), copy.get(), handle_.stream());
}

void ElasticCombineCall::check() const {
    const size_t topk = static_cast<size_t>(routing_.topk);
    Expected sums(combined_->bytes()), returned(returned_->bytes());
    for (size_t token = 0; token < tokens_; ++token) {
        std::vector<Bytes> biases;
        for (size_t i = 0; i < num_biases_; ++i) biases.push_back(bias_of(i, token));
        const auto row = [&](int rank, int number) {
            return number < handle_.shape().budget ? row_of(rank, number) : Bytes(row_bytes_);
        };
        const int rank = context_.rank(), number = static_cast<int>(token);
        const Bytes sum =
            handle_.shape().invariant
                ? reference::elastic_sum_of_choices(routing_, arrivals_, rank, number, type_, hidden_, biases, row)
                : reference::elastic_sum(routing_, arrivals_, rank, number, type_, hidden_, biases,
                                         handle_.lsa_team_size(), row);
        sums.set(token * row_bytes_, sum.data(), row_bytes_);
        for (size_t k = 0; k < topk; ++k) returned.set_element(token * topk + k, returned_weight(token, k));
    }
    sums.check(context_, *combined_, row_bytes_, "out_tokens of a combine");
    if (with_weights_) returned.check(context_, *returned_, 4 * topk, "out_topk_weights of a combine");
}

// ---- Handles ----

ElasticHandle::ElasticHandle(RankContext& context, ncclEpGroup_t group, const ElasticShape& shape, bool by_expert,
                             uint64_t seed)
    : context_(context), shape_(shape), seed_(seed), stream_(context.make_stream()) {
    routing_.num_ranks = shape.num_ranks;
    routing_.local_experts = shape.local_experts;
    routing_.topk = shape.topk;
    routing_.by_expert = by_expert;
    if (is_ht(shape.mode)) lsa_team_size_ = static_cast<int>(traffic_of(context, group).lsa_team_size);
    Fleeting<ncclEpHandleConfig_t> config{NCCL_EP_HANDLE_CONFIG_INIT};
    const bool is_aligned = is_ht(shape.mode) && by_expert;
    const bool is_set = seed % 2 == 0 || !std::has_single_bit(shape.alignment);  // later, instead of here
    if (is_aligned && !is_set) config->dispatch_output_per_expert_alignment = shape.alignment;
    const ncclEpLayout_t layout = by_expert           ? NCCL_EP_LAYOUT_EXPERT_MAJOR
                                  : is_ht(shape.mode) ? NCCL_EP_LAYOUT_FLAT
                                                      : NCCL_EP_LAYOUT_RANK_MAJOR;
    const ncclResult_t made = ncclEpInitHandle(&handle_, group, layout, config.get(), shape.topk, nullptr);
    if (made == ncclRemoteError && shape.peers_may_die) throw StopProgram("no handle without the dead");
    RANK_OK(context, made);
    if (is_aligned && is_set) RANK_OK(context, crossdockHandleSetAlignment(handle_, shape.alignment));
}

std::vector<ElasticArrivals> ElasticHandle::arrivals() const {
    std::vector<ElasticArrivals> all;
    for (int rank = 0; rank < routing_.num_ranks; ++rank) all.push_back(reference::elastic_arrivals(routing_, rank));
    return all;
}

void ElasticHandle::route(uint64_t step) {
    Random random(seed_of(seed_, Use::kRouting, step, 1));
    const int percent_of_none = random.pick({0, 0, 10, 60, 100});
    const bool repeats = random.chance(40);
    const int named = repeats && random.chance(50) ? random.between(1, shape_.num_experts()) : shape_.num_experts();
    const int empty = random.chance(30) ? random.below(shape_.num_ranks) : -1;
    std::vector<std::vector<int64_t>> ids(static_cast<size_t>(shape_.num_ranks));
    for (int rank = 0; rank < shape_.num_ranks; ++rank) {
        const int tokens = rank == empty ? 0 : random.between(0, shape_.max_tokens);
        for (int token = 0; token < tokens; ++token) {
            std::vector<int64_t> chosen;
            for (int k = 0; k < shape_.topk; ++k) {
                int64_t id = random.below(named);
                while (!repeats && std::find(chosen.begin(), chosen.end(), id) != chosen.end()) id = (id + 1) % named;
                chosen.push_back(id);
            }
            for (const int64_t id : chosen)
                ids[static_cast<size_t>(rank)].push_back(random.chance(percent_of_none) ? -1 : id);
        }
    }
    route(std::move(ids), random.chance(50));
}

void ElasticHandle::route(std::vector<std::vector<int64_t>> ids, bool are_64_bit) {
    routing_.ids = std::move(ids);
    ids_are_64_bit_ = are_64_bit;
    dispatched_rows_.reset();
    const std::vector<int64_t>& own = routing_.ids[static_cast<size_t>(context_.rank())];
    const std::vector<int32_t> narrow(own.begin(), own.end());
    ids_.emplace(context_, stream_, own.size() * (are_64_bit ? 8 : 4));
    are_64_bit ? ids_->write(own.data(), ids_->bytes()) : ids_->write(narrow.data(), ids_->bytes());
}

ncclResult_t ElasticHandle::update() {
    const size_t tokens = static_cast<size_t>(routing_.num_tokens(context_.rank()));
    Tensor ids(ids_are_64_bit_ ? ncclInt64 : ncclInt32, {tokens, static_cast<size_t>(routing_.topk)}, *ids_);
    return ncclEpUpdateHandle(handle_, ids, nullptr, stream_);
}

void ElasticHandle::limit_sms(uint64_t seed) {
    if (!is_ht(shape_.mode)) return;
    Random random(seed);
    RANK_OK(context_, crossdockHandleSetSms(handle_, random.pick({0u, 1u, 2u, 3u, 24u, 1000u})));
}

void ElasticHandle::dispatch(uint64_t step) {
    ElasticDispatchCall call(context_, *this, step);
    RANK_OK(context_, call.run());
    context_.synchronize(stream_);
    call.check();
}

void ElasticHandle::combine(uint64_t step) {
    ElasticCombineCall call(context_, *this, step);
    if (shape_.invariant && !routing_.by_expert) {
        RANK_REFUSED(context_, ncclInvalidUsage, "an invariant group combines expert-major rows", call.run());
        return;
    }
    RANK_OK(context_, call.run());
    context_.synchronize(stream_);
    call.check();
}

RankProgram random_elastic_operations(const ElasticShape& shape, int num_operations, uint64_t timeout_ns) {
    return [=](RankContext& context) {
        Group group(context, context.comm(), elastic_config(context, shape, timeout_ns), shape.invariant);
        std::deque<ElasticHandle> handles;
        for (const bool by_expert : {false, true})
            handles.emplace_back(context, group.get(), shape, by_expert, seed_of(shape.seed, by_expert ? 1 : 0));
        Random random(shape.seed);
        for (int i = 0; i < num_operations; ++i) {
            const uint64_t step = static_cast<uint64_t>(i);
            ElasticHandle& handle = handles[static_cast<size_t>(random.below(2))];
            const int choice = random.below(10);
            if (choice == 0 || !handle.is_routed()) {
                handle.route(step);
                RANK_OK(context, handle.update());
            }
            if (choice < 5 || !handle.is_dispatched()) {
                handle.dispatch(step);
            } else {
                handle.combine(step);
            }
        }
    };
}

}  // namespace crossdock::testing
