// SPDX-License-Identifier: Apache-2.0
//
// crossdock._core.RowRoute: where the tokens of one dispatch of high throughput went, for the calls of
// crossdock.deep_ep that go the same way again.
#pragma once

#include <nanobind/nanobind.h>

namespace crossdock::python {

void bind_row_routes(nanobind::module_& module);

}  // namespace crossdock::python
