// SPDX-License-Identifier: Apache-2.0
// A handle in high-throughput mode. The results of an Update are in the handle's memory; the host keeps what it needs
// to check arguments, as far as it knows it.
#pragma once

#include <atomic>
#include <optional>

#include "core/elastic.h"
#include "core/handle.h"
#include "core/tensor.h"
#include "kernels/ht/arguments.h"

namespace crossdock {

class HtHandle final : public Handle {
  public:
    static size_t memory_bytes(const Group& group, ncclEpLayout_t layout, const ncclEpHandleConfig_t& config,
                               int num_topk);
    // Local.
    static std::shared_ptr<Handle> create(const std::shared_ptr<Group>& group, ncclEpLayout_t layout,
                                          const ncclEpHandleConfig_t& config, int num_topk,
                                          const ncclEpTensor_t* handle_mem);
    ~HtHandle() override;

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
    void set_sms(unsigned int num_sms) override;
    RowBlocks overlap_blocks(unsigned int block_rows) const override;
    void set_overlap(const crossdockOverlap_t* overlap) override;
    Sms sms() const override;
    void rebind(const ncclEpTensor_t* topk_idx) override;
    void dropped_tokens(uint64_t* count, cudaStream_t stream) override;
    void routing(const ncclEpTensor_t* topk_idx, cudaStream_t stream) override;
    void sources(const ncclEpTensor_t* tokens, const ncclEpTensor_t* ranges, cudaStream_t stream) override;
    void release_memory() override;

    // Rows (flat) or padded slots (expert-major) of the current routing, at most the budget. Waits until known.
    uint32_t num_received(cudaStream_t stream);

  private:
    using Handle::Handle;

    HtHandleGeometry geometry() const;
    Sms blocks() const;
    uint32_t combine_blocks(HtWire wire) const;  // with the default of what it sends
    HtCommon common(OperationKind operation, uint32_t channels) const;
    void add_agreed(HtCommon& common) const;  // once the other terms are there
    bool is_eager() const { return group_->config().max_recv_tokens == 0; }
    uint32_t budget() const;
    // Afterwards the number of tokens is known, and the total if that needs no waiting (or wait is set). own_rows: the
    // call's tensor with a row for each token of this rank, and its name; both null if the call has none.
    void expect_routing(cudaStream_t stream, const ncclEpTensor_t* own_rows, const char* name);
    // Relocation (relocation.cpp): handles in the same memory of the caller share their updates.
    HtRoutingMaker maker() const;
    bool overlaps(const HtHandle& other) const;
    bool can_share_with(const HtHandle& other) const;
    void join_sharers();
    void leave_sharers() noexcept;
    void tell_sharers();
    void adopt(const HtHandle& other);
    void expect_not_overwritten() const;
    void read_routing(cudaStream_t stream, const std::optional<Tensor>& own_rows);
    void take_routing_as_it_is(const Tensor& own_rows);
    void learn_total(bool wait);
    HtCounters read_counters(const ncclEpLayoutInfo_t& info, CallMemory& memory) const;
    void read_dispatch_tensors(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                               bool with_scales, HtDispatchArgs& args, bool needs_all_rows, CallMemory& memory);
    void read_dispatch_weights(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                               HtDispatchArgs& args, CallMemory& memory);
    void expect_rows(const Tensor& tensor, bool needs_all_rows);
    void expect_elastic() const;

    ElasticSizes elastic_sizes() const;
    // How many rows a tensor needs at least that holds all received rows, as far as the host knows.
    void expect_elastic_rows(const Tensor& tensor);

    uint32_t alignment_ = 1;
    bool is_topk_open_ = false;  // created with num_topk -1: each Update brings its own, up to topk_
    uint32_t routed_topk_ = 0;   // of the current routing
    uint32_t sms_ = 0;           // that they take; 0: as many as the group's settings say
    RowBlocks published_{};      // by dispatches
    bool may_relocate_ = false;  // the caller owns the memory: another handle may have written a routing there
    std::shared_ptr<uint64_t> host_total_;             // host-visible: (number of the update, total)
    std::shared_ptr<const uint64_t> total_word_;       // the word of the handle that made the current routing
    uint32_t update_number_ = 0;                       // of the current routing
    uint32_t routed_cleans_ = 0;                       // of the group's masks, before the current routing
    bool has_columns_ = false;                         // an elastic dispatch has gone along it
    static constexpr uint32_t kAnyClean = UINT32_MAX;  // a graph determines which routing it is
    enum class Writer { kSharer, kOtherLayout, kOtherGroup };
    std::atomic<Writer> overwritten_by_{Writer::kSharer};

    bool was_captured_ = false;           // the latest Update is part of a graph
    std::optional<uint32_t> num_tokens_;  // of the current routing
    std::optional<uint32_t> total_;
};

}  // namespace crossdock
