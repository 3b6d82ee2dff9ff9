// SPDX-License-Identifier: Apache-2.0
// Faults that tests plant in a simulation, to show that its checks find them (api/simulation.h).
#pragma once

namespace crossdock::cpu {

enum class Fault {
    kNone,
    kSkipStoreWait,  // flags are raised before the data's asynchronous copy has completed
    kReuseSlot,      // senders do not wait for the receiver's credit
    // A rank chosen by the seed overwrites random words of its peers' symmetric memory with random values, at random
    // steps. Calls may fail, and rows may be wrong, but calls end, and write nothing outside their outputs. The
    // protocol's invariants are not checked.
    kWriteGarbage
};

}  // namespace crossdock::cpu
