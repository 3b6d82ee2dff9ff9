// SPDX-License-Identifier: Apache-2.0
//
// Ctrl-C while the library waits for other ranks: Python's signal handlers run then, and what they raise ends the wait.
#pragma once

#include <nanobind/nanobind.h>

namespace crossdock::python {

// The exception of a handler that has ended a wait of this thread and was not raised yet, or an invalid object. With
// the GIL.
nanobind::object take_interruption();

// InvalidUsage in a signal handler that runs while the library waits, which holds locks then.
void expect_no_handler();

// RemoteError while all waits of this process are to end: a rank that never has to wait would go on otherwise.
void expect_waits_go_on();

void bind_interrupts(nanobind::module_& module);

}  // namespace crossdock::python
