// SPDX-License-Identifier: Apache-2.0
// Elastic operations (crossdock.h) in low-latency mode: fills in the kernels' arguments and launches.
#include "core/elastic.h"

#include "core/error.h"
#include "core/ll/handle.h"
#include "core/ll/plan.h"
#include "core/overlap.h"
#include "kernels/ll/elastic_dispatch.h"

namespace crossdock {
namespace {

constexpr uint32_t kMostRanks = 64;  // a token's ranks are one bit mask

void expect_elastic_group(const Group& group) {
    const GroupConfig& config = group.config();
    const auto expect = [](bool fits, const char* what, uint64_t value, const char* allowed) {
        require(fits, ncclInvalidUsage, "{} is {}, allowed for elastic operations in LL mode: {}", what, value,
                allowed);
    };
    expect(!config.masking, "the group's enable_mask", config.masking ? 1 : 0, "0");
    expect(!config.has_several_teams(), "the LSA team's number of ranks", config.lsa_team_size, "all ranks");
    expect(config.num_ranks <= kMostRanks, "the number of ranks", config.num_ranks, "at most 64");
    expect(config.num_experts <= ElasticChoice::kMostExperts, "num_experts", config.num_experts, "at most 32767");
    expect(config.max_tokens <= ElasticChoice::kMostTokens, "max_dispatch_tokens_per_rank", config.max_tokens,
           "at most 65535");
    expect(config.zero_copy != NCCL_EP_ZERO_COPY_ON, "the group's zero_copy", NCCL_EP_ZERO_COPY_ON, "off or auto");
}

void compare_tag(LlCommon& common, uint32_t tag) { common.scope.terms = Terms{common.scope.terms}.with_tag(tag).word; }

}  // namespace

ElasticSizes LlHandle::elastic_sizes() const {
    const GroupConfig& config = group_->config();
    return {routing_.num_tokens,
            topk_,
            config.num_ranks,
            config.experts_per_rank(),
            config.max_token_bytes,
            is_expert_major(),
            routing_.ids_are_64_bit ? ncclInt64 : ncclInt32};
}

void LlHandle::expect_elastic() const {
    group_->expect_working();
    expect_elastic_group(*group_);
    expect_no_overlap(overlap_.memory != nullptr || overlap_.done != nullptr);
}

void LlHandle::elastic_dispatch(const crossdockElasticDispatch_t& call, cudaStream_t stream) {
    expect_elastic();
    expect_routing();
    expect_none_pending();
    CallMemory memory;
    memory.reads(topk_idx());
    const ElasticDispatch read = read_elastic_dispatch(group_->communicator(), call, elastic_sizes(), memory);

    LlDispatchArgs args{};
    args.common = common(OperationKind::kElasticDispatch, false);
    args.is_elastic = true;
    args.elastic = read.args;
    args.wire = LlDispatchWire::kBytes;
    args.tokens = read.tokens.data;
    args.topk_weights = read.args.topk_weights;
    args.out_tokens = read.out_tokens.data;
    args.row_bytes = args.source_row_bytes = static_cast<uint32_t>(read.out_tokens.row_bytes());
    args.scale_bytes = read.args.num_scales * static_cast<uint32_t>(sizeof(uint32_t));
    args.common.set(Term::kDtype, read.out_tokens.dtype);
    args.common.set(Term::kDirection, read.args.with_weights ? 1 : 0);
    args.common.set_folded(Term::kRowUnits, args.row_bytes / kRowUnitBytes);
    args.common.set_folded(Term::kScaleUnits, read.args.num_scales);
    compare_tag(args.common, tag_);
    const LaunchShape shape = plan_ll_dispatch(*group_, args, num_sms_);
    issue<LlDispatch>(args, shape, stream);
    if (call.topk_idx_copy != nullptr) routing_.topk_idx = static_cast<std::byte*>(read.args.topk_idx_copy);
    elastic_ = Elastic{routing_, read.args.rows};
    dispatched_.reset();
    is_rebound_ = false;
}

void LlHandle::elastic_combine(const crossdockElasticCombine_t& call, cudaStream_t stream) {
    expect_elastic();
    expect_routing();
    expect_none_pending();
    group_->config().expect_rows_to_sum(is_expert_major());
    require(elastic_.has_value(), ncclInvalidUsage,
            "the handle has no elastic dispatch: call crossdockElasticDispatch first");
    require(elastic_->routing == routing_, ncclInvalidUsage,
            "ncclEpUpdateHandle has bound other routing ({} tokens) since the last dispatch ({} tokens), whose rows a "
            "combine returns: call crossdockElasticDispatch first",
            routing_.num_tokens, elastic_->routing.num_tokens);
    CallMemory memory;
    memory.reads(topk_idx());
    const ElasticCombine read = read_elastic_combine(group_->communicator(), call, elastic_sizes(), memory);
    require(read.args.rows == elastic_->rows, ncclInvalidArgument,
            "call->tokens: dimension 0 is {}, expected {}: the rows of the dispatch's out_tokens", read.args.rows,
            elastic_->rows);

    LlCombineArgs args{};
    args.common = common(OperationKind::kElasticCombine, false);
    args.is_elastic = true;
    args.elastic = read.args;
    args.dtype = kernel_dtype(read.tokens.dtype);
    const bool sums_at_sender = is_expert_major() && !group_->config().invariant;
    args.wire = sums_at_sender ? LlCombineWire::kSums : LlCombineWire::kRows;
    args.tokens = read.tokens.data;
    args.out_tokens = read.out_tokens.data;
    args.row_bytes = args.wire_bytes = static_cast<uint32_t>(read.tokens.row_bytes());
    args.common.set(Term::kDtype, read.tokens.dtype);
    args.common.set(Term::kDirection, read.args.with_weights ? 1 : 0);
    args.common.set_folded(Term::kRowUnits, args.row_bytes / kRowUnitBytes);
    args.common.set(Term::kSums, sums_at_sender ? CROSSDOCK_SUMS_SENDER : CROSSDOCK_SUMS_EXACT);
    compare_tag(args.common, tag_);
    const LaunchShape shape = plan_ll_combine(*group_, args, num_sms_);
    group_->note_combine_warps(shape.warps_per_block);
    issue<LlCombine>(args, shape, stream);
}

}  // namespace crossdock
