// SPDX-License-Identifier: Apache-2.0
// The comparisons of a layer: whole buffers, byte for byte, with what the reference says of every byte.
#include <cmath>
#include <cstring>

#include "conformance/support/layer.h"
#include "reference/formats.h"
#include "reference/recipes.h"

namespace crossdock::testing {

namespace {

// Row `index` of a tensor of such rows.
void put_row(Bytes& image, size_t index, const Bytes& row) {
    std::copy(row.begin(), row.end(), image.begin() + static_cast<std::ptrdiff_t>(index * row.size()));
}

// Row `index` of an image, which other ones may replace: takes what was seen there if it is what one of them has.
void allow(Bytes& image, size_t index, const std::vector<Bytes>& others, const Bytes& seen) {
    for (const Bytes& other : others) {
        if (std::memcmp(&seen[index * other.size()], other.data(), other.size()) == 0)
            return put_row(image, index, other);
    }
}

}  // namespace

std::vector<Layer::ReceivedRow> Layer::received_rows(const ActiveRanks& active) const {
    std::vector<ReceivedRow> rows;
    if (problem_.is_ht()) {
        for (const RowSource& row : received().rows)
            rows.push_back({rows.size(), row, !row.is_padding() && !reference::is_active(active, row.source)});
        return rows;
    }
    size_t start = 0;
    for (const std::vector<RowSource>& block : reference::received_rows(problem_, context_.rank(), active)) {
        for (size_t slot = 0; slot < block.size(); ++slot) rows.push_back({start + slot, block[slot], false});
        start += static_cast<size_t>(problem_.slots());
    }
    return rows;
}

Bytes Layer::background(const Buffer& output) const {
    return unused_rows_matter_ ? Bytes(output.bytes(), kPoison) : output.read();
}

void Layer::prepare_update() {
    poison({update_numbers_.counters.get(), update_numbers_.offsets.get(), update_numbers_.total.get()});
}

void Layer::check_update() {
    check_numbers(update_numbers_, "the update's ", is_updated_);
    ids_->check_guards("topk_idx");
}

int64_t Layer::updated_total() const {
    const Bytes bytes = update_numbers_.total->read();
    int64_t wide = 0;
    int32_t narrow = 0;
    std::memcpy(&wide, bytes.data(), sizeof wide);
    std::memcpy(&narrow, bytes.data(), sizeof narrow);
    return options_.counter_type == ncclInt64 ? wide : narrow;
}

void Layer::check_numbers(const Numbers& numbers, const std::string& of, bool asked,
                          const std::vector<ReceivedRow>& rows) {
    std::vector<int64_t> counters, offsets;
    if (problem_.is_ht()) {
        counters = received().counters;
        offsets = received().offsets;
    } else {
        counters.resize(num_counters());
        const auto slots = static_cast<size_t>(problem_.slots());
        for (const ReceivedRow& row : rows) ++counters[row.index / slots];
        for (size_t block = 0; block < counters.size(); ++block) offsets.push_back(static_cast<int64_t>(block * slots));
    }
    const size_t total = problem_.is_ht() ? received().total : rows.size();
    const auto check = [&](const Buffer& buffer, bool is_asked, ncclDataType_t type, const std::vector<int64_t>& values,
                           const char* name) {
        Bytes image(buffer.bytes(), kPoison);
        if (asked && is_asked) put_row(image, 0, as_integers(type, values));
        buffer.check(image, reference::type_bytes(type), of + name);
    };
    const bool asks_offsets = asks(options_.ask_offsets) && problem_.expert_major();
    check(*numbers.counters, asks_counters(), type_of_counters(), counters, "counters");
    check(*numbers.offsets, asks_offsets, options_.counter_type, offsets, "experts' offsets");
    check(*numbers.total, asks(options_.ask_total), options_.counter_type, {static_cast<int64_t>(total)}, "total");
}

void Layer::prepare_dispatch() {
    if (problem_.is_ht()) write_inputs();
    if (options_.keep_outputs) return;
    poison({received_.get(), received_scales_.get(), received_weights_.get(), received_ids_.get(),
            dispatch_numbers_.counters.get(), dispatch_numbers_.offsets.get(), dispatch_numbers_.total.get()});
    if (options_.arena != nullptr && !options_.peers_may_die) context_.barrier();
}

void Layer::check_dispatch(ncclEpPassDir_t direction, const ActiveRanks& active, bool lost_a_rank) {
    unused_rows_matter_ = !options_.keep_outputs && !lost_a_rank;
    const bool forward = direction == NCCL_EP_FWD_PASS;
    const std::vector<ReceivedRow> rows = received_rows(active);
    Bytes tokens = background(*received_);
    Bytes scales = received_scales_ ? background(*received_scales_) : Bytes();
    const size_t scale_bytes = reference::type_bytes(problem_.scale_type);
    const size_t num_scales = received_scales_ ? problem_.num_scales : 0;
    for (const ReceivedRow& row : rows) {
        reference::ArrivedRow expected{Bytes(problem_.received_row_bytes()), Bytes(problem_.scale_row_bytes())};
        if (!row.is_lost && !row.source.is_padding()) expected = arrived_row(problem_, row.source);
        put_row(tokens, row.index, expected.tokens);
        for (size_t i = 0; i < num_scales; ++i) {
            const size_t at = scale_index(problem_, row.index, i);
            std::memcpy(&scales[at * scale_bytes], &expected.scales[i * scale_bytes], scale_bytes);
        }
    }
    received_->check(tokens, problem_.received_row_bytes(), "dispatch's tokens");
    if (received_scales_) received_scales_->check(scales, problem_.scale_row_bytes(), "dispatch's scales");
    if (forward && received_weights_) check_metadata(rows);
    if (overlap_) check_overlap(rows);
    if (!problem_.is_ht())
        check_numbers(dispatch_numbers_, "dispatch's ", true, rows);
    else if (forward && !options_.keep_outputs)
        check_numbers(dispatch_numbers_, "dispatch's ", options_.dispatch_counters && problem_.expert_major());
    for (Buffer* input : {ids_.get(), tokens_.get(), weights_.get()}) input->check_guards("an input of dispatch");
    // Inputs are the caller's again in stream order.
    if (problem_.is_ht() && !options_.keep_outputs) poison({tokens_.get(), weights_.get()});
}

void Layer::check_overlap(const std::vector<ReceivedRow>& rows) const {
    std::vector<uint32_t> rows_of_zones(overlap_->zones());
    for (const ReceivedRow& row : rows) {
        if (!problem_.is_ht()) ++rows_of_zones[row.index / static_cast<size_t>(problem_.slots())];
        if (problem_.is_ht() && !row.source.is_padding()) ++rows_of_zones[static_cast<size_t>(row.source.choice)];
    }
    overlap_->check(rows_of_zones);
}

void Layer::check_metadata(const std::vector<ReceivedRow>& rows) {
    const reference::Metadata nothing = metadata_of(problem_, context_.rank(), RowSource{});
    const Bytes no_ids = as_integers(id_type(problem_), nothing.ids);
    const Bytes no_weights = as_bytes(nothing.weights);
    Bytes weights = background(*received_weights_);
    Bytes ids = received_ids_ ? background(*received_ids_) : Bytes();
    // Rows that nobody has sent have no ids; in high throughput their weights are 0.
    const size_t num_written = problem_.is_ht() ? std::min(num_metadata_rows(), problem_.row_limit()) : num_rows();
    for (size_t i = 0; i < num_written; ++i) {
        put_row(ids, i, no_ids);
        if (problem_.is_ht()) put_row(weights, i, no_weights);
    }
    for (const ReceivedRow& row : rows) {
        const reference::Metadata expected = metadata_of(problem_, context_.rank(), row.source);
        put_row(ids, row.index, as_integers(id_type(problem_), expected.ids));
        put_row(weights, row.index, row.is_lost ? no_weights : as_bytes(expected.weights));
    }
    received_weights_->check(weights, no_weights.size(), "dispatch's weights");
    if (received_ids_) received_ids_->check(ids, no_ids.size(), "dispatch's expert ids");
}

void Layer::prepare_combine(const ActiveRanks& active) {
    Bytes image(combine_input().bytes(), kPoison);
    std::vector<float> scales(combine_scales_ ? combine_scales_->bytes() / sizeof(float) : 0, std::nanf(""));
    Bytes gradients(gradients_ ? gradients_->bytes() : 0, kPoison);
    const size_t width = static_cast<size_t>(reference::num_weights(problem_));
    for (const ReceivedRow& received : received_rows(active)) {
        const RowSource& row = received.source;
        if (row.is_padding()) continue;
        const Bytes answer = expert_row(problem_, context_.rank(), row);
        put_row(image, received.index, answer);
        if (combine_scales_)
            scales[received.index] = reference::row_scale(reference::decoded(problem_.combine_type, answer));
        if (!gradients_) continue;
        size_t at = received.index * width;
        for (const int expert : problem_.expert_major() ? std::vector<int>{row.choice}
                                                        : local_experts_of(problem_, context_.rank(), row)) {
            const float gradient = weight_gradient(problem_, context_.rank(), row.source, row.token, expert);
            put_row(gradients, at++, as_bytes(std::vector<float>{gradient}));
        }
    }
    combine_input().write(image);
    if (overlap_ && !problem_.is_ht()) overlap_->mark_done();
    if (combine_scales_) combine_scales_->write(as_bytes(scales));
    if (gradients_) gradients_->write(gradients);
    poison({combine_output_.get(), combined_gradients_.get()});
    if (options_.arena != nullptr && !options_.keep_outputs && !options_.peers_may_die) context_.barrier();
}

void Layer::check_combine(ncclEpPassDir_t direction, const ActiveRanks& active, const std::vector<Problem>& others) {
    const bool exact = problem_.is_ht() || (problem_.combine_recipe == NCCL_EP_COMB_QUANT_NONE &&
                                            (problem_.sums == CROSSDOCK_SUMS_EXACT || !problem_.expert_major()));
    const bool has_gradients = direction == NCCL_EP_BWD_PASS;
    const int rank = context_.rank();
    combine_input().check_guards("combine's input");
    // The input is the caller's again in stream order.
    if (problem_.is_ht() && !options_.keep_outputs) combine_input().poison();
    const size_t row_bytes = problem_.combine_row_bytes();
    const Bytes seen = combine_output_->read();
    const Bytes seen_gradients = combined_gradients_ ? combined_gradients_->read() : Bytes();
    if (others.empty()) check_bounds(seen, active);
    Bytes image(seen.size(), kPoison);
    Bytes gradients(seen_gradients.size(), kPoison);
    const std::vector<HtRouting> routings(others.begin(), others.end());
    for (size_t i = 0; i < num_tokens(); ++i) {
        const auto token = static_cast<int>(i);
        if (!exact)
            std::memcpy(&image[i * row_bytes], &seen[i * row_bytes], row_bytes);
        else if (problem_.is_ht())
            put_row(image, i, combined_row(problem_, *routing_, rank, token, lsa_team_size_));
        else
            put_row(image, i, combined_row(problem_, rank, token, active));
        if (has_gradients) put_row(gradients, i, as_bytes(combined_weights(problem_, *routing_, rank, token)));
        std::vector<Bytes> rows;
        std::vector<Bytes> weights;
        for (size_t other = 0; other < others.size(); ++other) {
            rows.push_back(combined_row(others[other], routings[other], rank, token, lsa_team_size_));
            if (has_gradients)
                weights.push_back(as_bytes(combined_weights(others[other], routings[other], rank, token)));
        }
        allow(image, i, rows, seen);
        allow(gradients, i, weights, seen_gradients);
    }
    combine_output_->check(image, row_bytes, "combine's tokens");
    if (combined_gradients_) combined_gradients_->check(gradients, topk() * sizeof(float), "combine's weights");
}

void Layer::check_bounds(const Bytes& seen, const ActiveRanks& active) {
    const std::vector<float> values = reference::decoded(problem_.combine_type, seen);
    for (size_t i = 0; i < num_tokens(); ++i) {
        const auto token = static_cast<int>(i);
        const reference::BoundedRow row = problem_.is_ht()
                                              ? bounded_row(problem_, *routing_, context_.rank(), token, lsa_team_size_)
                                              : bounded_row(problem_, context_.rank(), token, active);
        for (size_t k = 0; k < row.sum.size(); ++k) {
            const double value = values[i * problem_.combine_hidden + k];
            if (std::fabs(value - row.sum[k]) <= row.bound[k]) continue;
            RANK_CHECK(
                context_, false,
                "combine's token {}, element {}: {:g}, the sum is {:g}, which leaves {:g} more than the bound {:g}", i,
                k, value, row.sum[k], std::fabs(value - row.sum[k]) - row.bound[k], row.bound[k]);
            return;
        }
    }
}

void Layer::check_nothing_was_written() {
    for (const Buffer* buffer : {received_.get(), received_scales_.get(), received_weights_.get(), received_ids_.get(),
                                 combine_output_.get(), combined_gradients_.get()}) {
        if (buffer != nullptr && (combine_input_ || buffer != received_.get()))
            buffer->check(Bytes(buffer->bytes(), kPoison), 1, "an output of a refused call");
    }
    for (const Buffer* input : {ids_.get(), tokens_.get(), weights_.get(), &combine_input()})
        input->check_guards("an input of a refused call");
}

void Layer::pass(ncclEpPassDir_t direction) {
    prepare_dispatch();
    RANK_OK(context_, dispatch(direction));
    check_dispatch(direction);
    prepare_combine();
    RANK_OK(context_, combine(direction));
    check_combine(direction);
}

void Layer::round_trip() {
    if (problem_.is_ht()) check_update();
    pass(NCCL_EP_FWD_PASS);
    if (!problem_.is_ht()) return;
    change_data(problem_.seed + 0xBACC);
    pass(NCCL_EP_BWD_PASS);
}

}  // namespace crossdock::testing
