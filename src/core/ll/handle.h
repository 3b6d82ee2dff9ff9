// SPDX-License-Identifier: Apache-2.0
// A handle in low-latency mode, with its pending send_only operation.
#pragma once

#include <optional>
#include <variant>

#include "core/elastic.h"
#include "core/handle.h"
#include "core/tensor.h"
#include "kernels/ll/launch.h"

namespace crossdock {

struct CombineRecipe;
struct DispatchRecipe;

class LlHandle final : public Handle {
  public:
    static size_t memory_bytes(const Group& group, ncclEpLayout_t layout, int num_topk);
    // Collective only if the group must make an arena.
    static std::shared_ptr<Handle> create(const std::shared_ptr<Group>& group, ncclEpLayout_t layout, int num_topk,
                                          const ncclEpTensor_t* handle_mem);

    void update(const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* layout_info, cudaStream_t stream) override;
    void dispatch(const ncclEpDispatchInputs_t* inputs, const ncclEpDispatchOutputs_t* outputs,
                  const ncclEpLayoutInfo_t* layout_info, const ncclEpDispatchConfig_t* config,
                  cudaStream_t stream) override;
    void combine(const ncclEpCombineInputs_t* inputs, const ncclEpCombineOutputs_t* outputs,
                 const ncclEpCombineConfig_t* config, cudaStream_t stream) override;
    void elastic_dispatch(const crossdockElasticDispatch_t& call, cudaStream_t stream) override;
    void elastic_combine(const crossdockElasticCombine_t& call, cudaStream_t stream) override;
    void complete(const ncclEpCompleteConfig_t* config, cudaStream_t stream) override;
    void set_sums(crossdockSums_t sums) override;
    void set_alignment(unsigned int alignment) override;
    void set_sms(unsigned int num_sms) override { num_sms_ = num_sms; }
    RowBlocks overlap_blocks(unsigned int block_rows) const override;
    void set_overlap(const crossdockOverlap_t* overlap) override;
    Sms sms() const override;
    void rebind(const ncclEpTensor_t* topk_idx) override;
    void dropped_tokens(uint64_t* count, cudaStream_t stream) override;
    void routing(const ncclEpTensor_t* topk_idx, cudaStream_t stream) override;
    void sources(const ncclEpTensor_t* tokens, const ncclEpTensor_t* ranges, cudaStream_t stream) override;
    void cancel_pending() override;
    void release_memory() override;
    void forget_routing() override { routing_.topk_idx = nullptr, has_routing_ = false; }

  private:
    using Handle::Handle;

    struct Routing {
        std::byte* topk_idx = nullptr;  // the caller's, not owned
        bool ids_are_64_bit = false;
        uint32_t num_tokens = 0;

        bool operator==(const Routing&) const = default;
    };

    // What a combine of an elastic dispatch's rows goes by.
    struct Elastic {
        Routing routing;
        uint32_t rows;  // of its outputs
    };

    LlHandleLayout layout() const;
    ElasticSizes elastic_sizes() const;
    LlCommon common(OperationKind operation, bool send_only) const;
    void expect_elastic() const;
    void expect_published() const;
    void expect_routing() const;
    void expect_dispatched_routing() const;
    Routing read_routing(const ncclEpTensor_t* topk_idx, size_t num_tokens, const char* meaning) const;
    Tensor topk_idx() const;  // of routing_
    void expect_none_pending() const;
    void expect_may_start(bool send_only) const;
    void read_dispatch_tokens(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                              const DispatchRecipe& recipe, LlDispatchArgs& args, std::optional<PeerMap>& token_window,
                              WindowPlace& token_place, CallMemory& memory) const;
    void read_dispatch_scales(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                              const DispatchRecipe& recipe, LlDispatchArgs& args, std::optional<PeerMap>& scale_window,
                              WindowPlace& scale_place, CallMemory& memory) const;
    void read_dispatch_routing(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                               const ncclEpLayoutInfo_t* layout_info, LlDispatchArgs& args, CallMemory& memory) const;
    void read_dispatch_places(const ncclEpLayoutInfo_t& info, LlDispatchArgs& args, CallMemory& memory) const;
    void read_combine_recipe(const ncclEpCombineInputs_t& inputs, const CombineRecipe& recipe, const Tensor& tokens,
                             LlCombineArgs& args, CallMemory& memory) const;
    // Launches. Keeps what finish_pending needs if the operation has no receive half.
    template <typename Kernel>
    void issue(const typename Kernel::Args& args, const LaunchShape& shape, cudaStream_t stream);
    // Issues the rest of the pending operation, if any. Afterwards none is pending, even if the launch fails.
    void finish_pending(uint32_t halves, cudaStream_t stream);

    std::shared_ptr<LlArena> arena_;
    crossdockSums_t sums_ = CROSSDOCK_SUMS_EXACT;
    unsigned int num_sms_ = 0;  // 0: the group's
    LlOverlap overlap_{};
    LlOverlap published_{};  // of the last dispatch

    Routing routing_;
    std::optional<Routing> dispatched_;  // the routing of the last dispatch, if there was one; not of an elastic one
    std::optional<Elastic> elastic_;     // of the last dispatch, if it was elastic
    bool is_rebound_ = false;            // routing_ was rebound since and may omit choices

    template <typename Kernel>
    struct Pending {
        typename Kernel::Args args;
        LaunchShape shape;
    };
    std::variant<std::monostate, Pending<LlDispatch>, Pending<LlCombine>> pending_;
};

template <typename Kernel>
void LlHandle::issue(const typename Kernel::Args& args, const LaunchShape& shape, cudaStream_t stream) {
    DeviceScope device(group_->runtime());
    before_operation(stream);
    launch<Kernel>(group_->runtime(), args, shape, stream);
    const bool rest_follows = args.common.halves == kSendHalf;
    if (rest_follows) {
        pending_ = Pending<Kernel>{args, shape};
        ++arena_->pending_splits;
    }
    group_->after_operation(stream, rest_follows);
}

}  // namespace crossdock
