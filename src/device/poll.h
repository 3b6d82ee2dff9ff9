// SPDX-License-Identifier: Apache-2.0
// The loop that polls words which other ranks write. Kernels wait by kernels/wait.h and kernels/ht/waits.h, which have
// no other loops but wait_as_warp's.
#pragma once

#include "device/context.h"

namespace crossdock {
namespace {

// Polls load() until ready(value). One lane. Calls may_go_on(value) after some failed polls, and returns false if that
// does.
template <typename Load, typename Ready, typename MayGoOn>
CROSSDOCK_DEVICE bool poll_until(const Ctx&, Load load, Ready ready, MayGoOn may_go_on) {
    CROSSDOCK_ROLLED
    for (;;) {
        uint64_t seen = 0;
        CROSSDOCK_ROLLED
        for (int poll = 0; poll < Ctx::kPollsPerClockRead; ++poll) {
            seen = load();
            if (ready(seen)) return true;
        }
        if (!may_go_on(seen)) return false;
    }
}

}  // namespace
}  // namespace crossdock
