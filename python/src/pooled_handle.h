// SPDX-License-Identifier: Apache-2.0
//
// What the leases of crossdock.deep_ep have in common: a handle of a PooledGroup that serves one dispatch and what
// follows it.
#pragma once

#include <nanobind/nanobind.h>

namespace crossdock::python {

struct PooledHandle {
    nanobind::object taken;  // the Handle
    nanobind::object free;   // the list that it goes back to

    // From unused, the pool's list for eager calls with so many choices, if it has one.
    void take(nanobind::handle pool, const nanobind::object& unused, int num_topk, bool is_captured);
    // Unless it is closed.
    void give_back();
};

}  // namespace crossdock::python
