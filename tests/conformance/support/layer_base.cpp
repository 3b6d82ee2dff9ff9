// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/layer_base.h"

#include <cmath>
#include <utility>

#include "reference/formats.h"

namespace crossdock::testing {

ncclEpTensor_t* LayerBase::Call::tensor(ncclDataType_t type, std::initializer_list<size_t> sizes,
                                        const Buffer* buffer) {
    if (buffer == nullptr) return nullptr;
    const Naming naming = buffer->arena() != nullptr ? naming_ : Naming::kData;
    Tensor& made = tensors_.emplace_back(type, sizes, *buffer, naming);
    // An empty tensor has no address to give.
    if (naming == Naming::kData && *sizes.begin() == 0) made->data = nullptr;
    return made;
}

void LayerBase::make_buffers(size_t num_rows, const Places& places, bool in_place, bool odd_scales) {
    const Problem& problem = this->problem();
    const size_t max_tokens = static_cast<size_t>(problem.max_tokens);
    ids_ = make_buffer(max_tokens * topk() * sizeof(int64_t), places.others);  // an update may bring another width
    tokens_ = make_buffer(max_tokens * problem.token_row_bytes(), places.others);
    weights_ = make_buffer(max_tokens * topk() * sizeof(float), places.others);
    received_ = make_buffer(num_rows * problem.received_row_bytes(), places.outputs);
    if (problem.has_scales()) {
        const size_t shift = odd_scales ? problem.scale_row_bytes() / problem.num_scales : 0;
        received_scales_ = make_buffer(num_rows * problem.scale_row_bytes(), places.outputs, shift);
        if (problem.recipe == reference::Recipe::kForward)
            scales_ = make_buffer(max_tokens * problem.scale_row_bytes(), places.others, shift);
    }
    const bool fits = problem.received_type() == problem.combine_type && problem.hidden == problem.combine_hidden;
    if (!in_place || !fits) combine_input_ = make_buffer(num_rows * problem.combine_row_bytes(), places.combine_input);
    combine_output_ = make_buffer(max_tokens * problem.combine_row_bytes(), places.others);
}

std::unique_ptr<Buffer> LayerBase::make_buffer(size_t bytes, WindowArena* arena, size_t shift) {
    return std::make_unique<Buffer>(context_, stream_, bytes, arena, shift);
}

void LayerBase::destroy_handle() {
    const ncclResult_t result = ncclEpHandleDestroy(std::exchange(handle_, nullptr));
    RANK_CHECK(context_, result == ncclSuccess, "ncclEpHandleDestroy answered {}: {}", result_name(result),
               crossdockGetLastError());
}

void LayerBase::write_routing() {
    ids_->poison();
    ids_->write(as_integers(problem().index_type, problem().ranks[context_.rank()].ids));
}

void LayerBase::write_inputs() {
    const reference::RankInput& own = problem().ranks[context_.rank()];
    Bytes tokens;
    Bytes scales;
    for (int token = 0; token < own.num_tokens; ++token) {
        const Bytes row = token_row(problem(), context_.rank(), token);
        tokens.insert(tokens.end(), row.begin(), row.end());
        if (!scales_) continue;
        const Bytes scale = scale_row(problem(), context_.rank(), token);
        scales.insert(scales.end(), scale.begin(), scale.end());
    }
    poison({weights_.get(), tokens_.get(), scales_.get()});
    weights_->write(as_bytes(own.weights));
    tokens_->write(tokens);
    if (scales_) scales_->write(scales);
}

void LayerBase::poison(std::initializer_list<Buffer*> buffers) {
    for (Buffer* buffer : buffers) {
        if (buffer != nullptr) buffer->poison();
    }
}

ncclEpTensor_t* LayerBase::ids_tensor(Call& call) const {
    return call.tensor(problem().index_type, {num_tokens(), topk()}, ids_.get());
}

Bytes LayerBase::background(const Buffer& output) const {
    return unused_rows_matter_ ? Bytes(output.bytes(), kPoison) : output.read();
}

void LayerBase::check_bounds(const Bytes& seen, const std::function<reference::BoundedRow(int token)>& bounded) {
    const std::vector<float> values = reference::decoded(problem().combine_type, seen);
    for (size_t token = 0; token < num_tokens(); ++token) {
        const reference::BoundedRow row = bounded(static_cast<int>(token));
        for (size_t i = 0; i < row.sum.size(); ++i) {
            const double value = values[token * problem().combine_hidden + i];
            if (std::fabs(value - row.sum[i]) <= row.bound[i]) continue;
            RANK_CHECK(
                context_, false,
                "combine's token {}, element {}: {:g}, the sum is {:g}, which leaves {:g} more than the bound {:g}",
                token, i, value, row.sum[i], std::fabs(value - row.sum[i]) - row.bound[i], row.bound[i]);
            return;
        }
    }
}

}  // namespace crossdock::testing
