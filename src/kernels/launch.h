// SPDX-License-Identifier: Apache-2.0
// What the launches of both modes share.
#pragma once

#include "runtime/runtime.h"

namespace crossdock {

[[noreturn]] void fail_launch(const char* kernel, const LaunchShape& shape, const char* reason);

}  // namespace crossdock
