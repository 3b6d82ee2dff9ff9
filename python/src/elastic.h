// SPDX-License-Identifier: Apache-2.0
//
// ElasticBuffer's operations (crossdock.deep_ep), in one call each: rows of any type and length as the library carries
// them, memory for the outputs, the description of all arrays, and the library's call. Python has checked the
// arguments.
#pragma once

#include <nanobind/nanobind.h>

#include "forms.h"
#include "pooled_handle.h"
#include "torch_maker.h"

namespace crossdock::python {

// crossdock._core.ElasticPlan: what the dispatches of one kind share.
struct ElasticPlan {
    nanobind::object pool;  // a PooledGroup
    nanobind::object free;  // list of its handles that eager calls use
    bool is_low_latency;
    int64_t num_experts;
    int num_topk;  // of its handles
    unsigned int alignment, origin_stride;
    bool by_expert;
    bool own_weights;                 // received weights of other ranks' experts are 0
    PieceMaker of_ranks, of_experts;  // a number for each rank, and for each expert of a rank
    // Of repetitions and combines that were found right: the tags of those whose rows fit the group; else what Python
    // needs.
    Forms repetitions, combines;

    int visit(visitproc visit, void* arg) const;
    void clear();
};

// crossdock._core.ElasticLease: a handle that serves one dispatch, its repetitions and its combines. It goes back to
// the pool with this object.
struct ElasticLease : PooledHandle {
    nanobind::object plan;
    nanobind::object topk_idx;  // which the library reads
    int64_t num_tokens = 0, num_rows = 0;

    ~ElasticLease() { clear(); }
    int visit(visitproc visit, void* arg) const;
    void clear();
};

void bind_elastic(nanobind::module_& module);

}  // namespace crossdock::python
