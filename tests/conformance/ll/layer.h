// SPDX-License-Identifier: Apache-2.0
// A handle with all its buffers, driven through the C API and compared with the reference after every
// step.
#pragma once

#include "conformance/support/group.h"
#include "reference/combine.h"

namespace crossdock::testing {

using reference::ActiveRanks;

// The ways in which a caller may do the same thing.
struct LayerOptions {
    WindowArena* arena = nullptr;  // where all tensors live, if not in memory of their own
    Naming naming = Naming::kData;
    bool create_in_one_call = false;  // ncclEpCreateHandle
    bool own_handle_memory = false;   // the caller's, for ncclEpInitHandle
    bool odd_scales = false;          // scales begin at no multiple of more than their element
    bool in_place = false;            // combine reads the tensor that dispatch filled, where its type and width allow
    bool source_counters = true;      // rank-major: asks for them
    bool ask_places = false;          // asks for experts' offsets (rank-major: ignored) and for the total
    ncclDataType_t place_type = ncclInt64;
    bool version_1_structs = false;  // config and layout structs end where version 1's did
    bool cut_structs = false;        // the same structs end within the field that comes behind, which holds rubbish
    bool null_configs = false;       // NULL for configs that hold defaults only
    bool peers_may_die = false;  // a handle that dead ranks keep from being made ends the program, without a failure
    bool keep_outputs = false;   // what an earlier dispatch left in unused rows stays there and is not looked at
};

class Layer {
  public:
    Layer(RankContext& context, ncclEpGroup_t group, const Problem& problem, const LayerOptions& options = {},
          cudaStream_t stream = nullptr);
    ~Layer();
    Layer(const Layer&) = delete;
    Layer& operator=(const Layer&) = delete;

    const Problem& problem() const { return problem_; }
    ncclEpHandle_t handle() const { return handle_; }
    std::byte* routing() const { return ids_->data(); }
    cudaStream_t stream() const { return stream_; }

    // Other tokens, routing and numbers of tokens in the same shapes, in the same buffers. Calls ncclEpUpdateHandle.
    void route(const Problem& problem);
    // The same without telling the library: only what the buffers hold changes, so numbers of tokens must not.
    void refill(const Problem& problem);

    // Before a dispatch: poison in everything that it writes. With windows a barrier, since peers may write from then
    // on.
    void prepare_dispatch();
    ncclResult_t dispatch(bool send_only = false);
    // lost_a_rank: rows past the counts may have been written too, by the attempt that ended with the loss.
    void check_dispatch(const ActiveRanks& active = {}, bool lost_a_rank = false);

    // Before a combine: the experts' rows where dispatch put theirs, poison elsewhere and in the output.
    void prepare_combine(const ActiveRanks& active = {});
    ncclResult_t combine(bool send_only = false);
    void check_combine(const ActiveRanks& active = {});

    ncclResult_t complete();

    // All of it, each step checked.
    void round_trip(const ActiveRanks& active = {});
    // What combine wrote, to compare runs.
    std::vector<std::byte> combined() const { return combine_output_->read(); }

  private:
    int num_tokens() const { return problem_.ranks[context_.rank()].num_tokens; }
    std::unique_ptr<Buffer> make_buffer(size_t bytes, size_t shift = 0);
    ncclResult_t make_handle();
    ncclResult_t update_handle();
    void write_inputs();
    Buffer& combine_input() { return options_.in_place ? *received_ : *combine_input_; }
    // What unused rows of an output must hold: poison, or whatever is there.
    std::vector<std::byte> background(const Buffer& output) const;
    bool unused_rows_matter_ = true;
    void check_places(const std::vector<int32_t>& counts);
    void check_scales(const std::vector<std::vector<reference::RowSource>>& blocks);
    void check_rank_major(const std::vector<std::vector<reference::RowSource>>& blocks);
    void check_bounds(const std::vector<std::byte>& seen, const ActiveRanks& active);

    RankContext& context_;
    ncclEpGroup_t group_;
    Problem problem_;
    LayerOptions options_;
    cudaStream_t stream_;
    ncclEpHandle_t handle_ = nullptr;

    // Dispatch: its inputs, then its outputs (null where the layout or the recipe has none).
    std::unique_ptr<Buffer> ids_, tokens_, scales_, weights_;
    std::unique_ptr<Buffer> received_, received_scales_, received_weights_, received_ids_, counters_, offsets_, total_;
    // Combine.
    std::unique_ptr<Buffer> combine_input_, combine_scales_, combine_output_;
    std::unique_ptr<Buffer> handle_memory_;
};

}  // namespace crossdock::testing
