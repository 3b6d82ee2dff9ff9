// SPDX-License-Identifier: Apache-2.0
//
// Crossdock's C++ layer, part 4: groups and handles with an owner, over the C API only. C++11, header only.
#ifndef CROSSDOCK_GROUP_HPP_
#define CROSSDOCK_GROUP_HPP_

#include <utility>

#include "crossdock/error.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {
inline namespace cxx {

// The configuration of a low-latency group: E experts, at most max_tokens tokens per rank and step, rows of at most
// row_bytes bytes (scales included). The other fields are at their defaults and the caller's to change.
inline ncclEpGroupConfig_t low_latency_config(unsigned num_experts, unsigned max_tokens, unsigned row_bytes) {
    ncclEpGroupConfig_t config = make_struct<ncclEpGroupConfig_t>();
    config.version = NCCL_EP_API_VERSION;
    config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    config.num_experts = num_experts;
    config.max_dispatch_tokens_per_rank = max_tokens;
    config.max_token_bytes = row_bytes;
    return config;
}

// The configuration of a high-throughput group with a fixed budget: a rank receives at most max_received rows (flat) or
// padded slots (expert-major) a step, which is at least max_tokens; row_bytes is a multiple of 16.
inline ncclEpGroupConfig_t high_throughput_config(unsigned num_experts, unsigned max_tokens, unsigned max_received,
                                                  unsigned row_bytes) {
    ncclEpGroupConfig_t config = low_latency_config(num_experts, max_tokens, row_bytes);
    config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    config.max_recv_tokens_per_rank = max_received;
    return config;
}

// Owns a group; move-only. Made and destroyed collectively, after the handles and before the communicator.
class Group {
  public:
    Group(ncclComm_t comm, const ncclEpGroupConfig_t& config) : group_(nullptr) {
        check(ncclEpCreateGroup(&group_, comm, &config));
    }
    Group(ncclComm_t comm, const ncclEpGroupConfig_t& config, const crossdockGroupOptions_t& options)
        : group_(nullptr) {
        check(crossdockCreateGroup(&group_, comm, &config, &options));
    }
    Group(Group&& other) noexcept : group_(other.group_) { other.group_ = nullptr; }
    Group& operator=(Group&& other) noexcept {
        std::swap(group_, other.group_);
        return *this;
    }
    ~Group() { ncclEpGroupDestroy(group_); }

    ncclEpGroup_t get() const { return group_; }

  private:
    ncclEpGroup_t group_;
};

// Owns a handle; move-only. Calls follow the contracts in nccl_ep.h; a failed one throws Error.
class Handle {
  public:
    Handle(const Group& group, ncclEpLayout_t layout, int num_topk) : handle_(nullptr) {
        check(ncclEpInitHandle(&handle_, group.get(), layout, nullptr, num_topk, nullptr));
    }
    Handle(Handle&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
    Handle& operator=(Handle&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~Handle() { ncclEpHandleDestroy(handle_); }

    ncclEpHandle_t get() const { return handle_; }

    // Binds the routing [B, K] of the next operations; low latency borrows its memory until the combine is done.
    void update(Tensor& topk_idx, cudaStream_t stream = nullptr) {
        check(ncclEpUpdateHandle(handle_, topk_idx.get(), nullptr, stream));
    }

    // The same in high throughput, where it is collective; layout_info receives what is asked for.
    void update(Tensor& topk_idx, const ncclEpLayoutInfo_t& layout_info, cudaStream_t stream = nullptr) {
        check(ncclEpUpdateHandle(handle_, topk_idx.get(), &layout_info, stream));
    }

    // Low latency, expert-major: tokens [B, H] -> received [L, R*M, H], of which counters [L] says how many are valid.
    void dispatch(Tensor& tokens, Tensor& received, Tensor& expert_counters, cudaStream_t stream = nullptr) {
        ncclEpDispatchInputs_t inputs = make_struct<ncclEpDispatchInputs_t>();
        ncclEpDispatchOutputs_t outputs = make_struct<ncclEpDispatchOutputs_t>();
        ncclEpLayoutInfo_t layout_info = make_struct<ncclEpLayoutInfo_t>();
        inputs.tokens = tokens.get();
        outputs.tokens = received.get();
        layout_info.expert_counters = expert_counters.get();
        dispatch(inputs, outputs, &layout_info, nullptr, stream);
    }

    // Low latency, expert-major: rows [L, R*M, H] -> tokens [B, H], summed with the weights [B, K].
    void combine(Tensor& rows, Tensor& topk_weights, Tensor& tokens, cudaStream_t stream = nullptr) {
        ncclEpCombineInputs_t inputs = make_struct<ncclEpCombineInputs_t>();
        ncclEpCombineOutputs_t outputs = make_struct<ncclEpCombineOutputs_t>();
        inputs.tokens = rows.get();
        outputs.tokens = tokens.get();
        outputs.topk_weights = topk_weights.get();
        combine(inputs, outputs, nullptr, stream);
    }

    // Every other mode, as in C.
    void dispatch(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                  const ncclEpLayoutInfo_t* layout_info, const ncclEpDispatchConfig_t* config, cudaStream_t stream) {
        check(ncclEpDispatch(handle_, &inputs, &outputs, layout_info, config, stream));
    }
    void combine(const ncclEpCombineInputs_t& inputs, const ncclEpCombineOutputs_t& outputs,
                 const ncclEpCombineConfig_t* config, cudaStream_t stream) {
        check(ncclEpCombine(handle_, &inputs, &outputs, config, stream));
    }

    void elastic_dispatch(const crossdockElasticDispatch_t& call, cudaStream_t stream = nullptr) {
        check(crossdockElasticDispatch(handle_, &call, stream));
    }
    void elastic_combine(const crossdockElasticCombine_t& call, cudaStream_t stream = nullptr) {
        check(crossdockElasticCombine(handle_, &call, stream));
    }

    // The receive half of a send_only operation.
    void complete(cudaStream_t stream = nullptr) { check(ncclEpComplete(handle_, nullptr, stream)); }

    void set_sums(crossdockSums_t sums) { check(crossdockHandleSetSums(handle_, sums)); }
    void set_tag(unsigned int tag) { check(crossdockHandleSetTag(handle_, tag)); }
    void set_alignment(unsigned int alignment) { check(crossdockHandleSetAlignment(handle_, alignment)); }
    void set_sms(unsigned int num_sms) { check(crossdockHandleSetSms(handle_, num_sms)); }

    // Counters between the operations and the experts' kernel; see overlap.hpp.
    size_t overlap_words(unsigned int block_rows) const {
        size_t words = 0;
        check(crossdockOverlapWords(handle_, block_rows, &words));
        return words;
    }
    void set_overlap(const crossdockOverlap_t& overlap) { check(crossdockHandleSetOverlap(handle_, &overlap)); }
    void end_overlap() { check(crossdockHandleSetOverlap(handle_, nullptr)); }
    void rebind(Tensor& topk_idx) { check(crossdockHandleRebind(handle_, topk_idx.get())); }

  private:
    ncclEpHandle_t handle_;
};

}  // namespace cxx
}  // namespace crossdock

#endif  // CROSSDOCK_GROUP_HPP_
