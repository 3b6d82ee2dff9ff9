// SPDX-License-Identifier: Apache-2.0
// What high throughput must deliver: every row has its place. Combine's bounds: with u the unit roundoff of the rows'
// type, n terms in all, g = (n + 1) 2^-24 and S the sum of their magnitudes, flat rows are summed in fp32 and rounded
// once, |error| <= u |sum| + (1 + u) g S; expert-major rows may first be summed and rounded rank by rank,
// |error| <= (2u + u^2 + g (1 + u)^2) S. In MXFP8 each rank's sum adds what nccl_ep.h says of it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "bench/ht_workload.h"
#include "bench/rows.h"

namespace crossdock::bench {
namespace {

constexpr size_t kRowsAtOnce = 64;

// What a row of the receive tensor must hold: a token for one local expert, or (flat) for all of them.
struct Slot {
    int rank = -1;  // -1: padding of a zone
    int token = 0;
    int local = -1;
};

class HtValidator {
  public:
    HtValidator(const tools::RankContext& context, const Options& options, const std::vector<int32_t>& routing,
                int num_tokens, HtWorkload& workload)
        : context_(context), options_(options), routing_(routing), num_tokens_(num_tokens), workload_(workload) {
        for (int rank = 0; rank < options.num_ranks; ++rank) {
            weights_.push_back(draw_weights(options, rank));
        }
        list_slots();
    }

    void check_dispatch() {
        result_.num_rows += slots_.size();
        result_.wrong_rows += workload_.total() != static_cast<int32_t>(slots_.size());
        result_.wrong_rows += workload_.expert_counts() != counts_;
        result_.wrong_rows += options_.is_expert_major() && workload_.expert_offsets() != offsets_;
        for (size_t first = 0; first < slots_.size(); first += kRowsAtOnce) {
            check_rows(first, std::min(kRowsAtOnce, slots_.size() - first));
        }
        if (!options_.backward && workload_.fills_to_the_end()) {
            check_unused_rows();
        }
    }

    void check_combine() {
        for (size_t first = 0; first < static_cast<size_t>(num_tokens_); first += kRowsAtOnce) {
            const size_t count = std::min(kRowsAtOnce, static_cast<size_t>(num_tokens_) - first);
            const std::vector<uint8_t> rows = workload_.result_rows(first, count);
            for (size_t i = 0; i < count; ++i) {
                check_sums(static_cast<int>(first + i), &rows[i * combine_row_bytes()]);
            }
        }
        if (options_.backward) {
            check_result_weights();
        }
    }

    Validation result() const { return result_; }

  private:
    size_t topk() const { return static_cast<size_t>(options_.topk); }
    size_t hidden() const { return static_cast<size_t>(options_.hidden); }
    size_t combine_row_bytes() const { return hidden() * combine_element_bytes(options_); }
    size_t weights_per_row() const { return options_.is_expert_major() ? 1 : topk(); }
    int own_expert(int local) const { return context_.rank * options_.num_local() + local; }
    int rank_of(int32_t expert) const { return expert < 0 ? -1 : expert / options_.num_local(); }

    const int32_t* experts_of(int rank, int token) const {
        return &routing_[(static_cast<size_t>(rank) * static_cast<size_t>(options_.max_tokens()) +
                          static_cast<size_t>(token)) *
                         topk()];
    }

    // The last choice counts where an expert was chosen twice.
    float weight_of(int rank, int token, int32_t expert) const {
        const int32_t* experts = experts_of(rank, token);
        const float* weights = &weights_[static_cast<size_t>(rank)][static_cast<size_t>(token) * topk()];
        float weight = 0;
        for (size_t k = 0; k < topk(); ++k) {
            weight = experts[k] == expert ? weights[k] : weight;
        }
        return weight;
    }

    // The token's different experts on a rank, by number.
    std::vector<int32_t> experts_on(int target, int rank, int token) const {
        std::vector<int32_t> experts;
        for (size_t k = 0; k < topk(); ++k) {
            const int32_t expert = experts_of(rank, token)[k];
            if (rank_of(expert) == target) {
                experts.push_back(expert);
            }
        }
        std::sort(experts.begin(), experts.end());
        experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
        return experts;
    }

    void list_slots() {
        const auto num_local = static_cast<size_t>(options_.num_local());
        std::vector<std::vector<Slot>> zones(num_local);
        counts_.resize(num_local);
        for (int rank = 0; rank < options_.num_ranks; ++rank) {
            for (int token = 0; token < num_tokens_; ++token) {
                const std::vector<int32_t> experts = experts_on(context_.rank, rank, token);
                for (int32_t expert : experts) {
                    const int local = expert % options_.num_local();
                    zones[static_cast<size_t>(local)].push_back({rank, token, local});
                    ++counts_[static_cast<size_t>(local)];
                }
                if (!options_.is_expert_major() && !experts.empty()) {
                    slots_.push_back({rank, token, -1});
                }
            }
        }
        const auto alignment = static_cast<size_t>(options_.alignment);
        for (size_t local = 0; local < num_local && options_.is_expert_major(); ++local) {
            zones[local].resize((zones[local].size() + alignment - 1) / alignment * alignment);
            counts_[local] = static_cast<int32_t>(zones[local].size());
            offsets_.push_back(static_cast<int32_t>(slots_.size()));
            slots_.insert(slots_.end(), zones[local].begin(), zones[local].end());
        }
    }

    // Compares, then puts there what the experts make of it.
    void check_rows(size_t first, size_t count) {
        const std::vector<uint8_t> rows = workload_.received_rows(first, count);
        const std::vector<float> scales = workload_.received_scales(first, count);
        const size_t row_bytes = rows.size() / count;
        const size_t num_scales = scales.size() / count;
        std::vector<int64_t> experts;
        std::vector<float> weights;
        if (!options_.backward) {
            weights = workload_.received_weights(first, count);
            experts.resize(weights.size());
            if (!options_.is_expert_major()) {
                experts = workload_.received_experts(first, count);
            }
        }
        std::vector<uint8_t> outputs(count * combine_row_bytes());
        std::vector<float> output_weights(count * weights_per_row());
        for (size_t i = 0; i < count; ++i) {
            const Slot& slot = slots_[first + i];
            if (options_.elastic && slot.rank < 0) {
                continue;  // padding stays as it was
            }
            Row expected;
            if (slot.rank < 0) {
                expected = {std::vector<uint8_t>(row_bytes), std::vector<float>(num_scales)};
            } else {
                expected = expected_row(options_, slot.rank, slot.token);
            }
            bool is_right = std::memcmp(&rows[i * row_bytes], expected.bytes.data(), row_bytes) == 0 &&
                            std::equal(expected.scales.begin(), expected.scales.end(),
                                       scales.begin() + static_cast<ptrdiff_t>(i * num_scales));
            if (!options_.backward) {
                const size_t at = i * weights_per_row();
                is_right = is_right && has_right_choices(slot, &experts[at], &weights[at]);
            }
            result_.wrong_rows += !is_right;
            if (slot.rank >= 0) {
                write_output(slot, &outputs[i * combine_row_bytes()], &output_weights[i * weights_per_row()]);
            }
        }
        workload_.set_expert_rows(first, outputs);
        if (options_.backward) {
            workload_.set_expert_weights(first, output_weights);
        }
    }

    // Expert-major: the slot's weight. Flat: local experts, ascending, with their weights, then -1 and 0; elastic, by
    // column: local experts or -1, and all weights.
    bool has_right_choices(const Slot& slot, const int64_t* experts, const float* weights) const {
        if (options_.is_expert_major()) {
            return weights[0] == (slot.rank < 0 ? 0 : weight_of(slot.rank, slot.token, own_expert(slot.local)));
        }
        if (options_.elastic) {
            return has_right_columns(slot, experts, weights);
        }
        const std::vector<int32_t> chosen = experts_on(context_.rank, slot.rank, slot.token);
        for (size_t k = 0; k < topk(); ++k) {
            const int64_t local = k < chosen.size() ? chosen[k] % options_.num_local() : -1;
            const float weight = k < chosen.size() ? weight_of(slot.rank, slot.token, chosen[k]) : 0;
            if (experts[k] != local || weights[k] != weight) {
                return false;
            }
        }
        return true;
    }

    bool has_right_columns(const Slot& slot, const int64_t* experts, const float* weights) const {
        const int32_t* chosen = experts_of(slot.rank, slot.token);
        const float* given = &weights_[static_cast<size_t>(slot.rank)][static_cast<size_t>(slot.token) * topk()];
        for (size_t k = 0; k < topk(); ++k) {
            const int64_t local = rank_of(chosen[k]) == context_.rank ? chosen[k] % options_.num_local() : -1;
            if (experts[k] != local || weights[k] != given[k]) {
                return false;
            }
        }
        return true;
    }

    void check_unused_rows() {
        for (size_t first = slots_.size(); first < workload_.num_rows(); first += kRowsAtOnce) {
            const size_t count = std::min(kRowsAtOnce, workload_.num_rows() - first);
            const std::vector<float> weights = workload_.received_weights(first, count);
            bool is_right = options_.elastic ||
                            std::all_of(weights.begin(), weights.end(), [](float weight) { return weight == 0; });
            if (!options_.is_expert_major()) {
                const std::vector<int64_t> experts = workload_.received_experts(first, count);
                is_right = is_right && std::all_of(experts.begin(), experts.end(), [](int64_t id) { return id == -1; });
            }
            result_.wrong_rows += !is_right;
        }
    }

    // What a value x of a token is multiplied with by rank `target`'s experts, or one of them; exact.
    float factor_on(int rank, int token, const std::vector<int32_t>& experts) const {
        float factor = 0;
        for (int32_t expert : experts) {
            factor += weight_of(rank, token, expert) * expert_factor(expert);
        }
        return factor;
    }

    // Any number that tells (token, expert) from others nearby; exact in fp32.
    static float gradient_of(int rank, int token, int32_t expert) {
        return static_cast<float>((rank * 131 + token * 31 + expert * 7) % 4093) / 8.0f;
    }

    void write_output(const Slot& slot, uint8_t* row, float* weights) const {
        const std::vector<int32_t> experts = slot.local >= 0 ? std::vector<int32_t>{own_expert(slot.local)}
                                                             : experts_on(context_.rank, slot.rank, slot.token);
        const float factor = factor_on(slot.rank, slot.token, experts);
        std::vector<float> values = token_values(options_, slot.rank, slot.token);
        for (float& value : values) {
            value *= factor;
        }
        encode(options_.dtype, values, row);
        for (size_t i = 0; i < experts.size(); ++i) {
            weights[i] = gradient_of(slot.rank, slot.token, experts[i]);
        }
    }

    // What the recipe may add to the error of each element of a token's sum. rank_factors: one list per rank, of its
    // terms.
    std::vector<double> quantisation_errors(const std::vector<float>& values,
                                            const std::vector<std::vector<float>>& rank_factors) const {
        if (options_.combine_recipe == NCCL_EP_COMB_QUANT_MXFP8) return mxfp8_errors(values, rank_factors);
        return std::vector<double>(values.size());
    }

    std::vector<double> mxfp8_errors(const std::vector<float>& values,
                                     const std::vector<std::vector<float>>& rank_factors) const {
        constexpr size_t kBlock = recipe_of(NCCL_EP_COMB_QUANT_MXFP8).row_multiple;
        const double u = unit_roundoff(options_.dtype);
        std::vector<double> errors(values.size());
        for (const std::vector<float>& factors : rank_factors) {
            if (factors.empty()) {
                continue;
            }
            for (size_t first = 0; first < values.size(); first += kBlock) {
                double magnitudes[kBlock] = {};
                for (size_t i = 0; i < kBlock; ++i) {
                    for (float factor : factors) {
                        magnitudes[i] += std::fabs(rounded(options_.dtype, factor * values[first + i])) * (1 + 2 * u);
                    }
                }
                const double largest = *std::max_element(magnitudes, magnitudes + kBlock);
                for (size_t i = 0; i < kBlock; ++i) {
                    errors[first + i] += std::max({magnitudes[i] / 16, largest * 0x1p-17, 0x1p-137}) * (1 + u);
                }
            }
        }
        return errors;
    }

    void check_sums(int token, const uint8_t* row) {
        // One factor per term: per rank (flat) or per expert.
        std::vector<float> factors;
        std::vector<std::vector<float>> rank_factors(static_cast<size_t>(options_.num_ranks));
        for (int rank = 0; rank < options_.num_ranks; ++rank) {
            const std::vector<int32_t> experts = experts_on(rank, context_.rank, token);
            if (!options_.is_expert_major() && !experts.empty()) {
                factors.push_back(factor_on(context_.rank, token, experts));
            }
            for (size_t i = 0; i < experts.size() && options_.is_expert_major(); ++i) {
                factors.push_back(factor_on(context_.rank, token, {experts[i]}));
                rank_factors[static_cast<size_t>(rank)].push_back(factors.back());
            }
        }
        const std::vector<float> values = token_values(options_, context_.rank, token);
        const std::vector<double> quantisation = quantisation_errors(values, rank_factors);
        const double u = unit_roundoff(options_.dtype);
        const double growth = static_cast<double>(factors.size() + 1) * 0x1p-24;
        for (size_t i = 0; i < values.size(); ++i) {
            double sum = 0;
            double magnitude = 0;
            for (float factor : factors) {
                const double term = rounded(options_.dtype, factor * values[i]);
                sum += term;
                magnitude += std::fabs(term);
            }
            const double bound = options_.is_expert_major()
                                     ? (2 * u + u * u + growth * (1 + u) * (1 + u)) * magnitude + quantisation[i]
                                     : u * std::fabs(sum) + (1 + u) * growth * magnitude;
            const double error = std::fabs(decode(options_.dtype, row, i) - sum);
            ++result_.num_values;
            // Written so that a NaN is wrong.
            result_.wrong_values += !(error <= bound);
            result_.largest_part = std::max(result_.largest_part, bound > 0 ? error / bound : 0.0);
        }
    }

    void check_result_weights() {
        const std::vector<float> weights = workload_.result_weights(0, static_cast<size_t>(num_tokens_));
        for (int token = 0; token < num_tokens_; ++token) {
            for (size_t k = 0; k < topk(); ++k) {
                const int32_t expert = experts_of(context_.rank, token)[k];
                const float expected = expert < 0 ? 0 : gradient_of(context_.rank, token, expert);
                ++result_.num_values;
                result_.wrong_values += weights[static_cast<size_t>(token) * topk() + k] != expected;
            }
        }
    }

    const tools::RankContext& context_;
    const Options& options_;
    const std::vector<int32_t>& routing_;
    int num_tokens_;
    HtWorkload& workload_;
    std::vector<std::vector<float>> weights_;  // [ranks][max_tokens * topk]
    std::vector<Slot> slots_;                  // in order, all that must arrive here
    std::vector<int32_t> counts_;              // [local experts]
    std::vector<int32_t> offsets_;
    Validation result_;
};

}  // namespace

Validation HtWorkload::validate(const std::vector<int32_t>& routing, int num_tokens) {
    return validate_pair(HtValidator(context_, options_, routing, num_tokens, *this), num_tokens);
}

}  // namespace crossdock::bench
