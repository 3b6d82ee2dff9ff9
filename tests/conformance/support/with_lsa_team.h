// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "conformance/support/options.h"

namespace crossdock::testing {

// For a part of a test, as if --lsa-team said so.
class WithLsaTeam {
  public:
    explicit WithLsaTeam(int lsa_team_size) : before_(options().lsa_team_size) {
        options().lsa_team_size = lsa_team_size;
    }
    ~WithLsaTeam() { options().lsa_team_size = before_; }
    WithLsaTeam(const WithLsaTeam&) = delete;
    WithLsaTeam& operator=(const WithLsaTeam&) = delete;

  private:
    std::optional<int> before_;
};

}  // namespace crossdock::testing
