// SPDX-License-Identifier: Apache-2.0
//
// What routing on the host says: where torch would take a dozen small operations, one loop does.
#pragma once

#include <nanobind/nanobind.h>

namespace crossdock::python {

void bind_routing(nanobind::module_& module);

}  // namespace crossdock::python
