// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "conformance/support/options.h"

namespace crossdock::testing {

// For a part of a test, as if --lsa-team said so.
class WithDomain {
  public:
    explicit WithDomain(int lsa_team_size) : before_(options().lsa_team_size) {
        options().lsa_team_size = lsa_team_size;
    }
    ~WithDomain() { options().lsa_team_size = before_; }
    WithDomain(const WithDomain&) = delete;
    WithDomain& operator=(const WithDomain&) = delete;

  private:
    std::optional<int> before_;
};

}  // namespace crossdock::testing
