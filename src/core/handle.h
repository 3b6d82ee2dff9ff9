// SPDX-License-Identifier: Apache-2.0
// A handle: the routing of one layer or micro-batch, what its dispatch leaves for its combine, and its pending
// send_only operation.
#pragma once

#include <memory>
#include <variant>

#include "core/group.h"
#include "core/tensor.h"
#include "kernels/ll/arguments.h"

namespace crossdock {

class Handle {
  public:
    // Bytes of handle_mem. Checks layout, alignment and top-k.
    static size_t memory_bytes(const Group& group, ncclEpLayout_t layout, const ncclEpHandleConfig_t* config,
                               int num_topk);

    // Collective only where the group must make an arena. handle_mem NULL: library-owned.
    static std::shared_ptr<Handle> create(const std::shared_ptr<Group>& group, ncclEpLayout_t layout,
                                          const ncclEpHandleConfig_t* config, int num_topk,
                                          const ncclEpTensor_t* handle_mem);
    ~Handle();

    void update(const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* layout_info);
    void dispatch(const ncclEpDispatchInputs_t* inputs, const ncclEpDispatchOutputs_t* outputs,
                  const ncclEpLayoutInfo_t* layout_info, const ncclEpDispatchConfig_t* config, cudaStream_t stream);
    void combine(const ncclEpCombineInputs_t* inputs, const ncclEpCombineOutputs_t* outputs,
                 const ncclEpCombineConfig_t* config, cudaStream_t stream);
    void complete(const ncclEpCompleteConfig_t* config, cudaStream_t stream);
    void set_sums(crossdockSums_t sums);

    // Gives a pending operation's buffer back; called before the handle goes.
    void cancel_pending();
    void release_memory();  // the group goes first

    Group& group() const { return *group_; }
    uint32_t topk() const { return topk_; }
    void forget_routing() { topk_idx_ = nullptr, has_routing_ = false; }

  private:
    Handle(std::shared_ptr<Group> group, ncclEpLayout_t layout, uint32_t topk);

    bool is_expert_major() const { return layout_ == NCCL_EP_LAYOUT_EXPERT_MAJOR; }
    LlHandleGeometry geometry() const;
    LlCommon common(OperationKind operation, bool send_only) const;
    void expect_routing() const;
    void expect_may_start(bool send_only) const;
    void read_dispatch_tokens(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                              ncclEpDispQuant_t recipe, LlDispatchArgs& args,
                              std::optional<PeerMap>& token_window) const;
    void read_dispatch_scales(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                              ncclEpDispQuant_t recipe, LlDispatchArgs& args,
                              std::optional<PeerMap>& scale_window) const;
    void read_dispatch_routing(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                               const ncclEpLayoutInfo_t* layout_info, LlDispatchArgs& args) const;
    void read_combine_recipe(const ncclEpCombineInputs_t& inputs, unsigned int recipe, const Tensor& tokens,
                             LlCombineArgs& args) const;
    void run(LlDispatchArgs& args, cudaStream_t stream);
    void run(LlCombineArgs& args, cudaStream_t stream);
    // After a send half was issued: what Complete needs.
    template <typename Args>
    void keep_pending(const Args& args);

    std::shared_ptr<Group> group_;
    ncclEpLayout_t layout_;
    uint32_t topk_;
    uint64_t number_ = 0;
    std::shared_ptr<LlArena> arena_;
    DeviceMemory owned_memory_;
    std::byte* memory_ = nullptr;
    crossdockSums_t sums_ = CROSSDOCK_SUMS_EXACT;

    bool has_routing_ = false;
    const void* topk_idx_ = nullptr;  // the caller's, borrowed
    bool ids_are_64_bit_ = false;
    uint32_t num_tokens_ = 0;

    bool has_dispatched_ = false;
    std::variant<std::monostate, LlDispatchArgs, LlCombineArgs> pending_;
};

}  // namespace crossdock
