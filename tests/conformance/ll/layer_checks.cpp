// SPDX-License-Identifier: Apache-2.0
// The comparisons of a layer: whole buffers, byte for byte, with what the reference says of every byte.
#include <cmath>
#include <cstring>
#include <numeric>

#include "conformance/ll/layer.h"
#include "reference/formats.h"
#include "reference/recipes.h"

namespace crossdock::testing {

using reference::RowSource;
void Layer::prepare_dispatch() {
    if (options_.keep_outputs) return;
    poison({received_.get(), received_scales_.get(), received_weights_.get(), received_ids_.get(), counters_.get(),
            offsets_.get(), total_.get()});
    if (options_.arena != nullptr) context_.barrier();
}

void Layer::check_dispatch(const ActiveRanks& active, bool lost_a_rank) {
    unused_rows_matter_ = !options_.keep_outputs && !lost_a_rank;
    const std::vector<std::vector<RowSource>> blocks = received_rows(problem_, context_.rank(), active);
    const bool counts_asked = problem_.expert_major() || options_.source_counters;
    std::vector<int32_t> counts;
    for (const std::vector<RowSource>& rows : blocks) counts.push_back(static_cast<int32_t>(rows.size()));
    counters_->check(counts_asked ? as_bytes(counts) : Bytes(counters_->bytes(), kPoison), sizeof(int32_t), "counters");

    check_places(counts);

    Bytes image = background(*received_);
    const size_t row_bytes = problem_.received_row_bytes();
    for (size_t block = 0; block < blocks.size(); ++block) {
        for (size_t slot = 0; slot < blocks[block].size(); ++slot) {
            put(image, (block * problem_.slots() + slot) * row_bytes,
                arrived_row(problem_, blocks[block][slot]).tokens);
        }
    }
    received_->check(image, row_bytes, "dispatch's tokens");
    if (received_scales_) check_scales(blocks);
    if (!problem_.expert_major()) check_rank_major(blocks);
    for (Buffer* input : {ids_.get(), tokens_.get(), weights_.get()}) input->check_guards("an input of dispatch");
}

void Layer::check_places(const std::vector<int32_t>& counts) {
    Bytes offsets = background(*offsets_);
    Bytes total = background(*total_);
    if (options_.ask_places) {
        put(total, 0, as_integers(options_.place_type, {std::accumulate(counts.begin(), counts.end(), int64_t{0})}));
        std::vector<int64_t> places;
        for (size_t expert = 0; problem_.expert_major() && expert < counts.size(); ++expert)
            places.push_back(static_cast<int64_t>(expert) * problem_.slots());
        put(offsets, 0, as_integers(options_.place_type, places));
    }
    const size_t bytes = reference::type_bytes(options_.place_type);
    offsets_->check(offsets, bytes, "experts' offsets");
    total_->check(total, bytes, "the total");
}

void Layer::check_scales(const std::vector<std::vector<RowSource>>& blocks) {
    Bytes image = background(*received_scales_);
    const size_t scale_bytes = reference::type_bytes(problem_.scale_type);
    const size_t block_bytes = problem_.slots() * problem_.scale_row_bytes();
    for (size_t block = 0; block < blocks.size(); ++block) {
        for (size_t slot = 0; slot < blocks[block].size(); ++slot) {
            const Bytes scales = arrived_row(problem_, blocks[block][slot]).scales;
            for (size_t i = 0; i < problem_.num_scales; ++i) {
                const size_t index = scale_index(problem_, static_cast<int>(slot), i);
                std::memcpy(&image[block * block_bytes + index * scale_bytes], &scales[i * scale_bytes], scale_bytes);
            }
        }
    }
    received_scales_->check(image, problem_.scale_row_bytes(), "dispatch's scales");
}

void Layer::check_rank_major(const std::vector<std::vector<RowSource>>& blocks) {
    Bytes weights = background(*received_weights_);
    std::vector<int32_t> ids(received_ids_->bytes() / sizeof(int32_t), -1);
    for (size_t source = 0; source < blocks.size(); ++source) {
        for (size_t slot = 0; slot < blocks[source].size(); ++slot) {
            const RowSource& row = blocks[source][slot];
            const size_t at = (source * problem_.slots() + slot) * topk();
            const reference::Metadata expected = metadata_of(problem_, context_.rank(), row);
            put(weights, at * sizeof(float), as_bytes(expected.weights));
            std::copy(expected.ids.begin(), expected.ids.end(), ids.begin() + static_cast<std::ptrdiff_t>(at));
        }
    }
    received_weights_->check(weights, topk() * sizeof(float), "dispatch's weights");
    received_ids_->check(as_bytes(ids), topk() * sizeof(int32_t), "dispatch's expert ids");
}

void Layer::prepare_combine(const ActiveRanks& active) {
    const std::vector<std::vector<RowSource>> blocks = received_rows(problem_, context_.rank(), active);
    Bytes rows(combine_input().bytes(), kPoison);
    std::vector<float> scales(combine_scales_ ? combine_scales_->bytes() / sizeof(float) : 0, std::nanf(""));
    for (size_t block = 0; block < blocks.size(); ++block) {
        for (size_t slot = 0; slot < blocks[block].size(); ++slot) {
            const Bytes row = expert_row(problem_, context_.rank(), blocks[block][slot]);
            const size_t index = block * problem_.slots() + slot;
            put(rows, index * problem_.combine_row_bytes(), row);
            if (combine_scales_) {
                scales[index] = reference::row_scale(reference::decoded(problem_.combine_type, row));
            }
        }
    }
    combine_input().write(rows);
    if (combine_scales_) combine_scales_->write(as_bytes(scales));
    combine_output_->poison();
    if (options_.arena != nullptr && !options_.keep_outputs) context_.barrier();
}

void Layer::check_combine(const ActiveRanks& active) {
    const bool exact = problem_.combine_recipe == NCCL_EP_COMB_QUANT_NONE &&
                       (problem_.sums == CROSSDOCK_SUMS_EXACT || !problem_.expert_major());
    const Bytes seen = combine_output_->read();
    check_bounds(seen, [&](int token) { return bounded_row(problem_, context_.rank(), token, active); });
    Bytes image = seen;
    std::fill(image.begin(), image.end(), kPoison);
    const size_t row_bytes = problem_.combine_row_bytes();
    for (size_t token = 0; token < num_tokens(); ++token) {
        const size_t at = token * row_bytes;
        if (exact)
            put(image, at, combined_row(problem_, context_.rank(), static_cast<int>(token), active));
        else
            std::memcpy(&image[at], &seen[at], row_bytes);
    }
    combine_output_->check(image, row_bytes, "combine's tokens");
    combine_input().check_guards("combine's input");
}

void Layer::round_trip(const ActiveRanks& active) {
    prepare_dispatch();
    RANK_OK(context_, dispatch());
    check_dispatch(active);
    prepare_combine(active);
    RANK_OK(context_, combine());
    check_combine(active);
}

}  // namespace crossdock::testing
