// SPDX-License-Identifier: Apache-2.0
// What an authenticated peer may send over a link: records of frames and close notices, valid, cut off, replayed or too
// large, or any bytes. A violation of what LinkStream promises aborts.
#pragma once

#include "fuzz/input.h"

namespace crossdock::fuzz {

void receive_records(Input input);

}  // namespace crossdock::fuzz
