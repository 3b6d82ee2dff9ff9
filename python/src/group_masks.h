// SPDX-License-Identifier: Apache-2.0
//
// The part of crossdock.Group that is about ranks that do not answer: masks, asynchronous errors, the diagnosis.
#pragma once

#include "group.h"

namespace crossdock::python {

void bind_masks(nanobind::class_<Group>& group);
void bind_diagnosis(nanobind::module_& module);

}  // namespace crossdock::python
