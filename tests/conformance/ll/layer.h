// SPDX-License-Identifier: Apache-2.0
// A handle with all its buffers, driven through the C API and compared with the reference after every
// step.
#pragma once

#include "conformance/support/layer_base.h"

namespace crossdock::testing {

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

class Layer : public LayerBase {
  public:
    Layer(RankContext& context, ncclEpGroup_t group, const Problem& problem, const LayerOptions& options = {},
          cudaStream_t stream = nullptr);
    ~Layer() override { destroy_handle(); }

    const Problem& problem() const override { return problem_; }

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

  private:
    ncclResult_t make_handle();
    ncclResult_t update_handle();
    void check_places(const std::vector<int32_t>& counts);
    void check_scales(const std::vector<std::vector<reference::RowSource>>& blocks);
    void check_rank_major(const std::vector<std::vector<reference::RowSource>>& blocks);

    Problem problem_;
    LayerOptions options_;
    std::unique_ptr<Buffer> counters_, offsets_, total_;
    std::unique_ptr<Buffer> combine_scales_;
};

}  // namespace crossdock::testing
