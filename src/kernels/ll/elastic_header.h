// SPDX-License-Identifier: Apache-2.0
// Elastic dispatch, receive half: a row's header.
#pragma once

#include "kernels/ll/elastic_dispatch.h"
#include "kernels/ll/received_header.h"

namespace crossdock {
namespace {

// The output row of a choice of an expert here; -1 beyond the outputs.
CROSSDOCK_DEVICE int32_t elastic_row_of(const auto& op, const Announced& announced, uint32_t source, uint32_t expert,
                                        uint32_t number) {
    const uint64_t row = uint64_t{announced.zones[expert]} +
                         announced.first_rows[source * op.c.offsets.experts_per_rank + expert] + number;
    return row < op.args.elastic.rows ? static_cast<int32_t>(row) : -1;
}
// As HeaderReader::read.
template <typename Op, typename ReadMore>
CROSSDOCK_DEVICE bool read_elastic_header(const Op& op, const HeaderReader<Op>& headers, const Announced& announced,
                                          const ArrivingRow& row, Header header, bool writes,
                                          const Placement& placement, ReadMore read_more) {
    const ElasticDispatchArgs& call = op.args.elastic;
    RowRecord* record = row_record(op.c, row.source, row.i);
    const uint32_t number = headers.number_of(announced, row);
    const bool has_outputs = writes && !op.c.expert_major && number < call.rows;
    int32_t* source = writes && call.sources != nullptr && number < call.source_rows
                          ? call.sources + uint64_t{number} * (op.c.topk + 2)
                          : nullptr;
    uint32_t num = 0;  // output rows so far
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; has_choices_from(op.c, base); base += kLanes) {
        const uint32_t k = base + op.lane();
        const bool is_choice = k < op.c.topk;
        if (base > 0 && !read_more(base, header)) return false;
        const RowOrigin origin = RowOrigin::of(header.origin.payload);
        const ElasticChoice choice = ElasticChoice::of(header.choice.payload);
        const uint32_t expert = choice.expert - op.c.rank * op.c.offsets.experts_per_rank;  // among those here
        const bool is_here = is_choice && expert < op.c.offsets.experts_per_rank;
        if (!op.ctx.warp_all(headers.expect_origin(row.source, origin, 0))) return false;
        if (base == 0 && is_leader(op.ctx)) {
            *placement.direct = 0;
            if (writes) headers.record_origin(row, number, origin, headers.cell_of_row(origin, header), record);
            if (source != nullptr) {
                source[0] = static_cast<int32_t>(row.source * call.origin_stride + origin.token_idx);
                source[1] = static_cast<int32_t>(number);
            }
        }
        int32_t row_idx = -1;
        if (is_here) row_idx = op.c.expert_major ? elastic_row_of(op, announced, row.source, expert, choice.number) : 0;
        const bool has_row = row_idx >= 0 && !choice.repeats;
        if (is_choice && writes)
            reinterpret_cast<int32_t*>(record + 1)[k] = row_idx >= 0 && !has_row ? -2 - row_idx : row_idx;
        if (is_choice && source != nullptr) source[2 + k] = op.c.expert_major ? row_idx : -1;
        if (is_choice && has_outputs) {
            const uint64_t at = uint64_t{number} * op.c.topk + k;
            if (call.out_topk_idx != nullptr) store_id(call, at, is_here ? static_cast<int32_t>(expert) : -1);
            const bool is_wanted = is_here || !call.own_weights_only;
            if (call.out_weights != nullptr) call.out_weights[at] = is_wanted ? float_of(choice.weight) : 0.0f;
        }
        if (!op.c.expert_major) continue;
        if (has_row && writes && call.out_weights != nullptr) call.out_weights[row_idx] = float_of(choice.weight);
        const uint32_t at = num + op.ctx.warp_count_before(has_row);
        if (has_row) placement.rows[at] = static_cast<uint32_t>(row_idx);
        num += op.ctx.warp_count(has_row);
    }
    if (!op.c.expert_major) {
        headers.place_by_rank(announced, row, placement);
    } else if (is_leader(op.ctx)) {
        *placement.num = num;
    }
    op.ctx.warp_sync();
    return true;
}

// As HeaderReader::read, of either kind of dispatch.
template <typename Op, typename ReadMore>
CROSSDOCK_DEVICE bool read_header(const Op& op, const HeaderReader<Op>& headers, const Announced& announced,
                                  const ArrivingRow& row, const Header& header, bool writes, const Placement& placement,
                                  ReadMore read_more) {
    if (is_elastic(op.args))
        return read_elastic_header(op, headers, announced, row, header, writes, placement, read_more);
    return headers.read(announced, row, header, writes, placement, read_more);
}

}  // namespace
}  // namespace crossdock
