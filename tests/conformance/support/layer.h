// SPDX-License-Identifier: Apache-2.0
// A handle of either mode with all its buffers, driven through the C API and compared with the reference after every
// step.
#pragma once

#include <algorithm>
#include <deque>
#include <optional>

#include "conformance/support/group.h"
#include "conformance/support/layer_options.h"
#include "conformance/support/overlap.h"
#include "reference/ht_combine.h"

namespace crossdock::testing {

using reference::ActiveRanks;
using reference::HtRouting;
using reference::RowSource;
using Bytes = std::vector<std::byte>;

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

// The extents of a tensor in which rows arrive or from which they return: [blocks, slots, width] in low latency,
// [num_rows, width] in high throughput; and of one of weights, which in the expert-major layout of high throughput is
// [num_rows].
std::vector<size_t> row_extents(const Problem& problem, size_t num_rows, size_t width);
std::vector<size_t> weight_extents(const Problem& problem, size_t num_rows);
// Of received expert ids.
inline ncclDataType_t id_type(const Problem& problem) { return problem.is_ht() ? ncclInt64 : ncclInt32; }

// As much memory as a handle for this problem needs.
std::unique_ptr<Buffer> make_handle_memory(RankContext& context, ncclEpGroup_t group, const Problem& problem,
                                           cudaStream_t stream);

class Layer {
  public:
    // Without a stream: on one of its own.
    Layer(RankContext& context, ncclEpGroup_t group, const Problem& problem, const LayerOptions& options = {},
          cudaStream_t stream = nullptr);
    ~Layer();
    Layer(const Layer&) = delete;
    Layer& operator=(const Layer&) = delete;

    const Problem& problem() const { return problem_; }
    const HtRouting& routing() const { return *routing_; }  // high throughput
    ncclEpHandle_t handle() const { return handle_.get(); }
    cudaStream_t stream() const { return stream_; }
    // Where topk_idx lies.
    std::byte* ids() const { return ids_->data(); }
    // What combine wrote, to compare runs.
    Bytes combined() const { return combine_output_->read(); }
    // Where dispatch's rows arrive, and where combine reads.
    const Buffer& arrived() const { return *received_; }
    const Buffer& tokens() const { return *tokens_; }
    // High throughput.
    const reference::HtReceived& received() const { return routing_->received(context_.rank()); }
    Buffer& combine_rows() { return combine_input(); }

    // Other tokens, routing and numbers of tokens in the same shapes, in the same buffers; then ncclEpUpdateHandle,
    // which must succeed.
    void route(const Problem& problem);
    // The same without telling the library: only what the buffers hold changes.
    void refill(const Problem& problem);
    // Another routing is expected than the one that was told: ranks were lost.
    void expect(const Problem& problem);
    // What dispatch carries and experts answer changes; the routing stays (high throughput).
    void change_data(uint64_t seed) { problem_.seed = seed; }

    ncclResult_t update();
    // Poison in the numbers that update writes.
    void prepare_update();
    void check_update();
    // The number of rows that the last update told.
    int64_t updated_total() const;

    // Before a dispatch: its inputs, and poison in everything that it writes. With windows a barrier, since peers may
    // write from then on.
    void prepare_dispatch();
    ncclResult_t dispatch(ncclEpPassDir_t direction = NCCL_EP_FWD_PASS) { return dispatch(direction, false); }
    // The first half of a low-latency dispatch, to be completed.
    ncclResult_t send_dispatch() { return dispatch(NCCL_EP_FWD_PASS, true); }
    // Rows of ranks that are not active do not come in low latency, and are zeros in high throughput. lost_a_rank: rows
    // past the counts may have been written too, by the attempt that ended with the loss.
    void check_dispatch(ncclEpPassDir_t direction = NCCL_EP_FWD_PASS, const ActiveRanks& active = {},
                        bool lost_a_rank = false);

    // Before a combine: the experts' rows where dispatch put theirs, poison elsewhere and in the outputs.
    void prepare_combine(const ActiveRanks& active = {});
    ncclResult_t combine(ncclEpPassDir_t direction = NCCL_EP_FWD_PASS) { return combine(direction, false); }
    ncclResult_t send_combine() { return combine(NCCL_EP_FWD_PASS, true); }
    // High throughput: each token's row, and its weights, may also be as one of the other problems has them.
    void check_combine(ncclEpPassDir_t direction = NCCL_EP_FWD_PASS, const ActiveRanks& active = {},
                       const std::vector<Problem>& others = {});

    ncclResult_t complete();

    // Dispatch and combine, each step checked.
    void pass(ncclEpPassDir_t direction);
    // All passes of the mode; high throughput goes backward, too, after a look at what the last update wrote.
    void round_trip();

    // That all outputs are as prepare_dispatch and prepare_combine left them.
    void check_nothing_was_written();

  private:
    struct DestroyHandle {
        void operator()(ncclEpHandle_t handle) const { ncclEpHandleDestroy(handle); }
    };
    struct Numbers {  // what an update, or a dispatch, writes of the routing
        std::unique_ptr<Buffer> counters, offsets, total;
    };
    // A row of the receive tensors.
    struct ReceivedRow {
        size_t index;
        RowSource source;
        bool is_lost;  // its rank is not active
    };
    // The tensors of one call; they go with it.
    class Call {
      public:
        explicit Call(Naming naming) : naming_(naming) {}
        // Null for a buffer that is null.
        ncclEpTensor_t* tensor(ncclDataType_t type, const std::vector<size_t>& sizes, const Buffer* buffer);

      private:
        Naming naming_;
        std::deque<Tensor> tensors_;
    };

    size_t num_tokens() const { return static_cast<size_t>(problem_.ranks[context_.rank()].num_tokens); }
    size_t topk() const { return static_cast<size_t>(problem_.num_topk); }
    size_t local_experts() const { return static_cast<size_t>(problem_.local_experts()); }
    // Rows of dispatch's receive tensors: of tokens and scales, and of weights and ids.
    size_t num_rows() const;
    size_t num_metadata_rows() const;
    size_t num_combine_rows() const;

    bool asks(std::optional<bool> option) const { return option.value_or(problem_.is_ht()); }
    bool asks_counters() const { return options_.ask_counters || (!problem_.is_ht() && problem_.expert_major()); }
    size_t num_counters() const;
    ncclDataType_t type_of_counters() const;

    // In the arena if such tensors lie there.
    std::unique_ptr<Buffer> make_buffer(size_t bytes, unsigned kind, size_t shift = 0);
    Numbers make_numbers();
    void make_buffers();
    ncclResult_t make_handle();
    void write_routing();
    void write_inputs();
    static void poison(std::initializer_list<Buffer*> buffers);

    void limit_sms(bool is_update);
    ncclEpTensor_t* ids_tensor(Call& call) const;
    ncclEpLayoutInfo_t numbers_info(Call& call, const Numbers& numbers);
    ncclResult_t dispatch(ncclEpPassDir_t direction, bool send_only);
    ncclResult_t combine(ncclEpPassDir_t direction, bool send_only);

    std::vector<ReceivedRow> received_rows(const ActiveRanks& active) const;
    // What unused rows of an output must hold: poison, or whatever is there.
    Bytes background(const Buffer& output) const;
    // rows: those of a low-latency dispatch, which counts them.
    void check_numbers(const Numbers& numbers, const std::string& of, bool asked,
                       const std::vector<ReceivedRow>& rows = {});
    void check_metadata(const std::vector<ReceivedRow>& rows);
    void check_overlap(const std::vector<ReceivedRow>& rows) const;
    // That combine wrote sums within their bounds.
    void check_bounds(const Bytes& seen, const ActiveRanks& active);
    Buffer& combine_input() { return combine_input_ ? *combine_input_ : *received_; }

    RankContext& context_;
    ncclEpGroup_t group_;
    cudaStream_t stream_;
    Problem problem_;
    LayerOptions options_;
    std::optional<HtRouting> routing_;  // high throughput
    int lsa_team_size_ = 0;             // of the group (high throughput)
    bool is_updated_ = false;
    Random sms_;
    bool unused_rows_matter_ = true;

    // Dispatch: its inputs, then its outputs (null where the mode, the layout or the recipe has none).
    std::unique_ptr<Buffer> ids_, tokens_, scales_, weights_;
    std::unique_ptr<Buffer> received_, received_scales_, received_weights_, received_ids_;
    Numbers update_numbers_, dispatch_numbers_;
    // Combine; its input is null if it is received_. The gradients are those of weights, in high throughput.
    std::unique_ptr<Buffer> combine_input_, combine_scales_, gradients_;
    std::unique_ptr<Buffer> combine_output_, combined_gradients_;
    std::unique_ptr<Buffer> handle_memory_;
    std::optional<Overlap> overlap_;
    // Goes before any buffer, also where a constructor throws.
    std::unique_ptr<ncclEpHandle, DestroyHandle> handle_;
};

}  // namespace crossdock::testing
