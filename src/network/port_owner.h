// SPDX-License-Identifier: Apache-2.0
// Which process listens on a TCP port of this host, as far as /proc tells this user.
#pragma once

#include <cstdint>
#include <string>

namespace crossdock::network {

// "process 12 (python3) listens there" or, of another user's, "a process of user 1001 listens there"; empty: unknown.
std::string who_listens(uint16_t port);

}  // namespace crossdock::network
