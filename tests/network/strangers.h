// SPDX-License-Identifier: Apache-2.0
// What a stranger does to a port, and what this process listens on.
#pragma once

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "network/socket.h"

namespace crossdock::network {

// Keeps so many silent connections to the address and opens each anew when it is closed, until it ends.
class Flood {
  public:
    Flood(const Endpoint& endpoint, size_t num_connections);
    ~Flood();
    // Returns when connections have been turned away so often, or false after 20 s.
    bool await_closed(size_t count) const;

  private:
    void run(const Endpoint& endpoint, size_t num_connections);
    std::atomic<bool> ends_{false};
    std::atomic<size_t> num_closed_{0};
    std::thread thread_;
};

// "127.0.0.1 port 5" for each TCP port on which this process listens.
std::vector<std::string> listening_ports();

}  // namespace crossdock::network
