// SPDX-License-Identifier: Apache-2.0
// A handle: the routing of one layer or micro-batch, and the state that its dispatch leaves for its combine. One class
// per mode behind one interface.
#pragma once

#include <memory>

#include "core/group.h"
#include "kernels/row_blocks.h"

namespace crossdock {

class Handle {
  public:
    // Bytes of handle_mem. Checks layout, alignment and top-k.
    static size_t memory_bytes(const Group& group, ncclEpLayout_t layout, const ncclEpHandleConfig_t* config,
                               int num_topk);

    // Collective only if the group must make memory that ranks share. handle_mem NULL: library-owned.
    static std::shared_ptr<Handle> create(const std::shared_ptr<Group>& group, ncclEpLayout_t layout,
                                          const ncclEpHandleConfig_t* config, int num_topk,
                                          const ncclEpTensor_t* handle_mem);
    virtual ~Handle();
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;

    virtual void update(const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* layout_info, cudaStream_t stream) = 0;
    virtual void dispatch(const ncclEpDispatchInputs_t* inputs, const ncclEpDispatchOutputs_t* outputs,
                          const ncclEpLayoutInfo_t* layout_info, const ncclEpDispatchConfig_t* config,
                          cudaStream_t stream) = 0;
    virtual void combine(const ncclEpCombineInputs_t* inputs, const ncclEpCombineOutputs_t* outputs,
                         const ncclEpCombineConfig_t* config, cudaStream_t stream) = 0;
    virtual void elastic_dispatch(const crossdockElasticDispatch_t& call, cudaStream_t stream) = 0;
    virtual void elastic_combine(const crossdockElasticCombine_t& call, cudaStream_t stream) = 0;
    virtual void complete(const ncclEpCompleteConfig_t* config, cudaStream_t stream) = 0;
    virtual void set_sums(crossdockSums_t sums) = 0;
    void set_tag(unsigned int tag);
    virtual void set_alignment(unsigned int alignment) = 0;
    virtual void set_sms(unsigned int num_sms) = 0;
    struct Sms {
        unsigned int update, dispatch, combine;
    };
    virtual Sms sms() const = 0;
    virtual RowBlocks overlap_blocks(unsigned int block_rows) const = 0;  // without memory
    virtual void set_overlap(const crossdockOverlap_t* overlap) = 0;      // NULL: none
    virtual void rebind(const ncclEpTensor_t* topk_idx) = 0;
    virtual void dropped_tokens(uint64_t* count, cudaStream_t stream) = 0;  // count: device memory
    virtual void routing(const ncclEpTensor_t* topk_idx, cudaStream_t stream) = 0;
    virtual void sources(const ncclEpTensor_t* tokens, const ncclEpTensor_t* ranges, cudaStream_t stream) = 0;

    // Releases a pending operation's buffer; called before the handle is destroyed.
    virtual void cancel_pending() {}
    virtual void release_memory();  // called if the group is destroyed first
    virtual void forget_routing() { has_routing_ = false; }

    Group& group() const { return *group_; }
    uint32_t topk() const { return topk_; }
    bool is_expert_major() const { return layout_ == NCCL_EP_LAYOUT_EXPERT_MAJOR; }

  protected:
    Handle(std::shared_ptr<Group> group, ncclEpLayout_t layout, uint32_t topk);

    // Uses the caller's memory, checked, or memory of the group's allocator.
    void bind_memory(const ncclEpTensor_t* handle_mem, size_t bytes);
    void join_group() { number_ = group_->add_handle(this); }
    // Call before every launch that uses the handle's memory.
    void before_operation(cudaStream_t stream) { is_in_graphs_ |= group_->before_operation(stream); }

    std::shared_ptr<Group> group_;
    ncclEpLayout_t layout_;
    uint32_t topk_;
    uint64_t number_ = 0;
    DeviceMemory owned_memory_;
    std::byte* memory_ = nullptr;
    uint32_t tag_ = 0;  // of the next operations
    bool has_routing_ = false;
    bool is_in_graphs_ = false;  // a captured operation uses the memory
};

}  // namespace crossdock
