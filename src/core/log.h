// SPDX-License-Identifier: Apache-2.0
// The thread's last error, and diagnostic lines on stderr. Nothing is printed on success.
#pragma once

#include <string>

#include "nccl.h"

namespace crossdock {

// Remembers the message as the thread's last error and returns code. Prints the message where NCCL_DEBUG makes NCCL
// print warnings, in NCCL's form, or else when NCCL_EP_DEBUG is on.
ncclResult_t report_failure(ncclResult_t code, const char* message) noexcept;
const char* last_error() noexcept;

// One line on stderr: always for warnings, for debug lines only when NCCL_EP_DEBUG is on.
void warn(const std::string& line) noexcept;
void debug(const std::string& line) noexcept;
bool debug_enabled() noexcept;

}  // namespace crossdock
