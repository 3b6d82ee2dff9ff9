// SPDX-License-Identifier: Apache-2.0
// Says whose stack has overflowed before the process dies of it: a handler of SIGSEGV looks whether the address is in
// the guard of the running fiber's stack (fiber_stack.h). Then, and for all other faults, the handler that was there
// before goes on: the default, a sanitizer's, the program's. A handler that the program sets later replaces it.
#pragma once

#include <cstddef>

namespace crossdock::cpu {

// Writes who is running and what helps, without a zero; returns how many characters, 0: it does not know. Called in
// the handler, so it does not allocate.
using DescribeOverflow = size_t (*)(char* text, size_t bytes, size_t stack_bytes);

// Call it in a thread before its fibers run foreign code. describe: null keeps the earlier one. Does nothing if the
// handler cannot be set.
void report_stack_overflows(DescribeOverflow describe) noexcept;

}  // namespace crossdock::cpu
