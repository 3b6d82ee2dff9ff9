// SPDX-License-Identifier: Apache-2.0
//
// Routing counts: where torch would take a dozen operations, one call does.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace crossdock::python {

// Whether all ids of topk_idx, on the host, are below num_experts, and no expert is chosen more than most_rows times.
// False also for what is no such tensor.
bool has_room_for_routing(nanobind::handle topk_idx, int64_t num_experts, int64_t most_rows);

void bind_routing(nanobind::module_& module);

}  // namespace crossdock::python
