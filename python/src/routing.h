// SPDX-License-Identifier: Apache-2.0
//
// Routing counts: where torch would take a dozen operations, one call does.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace crossdock::python {

// InvalidArgument unless all ids of topk_idx, on the host, are below num_experts, and no expert is chosen more than
// max_tokens times.
void expect_room_for_routing(nanobind::handle topk_idx, int64_t num_experts, int64_t max_tokens);

void bind_routing(nanobind::module_& module);

}  // namespace crossdock::python
