// SPDX-License-Identifier: Apache-2.0
// What comes over a link from a peer that has proved who it is: records of frames and goodbyes, right, cut off,
// replayed, too large, or any bytes. A violation of what LinkStream promises aborts.
#pragma once

#include "fuzz/input.h"

namespace crossdock::fuzz {

void receive_records(Input input);

}  // namespace crossdock::fuzz
