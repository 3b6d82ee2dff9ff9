// SPDX-License-Identifier: Apache-2.0
// A high-throughput handle with all its buffers, driven through the C API in both directions and compared with the
// reference after every step.
#pragma once

#include <optional>

#include "conformance/ll/layer.h"
#include "conformance/support/random_problem.h"
#include "reference/ht_combine.h"

namespace crossdock::testing {

using reference::HtRouting;

// The ways in which a caller may do the same thing.
struct HtOptions {
    WindowArena* arena = nullptr;  // where windows are cut from
    Naming naming = Naming::kWindowOnly;
    bool output_windows = false;   // dispatch's tokens and scales lie in windows
    bool combine_windows = false;  // combine's input tokens do
    bool other_windows = false;    // all other tensors do
    bool create_in_one_call = false;
    bool open_topk = false;  // ncclEpInitHandle without K
    bool own_handle_memory = false;
    Buffer* handle_memory = nullptr;  // the memory to make the handle over
    bool without_update = false;      // the handle is made without one: that memory is routed, or an update follows
    bool odd_scales = false;          // scales begin at no multiple of more than their element
    bool in_place = false;            // combine reads the tensor that dispatch filled, where its type and width allow
    bool null_configs = false;        // NULL for configs that hold defaults only
    bool version_1_structs = false;   // config and layout structs end where version 1's did
    bool ask_counters = true;         // which numbers update is asked for
    bool ask_offsets = true;
    bool ask_total = true;
    ncclDataType_t counter_type = ncclInt32;  // FLAT's expert counters are always int32
    bool dispatch_counters = false;           // dispatch is asked for the same numbers (expert-major)
    size_t extra_rows = 0;                    // rows of the receive tensors past those that must be there
    size_t extra_metadata_rows = 0;
    bool exact_rows = false;          // receive tensors have just the rows that arrive (version 1 callers)
    bool exact_combine_rows = false;  // combine's input has just the rows that were received
    bool peers_may_die = false;       // nobody meets before calls, since some may not come
    bool keep_outputs = false;        // what an earlier dispatch left in unused rows stays there, and inputs survive
};

// As much memory as a handle for this problem needs.
std::unique_ptr<Buffer> make_handle_memory(RankContext& context, ncclEpGroup_t group, const Problem& problem,
                                           cudaStream_t stream);

// Ways to state the calls. arena: where windows come from, if there are any.
HtOptions random_ht_options(uint64_t seed, WindowArena* arena);

class HtLayer : public LayerBase {
  public:
    HtLayer(RankContext& context, ncclEpGroup_t group, const Problem& problem, const HtOptions& options = {},
            cudaStream_t stream = nullptr);
    ~HtLayer() override { destroy_handle(); }

    const Problem& problem() const override { return problem_; }
    const HtRouting& routing() const { return *routing_; }

    // Other tokens, routing and numbers of tokens in the same shapes, in the same buffers; then ncclEpUpdateHandle,
    // which must succeed.
    void route(const Problem& problem);
    // The same without telling the library: only what the buffers hold changes.
    void refill(const Problem& problem);
    // Another routing is expected than the one that was told: ranks were lost.
    void expect(const Problem& problem);
    // What dispatch carries and experts answer changes; the routing stays.
    void change_data(uint64_t seed);

    ncclResult_t update();
    // Poison in the numbers that update writes.
    void prepare_update();
    void check_update();
    // The number of rows that the last update told.
    int64_t updated_total() const;

    // Before a dispatch: its inputs, and poison in everything that it writes. With windows a barrier, since peers may
    // write from then on.
    void prepare_dispatch();
    ncclResult_t dispatch(ncclEpPassDir_t direction = NCCL_EP_FWD_PASS);
    // Rows of ranks that are not active are zeros.
    void check_dispatch(ncclEpPassDir_t direction = NCCL_EP_FWD_PASS, const ActiveRanks& active = {});

    // Before a combine: the experts' rows where dispatch put theirs, poison elsewhere and in the outputs.
    void prepare_combine();
    ncclResult_t combine(ncclEpPassDir_t direction = NCCL_EP_FWD_PASS);
    // Each token's row, and its weights, may also be as one of the other problems has them.
    void check_combine(ncclEpPassDir_t direction = NCCL_EP_FWD_PASS, const std::vector<Problem>& others = {});

    // Forward and backward, each step checked, after a look at what the last update wrote.
    void round_trip();
    void pass(ncclEpPassDir_t direction);

    // That all outputs are as prepare_dispatch and prepare_combine left them.
    void check_nothing_was_written();

  private:
    struct Numbers {  // what an update, or a dispatch, writes of the routing
        std::unique_ptr<Buffer> counters, offsets, total;
    };

    const reference::HtReceived& received() const { return routing_->received(context_.rank()); }
    // Rows of dispatch's receive tensors: of tokens and scales, and of weights and ids.
    size_t num_rows() const;
    size_t num_metadata_rows() const;
    size_t num_combine_rows() const;
    ncclDataType_t type_of_counters() const { return problem_.expert_major() ? options_.counter_type : ncclInt32; }

    WindowArena* arena_if(bool in_window) const { return in_window ? options_.arena : nullptr; }
    Numbers make_numbers();
    void make_own_buffers();
    ncclResult_t make_handle();
    ncclEpLayoutInfo_t numbers_info(Call& call, Numbers& numbers);
    void check_numbers(const Numbers& numbers, const char* of, bool asked);
    void check_metadata(const ActiveRanks& active);

    int lsa_team_size_;  // of the group
    Problem problem_;
    std::optional<HtRouting> routing_;
    HtOptions options_;
    bool is_updated_ = false;
    Numbers update_numbers_, dispatch_numbers_;
    std::unique_ptr<Buffer> gradients_, combined_gradients_;
};

}  // namespace crossdock::testing
