// SPDX-License-Identifier: Apache-2.0
//
// Routing in numbers, labels of rows, and rows by expert: where torch would take a dozen operations, one call does.
#pragma once

#include <nanobind/nanobind.h>

namespace crossdock::python {

void bind_routing(nanobind::module_& module);

}  // namespace crossdock::python
