// SPDX-License-Identifier: Apache-2.0
// What layers of both modes have: a handle, the buffers of a step, what goes into them, and the comparisons that ask
// nothing of the mode.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>

#include "conformance/support/group.h"
#include "reference/combine.h"

namespace crossdock::testing {

using reference::ActiveRanks;
using Bytes = std::vector<std::byte>;

inline void put(Bytes& image, size_t offset, const Bytes& row) {
    std::copy(row.begin(), row.end(), image.begin() + static_cast<std::ptrdiff_t>(offset));
}

template <typename Value>
Bytes as_bytes(const std::vector<Value>& values) {
    const auto* const first = reinterpret_cast<const std::byte*>(values.data());
    return Bytes(first, first + values.size() * sizeof(Value));
}

// As a tensor of int32 or int64 has them.
inline Bytes as_integers(ncclDataType_t type, const std::vector<int64_t>& numbers) {
    if (type == ncclInt64) return as_bytes(numbers);
    return as_bytes(std::vector<int32_t>(numbers.begin(), numbers.end()));
}

class LayerBase {
  public:
    // A constructor that threw has not reached the destructor that destroys the handle.
    virtual ~LayerBase() { ncclEpHandleDestroy(handle_); }
    LayerBase(const LayerBase&) = delete;
    LayerBase& operator=(const LayerBase&) = delete;

    virtual const Problem& problem() const = 0;
    ncclEpHandle_t handle() const { return handle_; }
    cudaStream_t stream() const { return stream_; }
    // Where topk_idx lies.
    std::byte* ids() const { return ids_->data(); }
    // What combine wrote, to compare runs.
    Bytes combined() const { return combine_output_->read(); }

  protected:
    // The tensors of one call; they go with it.
    class Call {
      public:
        explicit Call(Naming naming) : naming_(naming) {}
        // Null for a buffer that is null.
        ncclEpTensor_t* tensor(ncclDataType_t type, std::initializer_list<size_t> sizes, const Buffer* buffer);

      private:
        Naming naming_;
        std::deque<Tensor> tensors_;
    };

    // Where buffers lie; null: in memory of their own.
    struct Places {
        WindowArena* outputs;  // dispatch's tokens and scales
        WindowArena* combine_input;
        WindowArena* others;
    };

    // Without a stream: on one of its own.
    LayerBase(RankContext& context, ncclEpGroup_t group, cudaStream_t stream)
        : context_(context), group_(group), stream_(stream != nullptr ? stream : context.make_stream()) {}

    size_t num_tokens() const { return static_cast<size_t>(problem().ranks[context_.rank()].num_tokens); }
    size_t topk() const { return static_cast<size_t>(problem().num_topk); }
    size_t local_experts() const { return static_cast<size_t>(problem().local_experts()); }

    // Those of both modes, for receive tensors of so many rows. in_place: combine reads the tensor that dispatch
    // filled, where its type and width allow. odd_scales: scales begin at no multiple of more than their element.
    void make_buffers(size_t num_rows, const Places& places, bool in_place, bool odd_scales);
    std::unique_ptr<Buffer> make_buffer(size_t bytes, WindowArena* arena, size_t shift = 0);
    // Must succeed. Before any buffer goes.
    void destroy_handle();

    void write_routing();
    void write_inputs();
    static void poison(std::initializer_list<Buffer*> buffers);
    ncclEpTensor_t* ids_tensor(Call& call) const;
    Buffer& combine_input() { return combine_input_ ? *combine_input_ : *received_; }
    // What unused rows of an output must hold: poison, or whatever is there.
    Bytes background(const Buffer& output) const;
    // That combine wrote sums within their bounds.
    void check_bounds(const Bytes& seen, const std::function<reference::BoundedRow(int token)>& bounded);

    RankContext& context_;
    ncclEpGroup_t group_;
    cudaStream_t stream_;
    ncclEpHandle_t handle_ = nullptr;
    bool unused_rows_matter_ = true;

    // Dispatch: its inputs, then its outputs (null where the layout or the recipe has none).
    std::unique_ptr<Buffer> ids_, tokens_, scales_, weights_;
    std::unique_ptr<Buffer> received_, received_scales_, received_weights_, received_ids_;
    // Combine; its input is null if it is received_.
    std::unique_ptr<Buffer> combine_input_, combine_output_;
    std::unique_ptr<Buffer> handle_memory_;
};

}  // namespace crossdock::testing
