// SPDX-License-Identifier: Apache-2.0
// The thread's last error, and diagnostic lines on stderr. Nothing is printed on success.
#pragma once

#include <string>

#include "nccl.h"

namespace crossdock {

// Sets the thread's last error and returns code. Prints the message, in NCCL's form, if NCCL_DEBUG makes NCCL print
// warnings, or else if NCCL_EP_DEBUG is on.
ncclResult_t report_failure(ncclResult_t code, const char* message) noexcept;
const char* last_error() noexcept;

// Print one line on stderr: warnings always, debug lines only if NCCL_EP_DEBUG is on.
void warn(const std::string& line) noexcept;
void debug(const std::string& line) noexcept;
bool debug_enabled() noexcept;

}  // namespace crossdock
