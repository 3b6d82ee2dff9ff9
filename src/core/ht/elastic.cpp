// SPDX-License-Identifier: Apache-2.0
// Elastic operations (crossdock.h) in high-throughput mode: checks the calls against the contract and fills in the
// kernels' arguments.
#include "core/elastic.h"

#include <algorithm>

#include "core/error.h"
#include "core/ht/handle.h"
#include "core/ht/plan.h"
#include "core/overlap.h"
#include "kernels/ht/launch.h"

namespace crossdock {

ElasticSizes HtHandle::elastic_sizes() const {
    const GroupConfig& config = group_->config();
    return {*num_tokens_,           routed_topk_,     config.num_ranks, config.experts_per_rank(),
            config.max_token_bytes, is_expert_major()};
}

// Behind the last zone's last row may be padding, which nobody needs.
void HtHandle::expect_elastic_rows(const Tensor& tensor) {
    learn_total(false);
    if (!total_) return;
    const uint32_t padding = is_expert_major() ? std::min(*total_, alignment_ - 1) : 0;
    const uint32_t received = std::min(*total_ - padding, budget());
    require(tensor.sizes[0] >= received, ncclInvalidArgument, "{} has {} rows, expected at least the {} received ones",
            tensor.name, tensor.sizes[0], received);
}

void HtHandle::expect_elastic() const {
    group_->expect_working();
    require(!group_->config().masking, ncclInvalidUsage,
            "the group has masks (ht_masks), allowed for elastic operations: groups without");
    expect_no_overlap(published_.memory != nullptr);
}

void HtHandle::elastic_dispatch(const crossdockElasticDispatch_t& call, cudaStream_t stream) {
    expect_elastic();
    DeviceScope device(group_->runtime());
    expect_routing(stream, call.tokens, "call->tokens");
    CallMemory memory;
    HtElasticDispatchArgs args{};
    const ElasticDispatch read = read_elastic_dispatch(group_->communicator(), call, elastic_sizes(), memory);
    require(!is_expert_major() || call.alignment == 0 || call.alignment == alignment_, ncclInvalidArgument,
            "call->alignment is {}, allowed in expert-major layout: the handle's "
            "dispatch_output_per_expert_alignment ({}), or 0",
            call.alignment, alignment_);
    expect_elastic_rows(read.out_tokens);

    args.elastic = read.args;
    args.common = common(OperationKind::kElasticDispatch, blocks().dispatch);
    args.tokens = read.tokens.data;
    args.row_bytes = static_cast<uint32_t>(read.out_tokens.row_bytes());
    args.out_tokens = read.out_tokens.data;
    args.token_rows = read.args.rows;
    const uint64_t words = uint64_t{routed_topk_} * (read.args.with_weights ? 2 : 1) + read.args.num_scales;
    args.scale_bytes = static_cast<uint32_t>(align_up(4 * words, kRowGranule));
    args.common.terms = args.common.terms.with_folded(Term::kRowUnits, args.row_bytes / kRowUnitBytes)
                            .with(Term::kDtype, read.tokens.dtype)
                            .with_folded(Term::kScaleUnits, read.args.num_scales)
                            .with(Term::kDirection, read.args.with_weights ? 1 : 0);
    add_agreed(args.common);
    const LaunchShape shape = plan_ht_dispatch(*group_, args);
    before_operation(stream);
    launch<HtElasticDispatch>(group_->runtime(), args, shape, stream);
    has_columns_ = true;
    tell_sharers();
    group_->after_operation(stream);
}

void HtHandle::elastic_combine(const crossdockElasticCombine_t& call, cudaStream_t stream) {
    expect_elastic();
    group_->config().expect_rows_to_sum(is_expert_major());
    DeviceScope device(group_->runtime());
    expect_routing(stream, call.out_tokens, "call->out_tokens");
    require(has_columns_, ncclInvalidUsage,
            "no elastic dispatch has gone along the handle's routing: call crossdockElasticDispatch first");
    CallMemory memory;
    HtElasticCombineArgs args{};
    const ElasticCombine read = read_elastic_combine(group_->communicator(), call, elastic_sizes(), memory);
    expect_elastic_rows(read.tokens);

    args.elastic = read.args;
    args.common = common(OperationKind::kElasticCombine, blocks().combine);
    args.dtype = kernel_dtype(read.tokens.dtype);
    args.wire = group_->config().invariant ? HtWire::kChoices : HtWire::kRows;
    args.tokens = read.tokens.data;
    args.token_rows = read.args.rows;
    args.row_bytes = static_cast<uint32_t>(read.tokens.row_bytes());
    args.out_tokens = read.out_tokens.data;
    if (read.args.with_weights)
        args.weight_bytes = static_cast<uint32_t>(align_up(4 * uint64_t{routed_topk_}, kRowGranule));
    args.common.terms = args.common.terms.with_folded(Term::kRowUnits, args.row_bytes / kRowUnitBytes)
                            .with(Term::kDtype, read.tokens.dtype)
                            .with(Term::kDirection, read.args.with_weights ? 1 : 0);
    add_agreed(args.common);
    const LaunchShape shape = plan_ht_combine(*group_, args);
    before_operation(stream);
    launch<HtElasticCombine>(group_->runtime(), args, shape, stream);
    group_->after_operation(stream);
}

}  // namespace crossdock
