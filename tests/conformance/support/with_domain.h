// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "conformance/support/options.h"

namespace crossdock::testing {

// For a part of a test, as if --lsa-team said so.
class WithDomain {
  public:
    explicit WithDomain(int domain_ranks) : before_(options().domain_ranks) { options().domain_ranks = domain_ranks; }
    ~WithDomain() { options().domain_ranks = before_; }
    WithDomain(const WithDomain&) = delete;
    WithDomain& operator=(const WithDomain&) = delete;

  private:
    std::optional<int> before_;
};

}  // namespace crossdock::testing
