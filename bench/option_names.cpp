// SPDX-License-Identifier: Apache-2.0
// What options are called in reports.
#include "bench/options.h"

namespace crossdock::bench {

const char* operation_name(Operation operation) {
    switch (operation) {
        case Operation::kUpdate:
            return "update";
        case Operation::kDispatch:
            return "dispatch";
        case Operation::kCombine:
            return "combine";
        case Operation::kPair:
            return "pair";
    }
    return "";
}

const char* mode_name(Mode mode) { return mode == Mode::kLowLatency ? "ll" : "ht"; }

}  // namespace crossdock::bench
