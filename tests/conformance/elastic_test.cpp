// SPDX-License-Identifier: Apache-2.0
// Elastic operations of both modes: random sequences of updates, dispatches and combines of several handles against
// plain loops, bit for bit.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <optional>

#include "conformance/support/group.h"
#include "conformance/support/modes.h"
#include "conformance/support/random_problem.h"
#include "reference/elastic.h"
#include "reference/formats.h"

namespace crossdock::testing {
namespace {

using reference::ElasticArrivals;
using reference::ElasticRouting;
using Bytes = std::vector<std::byte>;

// What all ranks of a run have in common.
struct Shape {
    ncclEpAlgorithm_t mode = kLowLatency;
    uint64_t seed = 0;
    int num_ranks = 1;
    int local_experts = 1;
    int topk = 1;
    int max_tokens = 1;
    size_t most_granules = 1;  // of 16 bytes, of a row
    size_t most_scales = 0;
    uint32_t alignment = 1;  // of handles by expert
    bool is_eager = false;

    int num_experts() const { return num_ranks * local_experts; }
    std::string describe() const {
        return fmt::format("{} ranks, {} experts each, top-{}, {} tokens, {} granules, {} scales, alignment {}{}",
                           num_ranks, local_experts, topk, max_tokens, most_granules, most_scales, alignment,
                           is_eager ? ", eager" : "");
    }
};

Shape random_shape(ncclEpAlgorithm_t mode, uint64_t seed) {
    Random random(seed * 1000 + 17);
    Shape shape{.mode = mode, .seed = seed};
    shape.num_ranks = ranks_or(random.between(1, 8));
    shape.local_experts = random.pick({1, 2, 3, 5, 8, 20, 70});
    shape.topk = std::min(random.chance(10) ? random.between(9, 64) : random.between(1, 8), shape.num_experts());
    shape.max_tokens = random.chance(20) ? random.between(30, 70) : random.between(1, 16);
    shape.most_granules = static_cast<size_t>(random.pick({1, 2, 5, 8, 33, 64}));
    shape.most_scales = static_cast<size_t>(random.pick({0, 0, 1, 3, 7, 56}));
    shape.alignment = random.pick({1u, 1u, 2u, 4u, 16u});
    shape.is_eager = random.chance(50);
    return shape;
}

ncclEpGroupConfig_t config_of(RankContext& context, const Shape& shape) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = shape.mode;
    config.num_experts = static_cast<unsigned>(shape.num_experts());
    config.max_dispatch_tokens_per_rank = static_cast<unsigned>(shape.max_tokens);
    config.max_token_bytes = static_cast<unsigned>(16 * (shape.most_granules + (shape.most_scales + 3) / 4));
    config.timeout_ns = context.is_simulated() ? 1'000'000'000 : 60'000'000'000;
    if (!is_ht(shape.mode)) return config;
    config.num_topk = static_cast<unsigned>(shape.topk);
    if (!shape.is_eager) {
        config.max_recv_tokens_per_rank =
            static_cast<unsigned>(shape.num_ranks * shape.max_tokens * std::min(shape.topk, shape.local_experts) +
                                  shape.local_experts * static_cast<int>(shape.alignment - 1));
    }
    return config;
}

// Bytes that follow from a seed.
Bytes random_bytes(uint64_t seed, size_t num) {
    Bytes bytes(num);
    for (size_t at = 0; at < num; at += 8) {
        const uint64_t word = reference::random_bits(seed, at);
        std::memcpy(bytes.data() + at, &word, std::min<size_t>(8, num - at));
    }
    return bytes;
}

// A row of numbers of different magnitudes, so that another order of additions gives other bits.
Bytes random_row(uint64_t seed, ncclDataType_t type, size_t hidden) {
    Random random(seed);
    std::vector<float> values(hidden);
    for (float& value : values)
        value = static_cast<float>((2 * random.unit() - 1) * std::ldexp(1.0, random.between(-6, 6)));
    return reference::encoded(type, values);
}

uint64_t seed_of(uint64_t a, uint64_t b, uint64_t c = 0) {
    return reference::random_bits(reference::random_bits(a, b), c);
}

// What a buffer must hold afterwards, as far as that is defined. Memory that is not written stays poisoned.
class Expected {
  public:
    explicit Expected(size_t num) : bytes_(num, kPoison), is_defined_(num, 0) {}
    void set(size_t at, const void* source, size_t num) {
        std::memcpy(bytes_.data() + at, source, num);
        std::fill_n(is_defined_.begin() + static_cast<ptrdiff_t>(at), num, char{1});
    }
    template <typename T>
    void set_element(size_t index, T value) {
        set(index * sizeof(T), &value, sizeof(T));
    }
    void untouched() { std::fill(is_defined_.begin(), is_defined_.end(), char{1}); }
    void undefined(size_t at, size_t num) {
        std::fill_n(is_defined_.begin() + static_cast<ptrdiff_t>(at), num, char{0});
    }

    void check(RankContext& context, const Buffer& buffer, size_t row_bytes, const char* name) const {
        const Bytes seen = buffer.read();
        buffer.check_guards(name);
        for (size_t at = 0; at < bytes_.size(); ++at) {
            if (is_defined_[at] == 0 || seen[at] == bytes_[at]) continue;
            RANK_CHECK(context, false, "{}: row {} byte {} is {:#04x}, expected {:#04x}", name, at / row_bytes,
                       at % row_bytes, static_cast<int>(seen[at]), static_cast<int>(bytes_[at]));
            throw StopProgram("an output differs");
        }
    }

  private:
    Bytes bytes_;
    std::vector<char> is_defined_;
};

// How a caller lays out scales.
struct Strides {
    int64_t given[2];
    size_t of_row, of_column;  // in elements

    static Strides random(Random& random, size_t rows, size_t columns) {
        const size_t spare = static_cast<size_t>(random.below(4));
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
    size_t at(size_t row, size_t column) const { return row * of_row + column * of_column; }
    size_t elements(size_t rows, size_t columns) const {
        return rows == 0 || columns == 0 ? 0 : at(rows - 1, columns - 1) + 1;
    }

  private:
    static Strides of(size_t row, size_t column) {
        return {{static_cast<int64_t>(row), static_cast<int64_t>(column)}, row, column};
    }
};

// A handle, and what its last dispatch must have brought.
class ElasticHandle {
  public:
    ElasticHandle(RankContext& context, ncclEpGroup_t group, const Shape& shape, bool by_expert, uint64_t seed)
        : context_(context), shape_(shape), seed_(seed), stream_(context.make_stream()) {
        routing_.num_ranks = shape.num_ranks;
        routing_.local_experts = shape.local_experts;
        routing_.topk = shape.topk;
        routing_.by_expert = by_expert;
        lsa_team_size_ = is_ht(shape.mode) ? static_cast<int>(traffic_of(context, group).lsa_team_size) : 0;
        Fleeting<ncclEpHandleConfig_t> config{NCCL_EP_HANDLE_CONFIG_INIT};
        if (is_ht(shape.mode) && by_expert) config->dispatch_output_per_expert_alignment = shape.alignment;
        const ncclEpLayout_t layout = by_expert           ? NCCL_EP_LAYOUT_EXPERT_MAJOR
                                      : is_ht(shape.mode) ? NCCL_EP_LAYOUT_FLAT
                                                          : NCCL_EP_LAYOUT_RANK_MAJOR;
        RANK_OK(context, ncclEpInitHandle(&handle_, group, layout, config.get(), shape.topk, nullptr));
    }
    ~ElasticHandle() { ncclEpHandleDestroy(handle_); }
    ElasticHandle(const ElasticHandle&) = delete;
    ElasticHandle& operator=(const ElasticHandle&) = delete;

    bool is_updated() const { return !routing_.ids.empty(); }
    bool is_dispatched() const { return is_dispatched_; }

    // Other tokens go elsewhere.
    void update(uint64_t step) {
        Random random(seed_of(seed_, step, 1));
        const int percent_of_none = random.pick({0, 0, 10, 60, 100});
        const bool repeats = random.chance(40);
        routing_.ids.assign(static_cast<size_t>(shape_.num_ranks), {});
        const int empty = random.chance(30) ? random.below(shape_.num_ranks) : -1;
        const int few_experts = random.chance(20) ? random.between(1, shape_.num_experts()) : shape_.num_experts();
        for (int rank = 0; rank < shape_.num_ranks; ++rank) {
            const int tokens = rank == empty ? 0 : random.between(0, shape_.max_tokens);
            for (int token = 0; token < tokens; ++token) {
                std::vector<int64_t> chosen;
                for (int k = 0; k < shape_.topk; ++k) {
                    int64_t id = random.below(repeats ? few_experts : shape_.num_experts());
                    while (!repeats && std::find(chosen.begin(), chosen.end(), id) != chosen.end())
                        id = (id + 1) % shape_.num_experts();
                    chosen.push_back(id);
                }
                for (int64_t& id : chosen) id = random.chance(percent_of_none) ? -1 : id;
                std::vector<int64_t>& ids = routing_.ids[static_cast<size_t>(rank)];
                ids.insert(ids.end(), chosen.begin(), chosen.end());
            }
        }
        const size_t tokens = static_cast<size_t>(routing_.num_tokens(context_.rank()));
        const std::vector<int64_t>& own = routing_.ids[static_cast<size_t>(context_.rank())];
        const bool are_64_bit = random.chance(50);
        ids_.emplace(context_, stream_, own.size() * (are_64_bit ? 8 : 4));
        const std::vector<int32_t> narrow(own.begin(), own.end());
        are_64_bit ? ids_->write(own.data(), own.size() * 8) : ids_->write(narrow.data(), narrow.size() * 4);
        Tensor ids(are_64_bit ? ncclInt64 : ncclInt32, {tokens, topk()}, *ids_);
        RANK_OK(context_, ncclEpUpdateHandle(handle_, ids, nullptr, stream_));
        is_dispatched_ = false;
    }

    void dispatch(uint64_t step) {
        Random common(seed_of(seed_, step, 2));
        const ncclDataType_t type = common.pick({ncclBfloat16, ncclFloat16, ncclFloat32, ncclUint8, ncclFloat8e4m3});
        const size_t row_bytes = 16 * static_cast<size_t>(common.between(1, static_cast<int>(shape_.most_granules)));
        const size_t hidden = row_bytes / reference::type_bytes(type);
        const size_t num_scales = static_cast<size_t>(common.between(0, static_cast<int>(shape_.most_scales)));
        const bool with_weights = common.chance(60);
        Random random(seed_of(seed_, step, 1000 + static_cast<uint64_t>(context_.rank())));
        routing_.alignment = !routing_.by_expert  ? random.pick({1u, 4u, 100u})
                             : is_ht(shape_.mode) ? shape_.alignment
                                                  : common.pick({1u, shape_.alignment, 6u});
        arrivals_.clear();
        for (int rank = 0; rank < shape_.num_ranks; ++rank)
            arrivals_.push_back(reference::elastic_arrivals(routing_, rank));
        const ElasticArrivals& arrivals = own_arrivals();
        const size_t tokens = static_cast<size_t>(routing_.num_tokens(context_.rank()));
        rows_ = static_cast<size_t>(arrivals.num_rows) + (random.chance(50) ? 0 : random.below(9));

        const auto row_of = [&](int rank, int token) {
            return random_bytes(seed_of(seed_, step, 10'000 + 1000 * static_cast<uint64_t>(rank) + token), row_bytes);
        };
        const auto scale_of = [&](int rank, int token, size_t column) {
            return static_cast<uint32_t>(seed_of(
                seed_, step,
                1'000'000 + 100'000 * static_cast<uint64_t>(rank) + 1000 * static_cast<uint64_t>(token) + column));
        };
        const auto weight_of = [&](int rank, int token, int column) {
            return static_cast<float>(seed_of(seed_, step,
                                              5'000'000 + 100'000 * static_cast<uint64_t>(rank) +
                                                  100 * static_cast<uint64_t>(token) + column) %
                                      1000) /
                   64;
        };

        Fleeting<crossdockElasticDispatch_t> call{CROSSDOCK_ELASTIC_DISPATCH_INIT};
        std::deque<Buffer> buffers;
        std::deque<Tensor> tensors;
        const auto buffer_of = [&](size_t bytes) -> Buffer& { return buffers.emplace_back(context_, stream_, bytes); };
        const auto tensor_of = [&](ncclDataType_t of, const std::vector<size_t>& sizes, Buffer& buffer) {
            return tensors.emplace_back(of, sizes, buffer).get();
        };
        // Inputs.
        Buffer& given = buffer_of(tokens * row_bytes);
        Bytes all;
        for (size_t token = 0; token < tokens; ++token) {
            const Bytes row = row_of(context_.rank(), static_cast<int>(token));
            all.insert(all.end(), row.begin(), row.end());
        }
        given.write(all);
        call->tokens = tensor_of(type, {tokens, hidden}, given);
        const ncclDataType_t scale_type = common.pick({ncclFloat32, ncclInt32, ncclUint32});
        const Strides in = Strides::random(random, tokens, num_scales),
                      out = Strides::random(random, rows_, num_scales);
        Buffer& scales = buffer_of(4 * in.elements(tokens, num_scales));
        Buffer& out_scales = buffer_of(4 * out.elements(rows_, num_scales));
        if (num_scales > 0) {
            std::vector<uint32_t> values(scales.bytes() / 4, 0xEEEEEEEE);
            for (size_t token = 0; token < tokens; ++token) {
                for (size_t i = 0; i < num_scales; ++i)
                    values[in.at(token, i)] = scale_of(context_.rank(), static_cast<int>(token), i);
            }
            scales.write(values.data(), scales.bytes());
            call->scales = tensor_of(scale_type, {tokens, num_scales}, scales);
            call->out_scales = tensor_of(scale_type, {rows_, num_scales}, out_scales);
            std::copy_n(in.given, 2, call->scale_strides);
            std::copy_n(out.given, 2, call->out_scale_strides);
        }
        Buffer& weights = buffer_of(tokens * topk() * 4);
        if (with_weights) {
            std::vector<float> values;
            for (size_t i = 0; i < tokens * topk(); ++i)
                values.push_back(
                    weight_of(context_.rank(), static_cast<int>(i / topk()), static_cast<int>(i % topk())));
            weights.write(values.data(), weights.bytes());
            call->topk_weights = tensor_of(ncclFloat32, {tokens, topk()}, weights);
        }
        call->alignment = routing_.alignment == 1 || (routing_.by_expert && is_ht(shape_.mode) && random.chance(30))
                              ? 0
                              : routing_.alignment;
        call->origin_stride = static_cast<unsigned>(common.pick({0, shape_.max_tokens, 100'000}));
        call->zero_padding = routing_.by_expert && random.chance(60) ? 1 : 0;

        // Outputs.
        Buffer& received = buffer_of(rows_ * row_bytes);
        call->out_tokens = tensor_of(type, {rows_, hidden}, received);
        const size_t weight_row = routing_.by_expert ? 1 : topk();
        const bool are_64_bit = random.chance(50);
        const size_t id_bytes = are_64_bit ? 8 : 4;
        Buffer& out_weights = buffer_of(rows_ * weight_row * 4);
        Buffer& out_ids = buffer_of(rows_ * topk() * id_bytes);
        if (with_weights && random.chance(70))
            call->out_topk_weights = tensor_of(
                ncclFloat32, routing_.by_expert ? std::vector<size_t>{rows_} : std::vector<size_t>{rows_, topk()},
                out_weights);
        if (!routing_.by_expert && random.chance(70))
            call->out_topk_idx = tensor_of(are_64_bit ? ncclInt64 : ncclInt32, {rows_, topk()}, out_ids);
        const size_t source_rows = arrivals.tokens.size() + (random.chance(50) ? 0 : random.below(5));
        Buffer& sources = buffer_of(source_rows * (topk() + 2) * 4);
        if (random.chance(70)) call->sources = tensor_of(ncclInt32, {source_rows, topk() + 2}, sources);
        const size_t experts = static_cast<size_t>(shape_.local_experts);
        Buffer& rank_ends = buffer_of(static_cast<size_t>(shape_.num_ranks) * 4);
        Buffer &counts = buffer_of(experts * 4), &ends = buffer_of(experts * 4), &statistics = buffer_of(experts * 4);
        if (random.chance(70))
            call->rank_ends = tensor_of(ncclInt32, {static_cast<size_t>(shape_.num_ranks)}, rank_ends);
        if (random.chance(70)) call->expert_counts = tensor_of(ncclInt32, {experts}, counts);
        if (random.chance(70)) call->expert_ends = tensor_of(ncclInt32, {experts}, ends);
        std::vector<int32_t> added(experts, 1000);
        statistics.write(added.data(), statistics.bytes());
        if (random.chance(70)) call->statistics = tensor_of(ncclInt32, {experts}, statistics);
        const crossdockElasticDispatch_t kept = *call.get();

        RANK_OK(context_, crossdockElasticDispatch(handle_, call.get(), stream_));
        context_.synchronize(stream_);
        is_dispatched_ = true;

        Expected rows(received.bytes()), row_scales(out_scales.bytes()), row_weights(out_weights.bytes());
        Expected ids(out_ids.bytes()), origins(sources.bytes());
        row_scales.untouched();
        for (size_t row = 0; row < rows_; ++row) {
            for (size_t i = 0; i < num_scales; ++i) row_scales.undefined(4 * out.at(row, i), 4);
        }
        const auto set_row = [&](size_t row, const Bytes& bytes, const auto& scale) {
            rows.set(row * row_bytes, bytes.data(), row_bytes);
            for (size_t i = 0; i < num_scales; ++i) row_scales.set_element(out.at(row, i), scale(i));
        };
        for (size_t n = 0; n < arrivals.tokens.size(); ++n) {
            const ElasticArrivals::Token& came = arrivals.tokens[n];
            for (const int row : came.distinct()) {
                set_row(static_cast<size_t>(row), row_of(came.source, came.token),
                        [&](size_t i) { return scale_of(came.source, came.token, i); });
            }
            origins.set_element(n * (topk() + 2),
                                static_cast<int32_t>(static_cast<uint32_t>(came.source) * kept.origin_stride +
                                                     static_cast<uint32_t>(came.token)));
            origins.set_element(n * (topk() + 2) + 1, static_cast<int32_t>(n));
            for (size_t k = 0; k < topk(); ++k) {
                origins.set_element(n * (topk() + 2) + 2 + k, routing_.by_expert ? came.rows[k] : -1);
                const float weight = weight_of(came.source, came.token, static_cast<int>(k));
                if (routing_.by_expert) {
                    if (came.rows[k] < 0) continue;
                    float sum = 0;
                    for (size_t other = 0; other < topk(); ++other) {
                        if (came.rows[other] == came.rows[k])
                            sum += weight_of(came.source, came.token, static_cast<int>(other));
                    }
                    row_weights.set_element(static_cast<size_t>(came.rows[k]), sum);
                } else {
                    row_weights.set_element(n * topk() + k, weight);
                    set_id(ids, n * topk() + k, came.experts[k], are_64_bit);
                }
            }
        }
        for (size_t i = arrivals.tokens.size() * topk(); !routing_.by_expert && i < rows_ * topk(); ++i)
            set_id(ids, i, -1, are_64_bit);
        for (size_t expert = 0; kept.zero_padding != 0 && expert + 1 < experts; ++expert) {
            const int next = std::min(arrivals.starts[expert + 1], arrivals.num_rows);
            for (int row = arrivals.expert_ends[expert]; row < next; ++row) {
                set_row(static_cast<size_t>(row), Bytes(row_bytes), [](size_t) { return uint32_t{0}; });
                row_weights.set_element(static_cast<size_t>(row), 0.0f);
            }
        }
        rows.check(context_, received, row_bytes, "out_tokens");
        if (num_scales > 0) row_scales.check(context_, out_scales, 4, "out_scales (by element)");
        if (kept.out_topk_weights != nullptr)
            row_weights.check(context_, out_weights, 4 * weight_row, "out_topk_weights");
        if (kept.out_topk_idx != nullptr) ids.check(context_, out_ids, id_bytes * topk(), "out_topk_idx");
        if (kept.sources != nullptr) origins.check(context_, sources, 4 * (topk() + 2), "sources");
        const auto check_numbers = [&](const ncclEpTensor_t* asked, const Buffer& buffer,
                                       const std::vector<int>& numbers, int more, const char* name) {
            Expected expected(buffer.bytes());
            for (size_t i = 0; i < numbers.size(); ++i) expected.set_element(i, numbers[i] + more);
            if (asked != nullptr) expected.check(context_, buffer, 4, name);
        };
        check_numbers(kept.rank_ends, rank_ends, arrivals.rank_ends, 0, "rank_ends");
        check_numbers(kept.expert_counts, counts, arrivals.counts, 0, "expert_counts");
        check_numbers(kept.expert_ends, ends, arrivals.expert_ends, 0, "expert_ends");
        check_numbers(kept.statistics, statistics, arrivals.counts, 1000, "statistics");
    }

    void combine(uint64_t step) {
        Random common(seed_of(seed_, step, 3));
        const ncclDataType_t type = common.pick({ncclBfloat16, ncclBfloat16, ncclFloat16, ncclFloat32});
        const size_t row_bytes = 16 * static_cast<size_t>(common.between(1, static_cast<int>(shape_.most_granules)));
        const size_t hidden = row_bytes / reference::type_bytes(type);
        const bool with_weights = common.chance(50);
        Random random(seed_of(seed_, step, 2000 + static_cast<uint64_t>(context_.rank())));
        const ElasticArrivals& arrivals = own_arrivals();
        const size_t tokens = static_cast<size_t>(routing_.num_tokens(context_.rank()));
        const size_t rows = random.chance(50) ? rows_ : static_cast<size_t>(arrivals.num_rows);
        const auto row_of = [&](int rank, int row) {
            return random_row(seed_of(seed_, step, 10'000 + 10'000 * static_cast<uint64_t>(rank) + row), type, hidden);
        };
        // By rank all columns of a row have a weight, by expert a row has one.
        const auto weight_of = [&](int rank, int row, size_t column) {
            return static_cast<float>(
                seed_of(seed_, step, 3'000'000 + 1'000'000 * static_cast<uint64_t>(rank) + 100 * row + column) % 1000);
        };
        Fleeting<crossdockElasticCombine_t> call{CROSSDOCK_ELASTIC_COMBINE_INIT};
        std::deque<Buffer> buffers;
        std::deque<Tensor> tensors;
        const auto buffer_of = [&](size_t bytes) -> Buffer& { return buffers.emplace_back(context_, stream_, bytes); };
        const auto tensor_of = [&](ncclDataType_t of, const std::vector<size_t>& sizes, Buffer& buffer) {
            return tensors.emplace_back(of, sizes, buffer).get();
        };
        Buffer& given = buffer_of(rows * row_bytes);
        Bytes all(given.bytes(), kPoison);  // padding, too
        for (const ElasticArrivals::Token& came : arrivals.tokens) {
            for (const int row : came.distinct()) {
                const Bytes bytes = row_of(context_.rank(), row);
                std::memcpy(all.data() + static_cast<size_t>(row) * row_bytes, bytes.data(), row_bytes);
            }
        }
        given.write(all);
        call->tokens = tensor_of(type, {rows, hidden}, given);
        const size_t columns = routing_.by_expert ? 1 : topk();
        Buffer& weights = buffer_of(rows * columns * 4);
        Buffer& out_weights = buffer_of(tokens * topk() * 4);
        if (with_weights) {
            std::vector<float> values;
            for (size_t i = 0; i < rows * columns; ++i)
                values.push_back(weight_of(context_.rank(), static_cast<int>(i / columns), i % columns));
            weights.write(values.data(), weights.bytes());
            call->topk_weights =
                tensor_of(ncclFloat32,
                          routing_.by_expert ? std::vector<size_t>{rows} : std::vector<size_t>{rows, topk()}, weights);
            call->out_topk_weights = tensor_of(ncclFloat32, {tokens, topk()}, out_weights);
        }
        const int num_biases = random.below(3);
        std::vector<std::vector<Bytes>> biases(tokens);
        for (int i = 0; i < num_biases; ++i) {
            Buffer& bias = buffer_of(tokens * row_bytes);
            Bytes bytes;
            for (size_t token = 0; token < tokens; ++token) {
                biases[token].push_back(random_row(
                    seed_of(seed_, step, 500'000 + 1000 * static_cast<uint64_t>(i) + token + context_.rank()), type,
                    hidden));
                bytes.insert(bytes.end(), biases[token].back().begin(), biases[token].back().end());
            }
            bias.write(bytes);
            call->bias[num_biases == 1 ? random.below(2) : i] = tensor_of(type, {tokens, hidden}, bias);
        }
        Buffer& combined = buffer_of(tokens * row_bytes);
        call->out_tokens = tensor_of(type, {tokens, hidden}, combined);

        RANK_OK(context_, crossdockElasticCombine(handle_, call.get(), stream_));
        context_.synchronize(stream_);

        Expected sums(combined.bytes()), returned(out_weights.bytes());
        for (size_t token = 0; token < tokens; ++token) {
            const Bytes sum = reference::elastic_sum(routing_, arrivals_, context_.rank(), static_cast<int>(token),
                                                     type, hidden, biases[token], lsa_team_size_, row_of);
            sums.set(token * row_bytes, sum.data(), row_bytes);
            for (size_t k = 0; k < topk(); ++k) {
                const int64_t id = routing_.id(context_.rank(), static_cast<int>(token), static_cast<int>(k));
                float weight = 0;
                if (id >= 0) {
                    const int rank = static_cast<int>(id / shape_.local_experts);
                    const ElasticArrivals& there = arrivals_[static_cast<size_t>(rank)];
                    const int n = there.find(context_.rank(), static_cast<int>(token));
                    weight = weight_of(rank, there.tokens[static_cast<size_t>(n)].rows[k], routing_.by_expert ? 0 : k);
                }
                returned.set_element(token * topk() + k, weight);
            }
        }
        sums.check(context_, combined, row_bytes, "combined");
        if (with_weights) returned.check(context_, out_weights, 4 * topk(), "out_topk_weights of a combine");
    }

  private:
    static void set_id(Expected& ids, size_t index, int id, bool are_64_bit) {
        are_64_bit ? ids.set_element(index, int64_t{id}) : ids.set_element(index, int32_t{id});
    }
    size_t topk() const { return static_cast<size_t>(shape_.topk); }
    const ElasticArrivals& own_arrivals() const { return arrivals_[static_cast<size_t>(context_.rank())]; }

    RankContext& context_;
    const Shape shape_;
    uint64_t seed_;
    cudaStream_t stream_;
    ElasticRouting routing_;
    int lsa_team_size_ = 0;
    ncclEpHandle_t handle_ = nullptr;
    std::optional<Buffer> ids_;
    std::vector<ElasticArrivals> arrivals_;  // of every rank, by the last dispatch
    size_t rows_ = 0;                        // of its outputs
    bool is_dispatched_ = false;
};

// Operations of a handle by rank and one by expert, in any order.
RankProgram random_operations(const Shape& shape, int num_operations) {
    return [=](RankContext& context) {
        Group group(context, context.comm(), config_of(context, shape));
        std::deque<ElasticHandle> handles;
        for (const bool by_expert : {false, true})
            handles.emplace_back(context, group.get(), shape, by_expert, seed_of(shape.seed, by_expert));
        Random random(shape.seed);
        for (int step = 0; step < num_operations; ++step) {
            ElasticHandle& handle = handles[static_cast<size_t>(random.below(2))];
            const int choice = random.below(10);
            if (choice == 0 || !handle.is_updated()) handle.update(static_cast<uint64_t>(step));
            if (choice < 5 || !handle.is_dispatched()) {
                handle.dispatch(static_cast<uint64_t>(step));
            } else {
                handle.combine(static_cast<uint64_t>(step));
            }
        }
    };
}

void run_seeds(const BackendSpec& spec, ncclEpAlgorithm_t mode, Seeds seeds) {
    for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
        const Shape shape = random_shape(mode, seed);
        SCOPED_TRACE(shape.describe());
        BackendSpec seeded = spec;
        seeded.simulation.seed = seed;
        expect_clean(seeded, shape.num_ranks, seed, random_operations(shape, 12));
    }
}

TEST(Elastic, RandomOperationsMatchPlainLoops) {
    on_each_backend_as_one_team(kEveryBackend, [](const BackendSpec& spec) {
        run_seeds(spec, kLowLatency, seeds_or(1, seeds_in(spec.kind, 60)));
    });
}

TEST(HtElastic, RandomOperationsMatchPlainLoops) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_seeds(spec, kHighThroughput, seeds_or(1, seeds_in(spec.kind, 60)));
    });
}

}  // namespace
}  // namespace crossdock::testing
