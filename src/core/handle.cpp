// SPDX-License-Identifier: Apache-2.0
#include "core/handle.h"

#include <bit>

#include "core/error.h"
#include "core/ht/handle.h"
#include "core/ll/handle.h"
#include "core/structs.h"
#include "core/tensor.h"
#include "kernels/agreement.h"

namespace crossdock {
namespace {

bool is_ht(const Group& group) { return group.config().algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT; }

// Checks what both modes require of a handle's config; returns it.
ncclEpHandleConfig_t read_config(const ncclEpHandleConfig_t* caller) {
    const auto config = optional_struct(caller, NCCL_EP_HANDLE_CONFIG_V1_SIZE, "config");
    const size_t alignment = config.dispatch_output_per_expert_alignment;
    require(alignment == 0 || std::has_single_bit(alignment), ncclInvalidArgument,
            "config->dispatch_output_per_expert_alignment is {}, allowed: 0 and powers of two", alignment);
    return config;
}

}  // namespace

size_t Handle::memory_bytes(const Group& group, ncclEpLayout_t layout, const ncclEpHandleConfig_t* caller,
                            int num_topk) {
    const auto config = read_config(caller);
    return is_ht(group) ? HtHandle::memory_bytes(group, layout, config, num_topk)
                        : LlHandle::memory_bytes(group, layout, num_topk);
}

std::shared_ptr<Handle> Handle::create(const std::shared_ptr<Group>& group, ncclEpLayout_t layout,
                                       const ncclEpHandleConfig_t* caller, int num_topk,
                                       const ncclEpTensor_t* handle_mem) {
    group->expect_working();
    const auto config = read_config(caller);
    DeviceScope device(group->runtime());
    if (is_ht(*group)) return HtHandle::create(group, layout, config, num_topk, handle_mem);
    return LlHandle::create(group, layout, num_topk, handle_mem);
}

Handle::Handle(std::shared_ptr<Group> group, ncclEpLayout_t layout, uint32_t topk)
    : group_(std::move(group)), layout_(layout), topk_(topk) {}

Handle::~Handle() {
    if (number_ != 0) group_->remove_handle(this);
    group_->give_back(std::move(owned_memory_), is_in_graphs_);
}

void Handle::bind_memory(const ncclEpTensor_t* handle_mem, size_t bytes) {
    if (handle_mem == nullptr) {
        owned_memory_ = group_->handle_memory().take(bytes);
        memory_ = owned_memory_.data();
        return;
    }
    const Tensor memory = read_tensor(group_->communicator(), handle_mem, "handle_mem");
    expect_dtype(memory, {ncclUint8});
    require(memory.ndim == 1 && memory.sizes[0] >= bytes, ncclInvalidArgument,
            "handle_mem has {} dimensions and {} bytes, expected 1 dimension and at least {} bytes", memory.ndim,
            memory.num_elements(), bytes);
    require(reinterpret_cast<uintptr_t>(memory.data) % 16 == 0, ncclInvalidArgument,
            "handle_mem is at {}, expected a multiple of 16", static_cast<void*>(memory.data));
    memory_ = memory.data;
}

void Handle::set_tag(unsigned int tag) {
    constexpr unsigned int kMost = (1u << HtAgreed::kTagBits) - 1;
    require(tag <= kMost, ncclInvalidArgument, "tag is {}, allowed: 0..{}", tag, kMost);
    tag_ = tag;
}

void Handle::release_memory() {
    owned_memory_.release();
    memory_ = nullptr;
}

}  // namespace crossdock
