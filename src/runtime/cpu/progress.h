// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace crossdock::cpu {

// What a thread drives forward while its kernels run or it waits: a network.
class Progress {
  public:
    virtual ~Progress() = default;
    virtual bool progress() = 0;  // true if something happened
};

}  // namespace crossdock::cpu
