// SPDX-License-Identifier: Apache-2.0
// The comparisons of a high-throughput layer: whole buffers, byte for byte, with what the reference says of every byte.
#include <cstring>

#include "conformance/ht/layer.h"
#include "reference/formats.h"

namespace crossdock::testing {

using reference::RowSource;

namespace {

template <typename Value>
void put_values(Bytes& image, size_t index, const std::vector<Value>& values) {
    put(image, index * sizeof(Value), as_bytes(values));
}

bool is_lost(const ActiveRanks& active, int rank) { return !active.empty() && active[static_cast<size_t>(rank)] == 0; }

// Part of an image that other ones may replace: takes what was seen there if it is what one of them has.
void allow(Bytes& image, size_t offset, const std::vector<Bytes>& others, const Bytes& seen) {
    for (const Bytes& other : others) {
        if (std::memcmp(&seen[offset], other.data(), other.size()) == 0) return put(image, offset, other);
    }
}

}  // namespace

void HtLayer::prepare_update() {
    poison({update_numbers_.counters.get(), update_numbers_.offsets.get(), update_numbers_.total.get()});
}

void HtLayer::check_update() {
    check_numbers(update_numbers_, "the update's ", is_updated_);
    ids_->check_guards("topk_idx");
}

int64_t HtLayer::updated_total() const {
    const Bytes bytes = update_numbers_.total->read();
    int64_t wide = 0;
    int32_t narrow = 0;
    std::memcpy(&wide, bytes.data(), sizeof wide);
    std::memcpy(&narrow, bytes.data(), sizeof narrow);
    return options_.counter_type == ncclInt64 ? wide : narrow;
}

void HtLayer::check_numbers(const Numbers& numbers, const char* of, bool asked) {
    const bool expert_major = problem_.expert_major();
    const auto image_of = [](const Buffer& buffer) { return Bytes(buffer.bytes(), kPoison); };
    Bytes counters = image_of(*numbers.counters);
    Bytes offsets = image_of(*numbers.offsets);
    Bytes total = image_of(*numbers.total);
    const ncclDataType_t type = options_.counter_type;
    if (asked && options_.ask_counters) put(counters, 0, as_integers(type_of_counters(), received().counters));
    if (asked && options_.ask_offsets && expert_major) put(offsets, 0, as_integers(type, received().offsets));
    if (asked && options_.ask_total) put(total, 0, as_integers(type, {static_cast<int64_t>(received().total)}));
    numbers.counters->check(counters, reference::type_bytes(type_of_counters()), std::string(of) + "expert counters");
    numbers.offsets->check(offsets, reference::type_bytes(type), std::string(of) + "expert offsets");
    numbers.total->check(total, reference::type_bytes(type), std::string(of) + "total");
}

void HtLayer::prepare_dispatch() {
    write_inputs();
    if (options_.keep_outputs) return;
    poison({received_.get(), received_scales_.get(), received_weights_.get(), received_ids_.get(),
            dispatch_numbers_.counters.get(), dispatch_numbers_.offsets.get(), dispatch_numbers_.total.get()});
    if (options_.arena != nullptr && !options_.peers_may_die) context_.barrier();
}

void HtLayer::check_dispatch(ncclEpPassDir_t direction, const ActiveRanks& active) {
    const bool forward = direction == NCCL_EP_FWD_PASS;
    const std::vector<RowSource>& rows = received().rows;
    Bytes tokens = background(*received_);
    const size_t row_bytes = problem_.received_row_bytes();
    const size_t scale_bytes = problem_.scale_row_bytes();
    Bytes scales = received_scales_ ? background(*received_scales_) : Bytes();
    for (size_t i = 0; i < rows.size(); ++i) {
        const bool padding = rows[i].is_padding() || is_lost(active, rows[i].source);
        put(tokens, i * row_bytes, padding ? Bytes(row_bytes) : token_row(problem_, rows[i].source, rows[i].token));
        if (received_scales_) {
            put(scales, i * scale_bytes,
                padding ? Bytes(scale_bytes) : scale_row(problem_, rows[i].source, rows[i].token));
        }
    }
    received_->check(tokens, row_bytes, "dispatch's tokens");
    if (received_scales_) received_scales_->check(scales, scale_bytes, "dispatch's scales");
    if (forward) check_metadata(active);
    if (forward && !options_.keep_outputs)
        check_numbers(dispatch_numbers_, "dispatch's ", options_.dispatch_counters && problem_.expert_major());
    for (Buffer* input : {tokens_.get(), weights_.get()}) {
        input->check_guards("an input of dispatch");
        // Inputs are the caller's again in stream order.
        if (!options_.keep_outputs) input->poison();
    }
}

void HtLayer::check_metadata(const ActiveRanks& active) {
    const std::vector<RowSource>& rows = received().rows;
    const size_t width = problem_.expert_major() ? 1 : topk();
    Bytes weights = background(*received_weights_);
    Bytes ids = received_ids_ ? background(*received_ids_) : Bytes();
    for (size_t i = 0; i < std::min(num_metadata_rows(), problem_.row_limit()); ++i) {
        reference::Metadata expected = metadata_of(problem_, context_.rank(), i < rows.size() ? rows[i] : RowSource{});
        if (i < rows.size() && !rows[i].is_padding() && is_lost(active, rows[i].source))
            expected.weights.assign(width, 0.0f);
        put_values(weights, i * width, expected.weights);
        if (received_ids_) put_values(ids, i * width, expected.ids);
    }
    received_weights_->check(weights, width * sizeof(float), "dispatch's weights");
    if (received_ids_) received_ids_->check(ids, width * sizeof(int64_t), "dispatch's expert ids");
}

void HtLayer::prepare_combine() {
    const std::vector<RowSource>& rows = received().rows;
    Bytes image(combine_input().bytes(), kPoison);
    Bytes gradients(gradients_->bytes(), kPoison);
    const size_t width = problem_.expert_major() ? 1 : topk();
    for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].is_padding()) continue;
        put(image, i * problem_.combine_row_bytes(), expert_row(problem_, context_.rank(), rows[i]));
        std::vector<float> values;
        for (const int expert : problem_.expert_major() ? std::vector<int>{rows[i].choice}
                                                        : local_experts_of(problem_, context_.rank(), rows[i]))
            values.push_back(weight_gradient(problem_, context_.rank(), rows[i].source, rows[i].token, expert));
        put_values(gradients, i * width, values);
    }
    combine_input().write(image);
    gradients_->write(gradients);
    poison({combine_output_.get(), combined_gradients_.get()});
    if (options_.arena != nullptr && !options_.keep_outputs && !options_.peers_may_die) context_.barrier();
}

void HtLayer::check_combine(ncclEpPassDir_t direction, const std::vector<Problem>& others) {
    // The input is the caller's again in stream order.
    combine_input().check_guards("combine's input");
    if (!options_.keep_outputs) combine_input().poison();
    const Bytes seen = combine_output_->read();
    if (others.empty()) {
        check_bounds(
            seen, [&](int token) { return bounded_row(problem_, *routing_, context_.rank(), token, lsa_team_size_); });
    }
    const bool backward = direction == NCCL_EP_BWD_PASS;
    const Bytes seen_gradients = combined_gradients_->read();
    Bytes image(seen.size(), kPoison);
    Bytes gradients(combined_gradients_->bytes(), kPoison);
    const size_t row_bytes = problem_.combine_row_bytes();
    const std::vector<HtRouting> routings(others.begin(), others.end());
    for (size_t token = 0; token < num_tokens(); ++token) {
        const auto index = static_cast<int>(token);
        put(image, token * row_bytes, combined_row(problem_, *routing_, context_.rank(), index, lsa_team_size_));
        if (backward)
            put_values(gradients, token * topk(), combined_weights(problem_, *routing_, context_.rank(), index));
        std::vector<Bytes> rows;
        std::vector<Bytes> weights;
        for (size_t i = 0; i < others.size(); ++i) {
            rows.push_back(combined_row(others[i], routings[i], context_.rank(), index, lsa_team_size_));
            if (backward) weights.push_back(as_bytes(combined_weights(others[i], routings[i], context_.rank(), index)));
        }
        allow(image, token * row_bytes, rows, seen);
        allow(gradients, token * topk() * sizeof(float), weights, seen_gradients);
    }
    combine_output_->check(image, row_bytes, "combine's tokens");
    combined_gradients_->check(gradients, topk() * sizeof(float), "combine's weights");
}

void HtLayer::check_nothing_was_written() {
    for (const Buffer* buffer : {received_.get(), received_scales_.get(), received_weights_.get(), received_ids_.get(),
                                 combine_output_.get(), combined_gradients_.get()}) {
        if (buffer != nullptr && (combine_input_ || buffer != received_.get()))
            buffer->check(Bytes(buffer->bytes(), kPoison), 1, "an output of a refused call");
    }
    for (const Buffer* input : {ids_.get(), tokens_.get(), weights_.get(), &combine_input()})
        input->check_guards("an input of a refused call");
}

void HtLayer::pass(ncclEpPassDir_t direction) {
    prepare_dispatch();
    RANK_OK(context_, dispatch(direction));
    check_dispatch(direction);
    prepare_combine();
    RANK_OK(context_, combine(direction));
    check_combine(direction);
}

void HtLayer::round_trip() {
    check_update();
    pass(NCCL_EP_FWD_PASS);
    change_data(problem_.seed + 0xBACC);
    pass(NCCL_EP_BWD_PASS);
}

}  // namespace crossdock::testing
