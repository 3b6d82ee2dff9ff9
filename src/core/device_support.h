// SPDX-License-Identifier: Apache-2.0
// What an operation needs of the GPU. Judged before the call's other arguments: callers probe for support by trying.
#pragma once

namespace crossdock {

// InvalidUsage for a combine recipe (bits of ncclEpCombQuant_t) that a GPU of this compute capability (10 * major +
// minor) cannot compute. A CPU (0) computes all of them.
void expect_supported_combine(unsigned int recipe, int compute_capability);

}  // namespace crossdock
