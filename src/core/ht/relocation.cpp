// SPDX-License-Identifier: Apache-2.0
// Routing that several HT handles share because they use the same memory of the caller.
#include <algorithm>
#include <mutex>
#include <vector>

#include "core/error.h"
#include "core/ht/handle.h"
#include "core/ht/kept_routing.h"
#include "core/process.h"
#include "core/structs.h"

namespace crossdock {
namespace {

// The live handles of all groups that use memory of the caller.
struct Sharers {
    ForkSafeMutex mutex;
    std::vector<HtHandle*> handles;
};

Sharers& sharers() {
    static auto& instance = *new Sharers;
    return instance;
}
const MadeAtLoad sharers_made_at_load(sharers);

}  // namespace

HtRoutingMaker HtHandle::maker() const { return {group_->number(), enum_bits(layout_), topk_}; }

bool HtHandle::overlaps(const HtHandle& other) const {
    if (memory_ == nullptr || other.memory_ == nullptr) return false;
    return memory_ < other.memory_ + HtTables::bytes(other.geometry()) &&
           other.memory_ < memory_ + HtTables::bytes(geometry());
}

bool HtHandle::can_share_with(const HtHandle& other) const {
    return memory_ == other.memory_ && maker() == other.maker() && alignment_ == other.alignment_;
}

void HtHandle::join_sharers() {
    const std::lock_guard lock(sharers().mutex);
    for (const HtHandle* other : sharers().handles) {
        if (can_share_with(*other) && other->has_routing_ && other->overwritten_by_ == Writer::kSharer) adopt(*other);
    }
    sharers().handles.push_back(this);
}

void HtHandle::leave_sharers() noexcept {
    if (!may_relocate_) return;
    const std::lock_guard lock(sharers().mutex);
    auto& handles = sharers().handles;
    handles.erase(std::remove(handles.begin(), handles.end(), this), handles.end());
}

void HtHandle::tell_sharers() {
    overwritten_by_ = Writer::kSharer;
    if (!may_relocate_) return;
    const std::lock_guard lock(sharers().mutex);
    for (HtHandle* other : sharers().handles) {
        if (other == this || !overlaps(*other)) continue;
        if (other->can_share_with(*this)) {
            other->adopt(*this);  // of the same group, whose calls do not run concurrently
        } else {
            other->overwritten_by_ = other->group_ == group_ ? Writer::kOtherLayout : Writer::kOtherGroup;
        }
    }
}

// Takes over what the other handle knows of the routing in the memory.
void HtHandle::adopt(const HtHandle& other) {
    routed_topk_ = other.routed_topk_;
    num_tokens_ = other.num_tokens_;
    total_ = other.total_;
    total_word_ = other.total_word_;
    update_number_ = other.update_number_;
    routed_cleans_ = other.routed_cleans_;
    was_captured_ = other.was_captured_;
    has_columns_ = other.has_columns_;
    has_routing_ = true;
    overwritten_by_ = Writer::kSharer;
}

void HtHandle::expect_not_overwritten() const {
    const Writer writer = overwritten_by_;
    require(writer == Writer::kSharer, ncclInvalidUsage,
            "the routing in handle_mem ({}) was overwritten by an update of a handle of another {}: call "
            "ncclEpUpdateHandle first",
            static_cast<const void*>(memory_),
            writer == Writer::kOtherGroup ? "group" : "layout, top-k or alignment, or at another address");
}

// At capture it is unknown what the memory will hold when the graph runs: kernels read everything else from it, and use
// the smaller of both numbers of tokens.
void HtHandle::take_routing_as_it_is(const Tensor& rows) {
    require(rows.sizes[0] <= group_->config().max_tokens, ncclInvalidArgument,
            "{} has {} rows, allowed: at most max_dispatch_tokens_per_rank ({})", rows.name, rows.sizes[0],
            group_->config().max_tokens);
    num_tokens_ = static_cast<uint32_t>(rows.sizes[0]);
    routed_topk_ = topk_;
    routed_cleans_ = kAnyClean;
    was_captured_ = true;
    has_columns_ = true;  // perhaps
    total_.reset();
    total_word_.reset();
}

// A routing that a destroyed handle, or a copy of its memory, has left there.
void HtHandle::read_routing(cudaStream_t stream, const std::optional<Tensor>& own_rows) {
    require(may_relocate_, ncclInvalidUsage, "the handle has no routing: call ncclEpUpdateHandle first");
    DeviceScope device(group_->runtime());
    if (group_->runtime().is_capturing(stream)) {
        require(own_rows && !is_topk_open_ && !is_eager(), ncclInvalidUsage,
                "the routing in handle_mem is not known in this capture, since num_topk is -1 or the group is eager: "
                "call ncclEpUpdateHandle, use the handle once, or keep the handle that was updated until this one has "
                "been made");
        return take_routing_as_it_is(*own_rows);
    }
    std::vector<std::byte> copy(HtTables::bytes(geometry()));
    group_->await_operations();
    group_->runtime().copy_to_host(copy.data(), memory_, copy.size(), stream);
    const HtRouting& routing = *reinterpret_cast<const HtRouting*>(copy.data());
    require(routing.magic == kHtRoutingMagic, ncclInvalidUsage,
            "the handle has no routing, and handle_mem holds none: call ncclEpUpdateHandle first");
    require(routing.maker.group == group_->number(), ncclInvalidUsage,
            "the routing in handle_mem was written by a handle of another group: call ncclEpUpdateHandle first");
    require(
        routing.maker == maker() && (is_topk_open_ || routing.topk == topk_) && routing.alignment == alignment_,
        ncclInvalidUsage,
        "the routing in handle_mem was written with layout {}, top-k {} and alignment {}, the handle has layout {}, "
        "top-k {} and alignment {}: call ncclEpUpdateHandle first",
        routing.maker.layout, routing.topk, routing.alignment, enum_bits(layout_), topk_, alignment_);
    const uint32_t max_tokens = group_->config().max_tokens;
    require(routing.topk >= 1 && routing.topk <= topk_ && routing.num_tokens <= max_tokens, ncclInvalidUsage,
            "handle_mem has been overwritten: it says {} tokens with top-k {}, allowed: at most {} with 1..{}",
            routing.num_tokens, routing.topk, max_tokens, topk_);
    expect_sound_tables(copy.data(), geometry(), group_->rank(), is_expert_major());
    routed_topk_ = routing.topk;
    num_tokens_ = routing.num_tokens;
    total_ = routing.total;
    total_word_.reset();
    was_captured_ = false;
    has_columns_ = true;  // perhaps: kernels check them
    routed_cleans_ = routing.cleans;
    has_routing_ = true;
}

}  // namespace crossdock
