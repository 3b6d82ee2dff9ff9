// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace crossdock::cpu {

// Called by a thread while its kernels or host calls wait: progresses a network.
class Progress {
  public:
    virtual ~Progress() = default;
    virtual bool progress() = 0;  // true if something happened
};

}  // namespace crossdock::cpu
