// SPDX-License-Identifier: Apache-2.0
// The numbers of peers that kernels check before they use them, for PeerFault::number.
#pragma once

#include "device/wait_records.h"

namespace crossdock {

enum class PeerNumber : uint32_t {
    kNone,
    kRows,            // LL
    kChoices,         // LL
    kToken,           // LL
    kTarget,          // LL
    kExpert,          // HT
    kTokens,          // HT
    kBase,            // HT
    kMask,            // HT
    kExpertsOfToken,  // HT
    kWindowOffset,    // HT; of kDisagrees: folded_window_offset (kernels/agreement.h)
    kWindows,         // of kDisagrees: hashes of where both ranks' tensors lie in their windows
    kEndInWindow,     // HT
    kCell             // LL
};

}  // namespace crossdock
