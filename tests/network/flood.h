// SPDX-License-Identifier: Apache-2.0
// A flood of unauthenticated connections, and the ports on which this process listens.
#pragma once

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "network/socket.h"

namespace crossdock::network {

// Keeps num_connections silent connections to the address open, reopening each that is closed.
class Flood {
  public:
    Flood(const Endpoint& endpoint, size_t num_connections);
    ~Flood();
    // Waits until accepted connections were closed `count` times; false after 20 s.
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
