// SPDX-License-Identifier: Apache-2.0
// What low latency must deliver. The rows of a zone may come in any order. Combine's bound: nccl_ep.h's one rounding
// (crossdock.h's for sums at the sender) and the fp32 roundings of the sum.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <unordered_map>

#include "bench/ll_workload.h"
#include "bench/rows.h"

namespace crossdock::bench {
namespace {

struct TokenId {
    int rank;
    int token;
    auto operator<=>(const TokenId&) const = default;
};

class Validator {
  public:
    Validator(const tools::RankContext& context, const Options& options, const std::vector<int32_t>& routing,
              int num_tokens, LlWorkload& workload)
        : context_(context), options_(options), routing_(routing), num_tokens_(num_tokens), workload_(workload) {
        for (int rank = 0; rank < options.num_ranks; ++rank) {
            weights_.push_back(draw_weights(options, rank));
            for (int token = 0; token < num_tokens; ++token) {
                rows_.emplace(hash_of(expected_row(options, rank, token)), TokenId{rank, token});
            }
        }
    }

    // Finds out which token lies in which slot, and puts there what the experts make of it.
    void check_dispatch() {
        const std::vector<int32_t> counts = workload_.zone_counts();
        for (size_t zone = 0; zone < workload_.num_zones(); ++zone) {
            std::map<TokenId, int> missing = expected_in(static_cast<int>(zone));
            int num_expected = 0;
            for (const auto& [token, count] : missing) {
                num_expected += count;
            }
            const int num_slots = std::clamp(counts[zone], 0, static_cast<int>(workload_.num_slots()));
            result_.num_rows += static_cast<uint64_t>(num_expected);
            result_.wrong_rows += static_cast<uint64_t>(std::abs(counts[zone] - num_expected));
            for (size_t slot = 0; slot < static_cast<size_t>(num_slots); ++slot) {
                const std::optional<TokenId> token = token_in(zone, slot);
                const bool is_right = token && missing[*token]-- > 0 &&
                                      (options_.is_expert_major() || has_right_routing(zone, slot, *token));
                result_.wrong_rows += !is_right;
                if (token) {
                    workload_.set_expert_row(zone, slot, expert_row(static_cast<int>(zone), *token));
                }
            }
        }
    }

    void check_combine() {
        for (int token = 0; token < num_tokens_; ++token) {
            const std::vector<uint8_t> bytes = workload_.result_row(static_cast<size_t>(token));
            const std::vector<float> values = token_values(options_, context_.rank, token);
            for (size_t i = 0; i < values.size(); ++i) {
                const auto [sum, bound] = expected_value(token, values[i]);
                const double error = std::fabs(decode(options_.dtype, bytes.data(), i) - sum);
                ++result_.num_values;
                // Written so that a NaN is wrong.
                result_.wrong_values += !(error <= bound);
                result_.largest_part = std::max(result_.largest_part, bound > 0 ? error / bound : 0.0);
            }
        }
    }

    Validation result() const { return result_; }

  private:
    static uint64_t hash_of(const Row& row) {
        uint64_t hash = 0xcbf29ce484222325;
        const auto add = [&hash](uint64_t word) { hash = (hash ^ word) * 0x100000001b3 + (hash >> 29); };
        for (size_t i = 0; i + 8 <= row.bytes.size(); i += 8) {
            uint64_t word;
            std::memcpy(&word, &row.bytes[i], 8);
            add(word);
        }
        for (float scale : row.scales) {
            uint32_t word;
            std::memcpy(&word, &scale, 4);
            add(word);
        }
        return hash;
    }

    int32_t expert_of(TokenId id, int k) const {
        const auto index =
            static_cast<size_t>(id.rank) * static_cast<size_t>(options_.max_tokens()) + static_cast<size_t>(id.token);
        return routing_[index * static_cast<size_t>(options_.topk) + static_cast<size_t>(k)];
    }

    float weight_of(TokenId id, int k) const {
        return weights_[static_cast<size_t>(id.rank)][static_cast<size_t>(id.token * options_.topk + k)];
    }

    int rank_of(int32_t expert) const { return expert < 0 ? -1 : expert / options_.num_local(); }

    // The tokens that belong into a zone of this rank, and how often.
    std::map<TokenId, int> expected_in(int zone) const {
        std::map<TokenId, int> tokens;
        for (int rank = 0; rank < options_.num_ranks; ++rank) {
            for (int token = 0; token < num_tokens_; ++token) {
                const TokenId id{rank, token};
                for (int k = 0; k < options_.topk; ++k) {
                    const int32_t expert = expert_of(id, k);
                    if (options_.is_expert_major()) {
                        tokens[id] += expert == context_.rank * options_.num_local() + zone;
                    } else if (rank == zone && rank_of(expert) == context_.rank) {
                        tokens[id] = 1;
                    }
                }
            }
        }
        return tokens;
    }

    std::optional<TokenId> token_in(size_t zone, size_t slot) {
        const auto entry =
            rows_.find(hash_of({workload_.received_row(zone, slot), workload_.received_scales(zone, slot)}));
        return entry == rows_.end() ? std::nullopt : std::optional<TokenId>(entry->second);
    }

    // Rank-major: weights of all choices, and local ids of those that are hosted here.
    bool has_right_routing(size_t zone, size_t slot, TokenId id) {
        const std::vector<int32_t> experts = workload_.received_experts(zone, slot);
        const std::vector<float> weights = workload_.received_weights(zone, slot);
        bool is_right = true;
        for (int k = 0; k < options_.topk; ++k) {
            const int32_t expert = expert_of(id, k);
            const int32_t local = rank_of(expert) == context_.rank ? expert % options_.num_local() : -1;
            const auto index = static_cast<size_t>(k);
            is_right = is_right && experts[index] == local && weights[index] == weight_of(id, k);
        }
        return is_right;
    }

    // Rank-major: what rank `rank`'s experts give for a value x, weighted, summed (exactly: all factors have few bits)
    // and rounded once to the rows' type.
    float rank_sum(TokenId id, int rank, float x) const {
        double sum = 0;
        for (int k = 0; k < options_.topk; ++k) {
            const int32_t expert = expert_of(id, k);
            sum += rank_of(expert) == rank ? static_cast<double>(weight_of(id, k)) * expert_factor(expert) * x : 0;
        }
        uint8_t bytes[4];
        encode(options_.dtype, {static_cast<float>(sum)}, bytes);
        return decode(options_.dtype, bytes, 0);
    }

    std::vector<uint8_t> expert_row(int zone, TokenId id) const {
        std::vector<float> values = token_values(options_, id.rank, id.token);
        for (float& value : values) {
            value = options_.is_expert_major() ? value * expert_factor(context_.rank * options_.num_local() + zone)
                                               : rank_sum(id, context_.rank, value);
        }
        std::vector<uint8_t> bytes(values.size() * combine_element_bytes(options_));
        encode(options_.dtype, values, bytes.data());
        return bytes;
    }

    // Combine's exact sum for a value x of an own token, and how far the result may be from it.
    std::pair<double, double> expected_value(int token, float x) const {
        const TokenId id{context_.rank, token};
        double sum = 0;
        double magnitude = 0;
        int num_terms = 0;
        const auto add = [&](double term) {
            sum += term;
            magnitude += std::fabs(term);
            ++num_terms;
        };
        std::vector<int> seen;
        for (int k = 0; k < options_.topk; ++k) {
            const int32_t expert = expert_of(id, k);
            const int rank = rank_of(expert);
            if (rank < 0) {
                continue;
            }
            if (options_.is_expert_major()) {
                add(static_cast<double>(weight_of(id, k)) * expert_factor(expert) * x);
            } else if (std::find(seen.begin(), seen.end(), rank) == seen.end()) {
                seen.push_back(rank);
                add(rank_sum(id, rank, x));
            }
        }
        const double u = unit_roundoff(options_.dtype);
        const double growth = (num_terms + 1) * 0x1p-24;
        if (options_.sender_sums) {
            return {sum, (2 * u + u * u + growth * (1 + u) * (1 + u)) * magnitude};
        }
        return {sum, u * std::fabs(sum) + (1 + u) * growth * magnitude};
    }

    const tools::RankContext& context_;
    const Options& options_;
    const std::vector<int32_t>& routing_;
    int num_tokens_;
    LlWorkload& workload_;
    std::vector<std::vector<float>> weights_;     // [ranks][max_tokens * topk]
    std::unordered_map<uint64_t, TokenId> rows_;  // by hash
    Validation result_;
};

}  // namespace

Validation LlWorkload::validate(const std::vector<int32_t>& routing, int num_tokens) {
    return validate_pair(Validator(context_, options_, routing, num_tokens, *this), num_tokens);
}

}  // namespace crossdock::bench
