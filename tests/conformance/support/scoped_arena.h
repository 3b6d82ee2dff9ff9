// SPDX-License-Identifier: Apache-2.0
// A window for tests to cut buffers from.
#pragma once

#include "conformance/support/tensors.h"

namespace crossdock::testing {

// Owns a window for the length of a scope.
class ScopedArena {
  public:
    ScopedArena(RankContext& context, size_t bytes) : context_(context), arena_{context.make_window(bytes), 0} {}
    ~ScopedArena() { context_.destroy_window(arena_.window); }
    ScopedArena(const ScopedArena&) = delete;
    ScopedArena& operator=(const ScopedArena&) = delete;
    WindowArena* get() { return &arena_; }

  private:
    RankContext& context_;
    WindowArena arena_;
};

}  // namespace crossdock::testing
