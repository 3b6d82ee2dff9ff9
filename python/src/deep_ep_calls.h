// SPDX-License-Identifier: Apache-2.0
//
// The calls of crossdock.deep_ep that inference repeats, each in one: arguments recognised by their forms, new tensors,
// the library's calls, and the tuple that is returned. What is not recognised is left to Python, which checks it.
#pragma once

#include <nanobind/nanobind.h>

#include "forms.h"
#include "pooled_handle.h"
#include "torch_maker.h"

namespace crossdock::python {

// crossdock._core.LowLatencyForm: what follows from the form of a low-latency dispatch's arguments, which are right.
struct LowLatencyForm {
    nanobind::object pool;          // a PooledGroup
    int num_topk;                   // of the handles
    nanobind::object free;          // list of handles that eager calls use
    nanobind::object numbers;       // (M, H, E) of the handle that is returned
    nanobind::object rows, scales;  // PairMakers; scales: None for bf16
    PieceMaker counts;              // of received rows
    TensorForm sums;                // of combines
    bool transposed_scales;         // else dense, in fp32
    bool round_scales;
    int64_t max_tokens, num_experts;
    bool is_cpu;
    Forms combines;  // of the combines that have been found right

    int visit(visitproc visit, void* arg) const;
    void clear();
};

// crossdock._core.LowLatencyLease: a handle that serves one dispatch and the combines that follow it, given back when
// this object goes, unless its receive half was never called: then it goes for good.
struct LowLatencyLease : PooledHandle {
    nanobind::object form;
    nanobind::object topk_idx;  // read until the last combine
    nanobind::object bound;     // what the next combine goes by
    nanobind::object combine_buffer, sources;
    int64_t version = 0;  // of topk_idx when it was dispatched
    bool is_pending = false;

    ~LowLatencyLease() { clear(); }
    // Whether it is the tensor of the dispatch, and torch knows of no change since.
    bool is_as_dispatched(nanobind::handle ids) const;
    int visit(visitproc visit, void* arg) const;
    void clear();
};

void bind_deep_ep_calls(nanobind::module_& module);

}  // namespace crossdock::python
