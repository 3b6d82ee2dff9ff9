// SPDX-License-Identifier: Apache-2.0
#include "problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "formats.h"
#include "src/core/layouts.h"
#include "src/core/recipes.h"

namespace crossdock::reference {
namespace {

enum class Stream : uint64_t { kTokens = 1, kScales, kExperts };

uint64_t row_seed(const Problem& problem, Stream stream, int rank, RowSource row) {
    uint64_t seed = mix(problem.seed + static_cast<uint64_t>(stream) * 0x9E3779B97F4A7C15u);
    for (const int part : {rank, row.source, row.token, row.choice})
        seed = mix(seed * 31 + static_cast<uint64_t>(part) + 1);
    return seed;
}

// Any bytes, NaNs included: rows that are only carried must not be looked at.
std::vector<std::byte> random_row(uint64_t seed, size_t bytes) {
    std::vector<std::byte> row(bytes);
    for (size_t i = 0; i < bytes; i += 8) {
        const uint64_t bits = random_bits(seed, i);
        std::memcpy(&row[i], &bits, std::min<size_t>(8, bytes - i));
    }
    return row;
}

// sign | exponent in [center - spread, center + spread] | mantissa, written in the bits of bf16, fp16 or fp32.
class RandomValues {
  public:
    RandomValues(ncclDataType_t type, int spread)
        : bytes_(type_bytes(type)),
          mantissa_bits_(type == ncclFloat32    ? 23
                         : type == ncclBfloat16 ? 7
                                                : 10),
          bias_(type == ncclFloat16 ? 15 : 127),
          spread_(spread) {}

    void write(uint64_t bits, int center, std::byte* element) const {
        const auto step = static_cast<int>((bits >> 32) * static_cast<uint32_t>(2 * spread_ + 1) >> 32);
        const auto exponent = static_cast<uint32_t>(center + step - spread_ + bias_);
        const auto sign = static_cast<uint32_t>(bits & 1);
        const auto mantissa = static_cast<uint32_t>(bits >> 1) & ((1u << mantissa_bits_) - 1);
        const uint32_t result = sign << (8 * bytes_ - 1) | exponent << mantissa_bits_ | mantissa;
        std::memcpy(element, &result, bytes_);
    }

  private:
    size_t bytes_;
    int mantissa_bits_;
    int bias_;
    int spread_;
};

// Rows that are quantised: blocks of very different sizes, some of zeros, some so small that the floor of the scale
// holds.
std::vector<std::byte> quantisable_row(uint64_t seed, size_t num_elements) {
    std::vector<std::byte> row(num_elements * 2);
    const RandomValues values(ncclBfloat16, 6);
    for (size_t i = 0; i < num_elements; ++i) {
        const uint64_t block = random_bits(seed, ~(i / 16));
        if (block % 11 == 0) continue;  // zeros
        const int center = static_cast<int>((block >> 8) % 48) - 24;
        values.write(random_bits(seed, i), center, &row[i * 2]);
    }
    return row;
}

}  // namespace

ncclDataType_t Problem::received_type() const {
    const DispatchRecipe& row = recipe_of(recipe);
    return row.computes_scales() ? row.received_type : token_type;
}
size_t Problem::token_row_bytes() const { return hidden * type_bytes(token_type); }
size_t Problem::received_row_bytes() const { return hidden * type_bytes(received_type()); }
size_t Problem::scale_row_bytes() const { return num_scales * type_bytes(scale_type); }
size_t Problem::combine_row_bytes() const { return combine_hidden * type_bytes(combine_type); }
size_t Problem::max_token_bytes() const {
    return std::max({token_row_bytes() + (recipe == NCCL_EP_DISP_QUANT_FWD ? scale_row_bytes() : 0),
                     received_row_bytes() + scale_row_bytes(), combine_row_bytes()});
}

int Problem::target_rank(int source, int token, int k) const {
    const int64_t id = expert(source, token, k);
    return id < 0 || id >= num_experts ? -1 : static_cast<int>(id / local_experts());
}

size_t Problem::most_rows() const {
    const size_t tokens = static_cast<size_t>(num_ranks) * static_cast<size_t>(max_tokens);
    if (!expert_major()) return tokens;
    const auto local = static_cast<size_t>(local_experts());
    return tokens * std::min(static_cast<size_t>(num_topk), local) + local * (std::max<size_t>(alignment, 1) - 1);
}

size_t Problem::row_limit() const {
    if (budget != 0) return budget;
    const size_t tokens = static_cast<size_t>(num_ranks) * static_cast<size_t>(max_tokens);
    const size_t slack =
        expert_major() ? static_cast<size_t>(local_experts()) * (std::max<size_t>(alignment, 1) - 1) : 0;
    return tokens * static_cast<size_t>(std::max(group_topk, 1)) + slack;
}

std::string Problem::describe() const {
    std::string tokens;
    for (const RankInput& rank : ranks) tokens += fmt::format("{}{}", tokens.empty() ? "" : ",", rank.num_tokens);
    const std::string room = budget == 0 ? "eager" : fmt::format("budget {}{}", budget, drops ? " drop" : "");
    return fmt::format(
        "{}{} R {} E {} M {} K {} B [{}] ids {}{} | dispatch {} H {} recipe {}{} S {} {} id kind {} | combine {} H {} "
        "recipe {}{}",
        is_ht() ? "HT " : "", label_of(layout), num_ranks, num_experts, max_tokens, num_topk, tokens,
        type_name(index_type), is_ht() ? fmt::format(" {} alignment {}", room, alignment) : "", type_name(token_type),
        hidden, recipe_of(recipe).name,
        asks_as_v1     ? " (v1)"
        : round_scales ? " rounded"
                       : "",
        num_scales, type_name(scale_type), static_cast<int>(id_kind), type_name(combine_type), combine_hidden,
        recipe_of(combine_recipe).name,
        sums == CROSSDOCK_SUMS_SENDER ? " sender sums"
        : invariant                   ? " invariant"
                                      : "");
}

std::vector<std::byte> token_row(const Problem& problem, int source, int token) {
    const uint64_t seed = row_seed(problem, Stream::kTokens, 0, {source, token, 0});
    if (recipe_of(problem.recipe).computes_scales()) return quantisable_row(seed, problem.hidden);
    return random_row(seed, problem.token_row_bytes());
}

std::vector<std::byte> scale_row(const Problem& problem, int source, int token) {
    return random_row(row_seed(problem, Stream::kScales, 0, {source, token, 0}), problem.scale_row_bytes());
}

std::vector<std::byte> expert_row(const Problem& problem, int target, RowSource row) {
    if (!problem.expert_major()) row.choice = 0;
    const uint64_t seed = row_seed(problem, Stream::kExperts, target, row);
    if (problem.combine_recipe != NCCL_EP_COMB_QUANT_NONE) return quantisable_row(seed, problem.combine_hidden);
    std::vector<std::byte> result(problem.combine_row_bytes());
    const size_t element_bytes = type_bytes(problem.combine_type);
    const bool half = problem.combine_type == ncclFloat16;
    const int spread = problem.values == Values::kModerate ? 3 : half ? 10 : 40;
    const int center = half && problem.values == Values::kWide ? -2 : 0;
    const RandomValues values(problem.combine_type, spread);
    for (size_t i = 0; i < problem.combine_hidden; ++i)
        values.write(random_bits(seed, i), center, &result[i * element_bytes]);
    return result;
}

}  // namespace crossdock::reference
