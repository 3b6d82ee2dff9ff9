// SPDX-License-Identifier: Apache-2.0
#include "problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "formats.h"

namespace crossdock::reference {
namespace {

uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

enum class Stream : uint64_t { kTokens = 1, kScales, kExperts };

uint64_t row_seed(const Problem& problem, Stream stream, int rank, RowSource row) {
    uint64_t seed = mix(problem.seed + static_cast<uint64_t>(stream) * 0x9E3779B97F4A7C15u);
    for (const int part : {rank, row.source, row.token, row.k}) seed = mix(seed * 31 + static_cast<uint64_t>(part) + 1);
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
void random_value(ncclDataType_t type, uint64_t bits, int center, int spread, std::byte* element) {
    const auto exponent = static_cast<uint32_t>(center + static_cast<int>((bits >> 32) % (2 * spread + 1)) - spread);
    const auto sign = static_cast<uint32_t>(bits & 1);
    const auto mantissa = static_cast<uint32_t>(bits >> 1);
    uint32_t result = 0;
    if (type == ncclFloat32) {
        result = sign << 31 | (exponent + 127) << 23 | (mantissa & 0x7FFFFF);
    } else if (type == ncclBfloat16) {
        result = sign << 15 | (exponent + 127) << 7 | (mantissa & 0x7F);
    } else {
        result = sign << 15 | (exponent + 15) << 10 | (mantissa & 0x3FF);
    }
    std::memcpy(element, &result, type_bytes(type));
}

// Rows that are quantised: blocks of very different sizes, some of zeros, some so small that the floor of the scale
// holds.
std::vector<std::byte> quantisable_row(uint64_t seed, size_t num_elements) {
    std::vector<std::byte> row(num_elements * 2);
    for (size_t i = 0; i < num_elements; ++i) {
        const uint64_t block = random_bits(seed, ~(i / 16));
        if (block % 11 == 0) continue;  // zeros
        const int center = static_cast<int>((block >> 8) % 48) - 24;
        random_value(ncclBfloat16, random_bits(seed, i), center, 6, &row[i * 2]);
    }
    return row;
}

}  // namespace

uint64_t random_bits(uint64_t seed, uint64_t index) { return mix(seed + (index + 1) * 0x9E3779B97F4A7C15u); }

ncclDataType_t Problem::received_type() const {
    return recipe == Recipe::kFp8 || recipe == Recipe::kV1Fp8 ? ncclFloat8e4m3 : token_type;
}
size_t Problem::token_row_bytes() const { return hidden * type_bytes(token_type); }
size_t Problem::received_row_bytes() const { return hidden * type_bytes(received_type()); }
size_t Problem::scale_row_bytes() const { return num_scales * type_bytes(scale_type); }
size_t Problem::combine_row_bytes() const { return combine_hidden * type_bytes(combine_type); }
size_t Problem::max_token_bytes() const {
    return std::max({token_row_bytes() + (recipe == Recipe::kForward ? scale_row_bytes() : 0),
                     received_row_bytes() + scale_row_bytes(), combine_row_bytes()});
}

int Problem::target_rank(int source, int token, int k) const {
    const int64_t id = expert(source, token, k);
    return id < 0 || id >= num_experts ? -1 : static_cast<int>(id / local_experts());
}

std::string Problem::describe() const {
    static constexpr const char* kRecipes[] = {"NONE", "FWD", "DS_FP8E3M4", "v1 FP8"};
    std::string tokens;
    for (const RankInput& rank : ranks) tokens += fmt::format("{}{}", tokens.empty() ? "" : ",", rank.num_tokens);
    return fmt::format(
        "{} R {} E {} M {} K {} B [{}] ids {} | dispatch {} H {} recipe {}{} S {} {} id kind {} | combine {} H {}{}{}",
        expert_major() ? "expert-major" : "rank-major", num_ranks, num_experts, max_tokens, num_topk, tokens,
        type_name(index_type), type_name(token_type), hidden, kRecipes[static_cast<int>(recipe)],
        round_scales ? " rounded" : "", num_scales, type_name(scale_type), static_cast<int>(id_kind),
        type_name(combine_type), combine_hidden, combine_recipe == NCCL_EP_COMB_QUANT_NVFP4 ? " NVFP4" : "",
        sums == CROSSDOCK_SUMS_SENDER ? " sender sums" : "");
}

std::vector<std::byte> token_row(const Problem& problem, int source, int token) {
    const uint64_t seed = row_seed(problem, Stream::kTokens, 0, {source, token, 0});
    if (problem.recipe == Recipe::kFp8 || problem.recipe == Recipe::kV1Fp8)
        return quantisable_row(seed, problem.hidden);
    return random_row(seed, problem.token_row_bytes());
}

std::vector<std::byte> scale_row(const Problem& problem, int source, int token) {
    return random_row(row_seed(problem, Stream::kScales, 0, {source, token, 0}), problem.scale_row_bytes());
}

std::vector<std::byte> expert_row(const Problem& problem, int target, RowSource row) {
    if (!problem.expert_major()) row.k = 0;
    const uint64_t seed = row_seed(problem, Stream::kExperts, target, row);
    if (problem.combine_recipe == NCCL_EP_COMB_QUANT_NVFP4) return quantisable_row(seed, problem.combine_hidden);
    std::vector<std::byte> result(problem.combine_row_bytes());
    const size_t element_bytes = type_bytes(problem.combine_type);
    const bool half = problem.combine_type == ncclFloat16;
    const int spread = problem.values == Values::kModerate ? 3 : half ? 10 : 40;
    const int center = half && problem.values == Values::kWide ? -2 : 0;
    for (size_t i = 0; i < problem.combine_hidden; ++i) {
        random_value(problem.combine_type, random_bits(seed, i), center, spread, &result[i * element_bytes]);
    }
    return result;
}

}  // namespace crossdock::reference
