// SPDX-License-Identifier: Apache-2.0
// Several hosts on one machine: each has network and IPC namespaces of its own, and a cable to a switch, which is a
// process that can be slow and can cut cables. It needs root and TAP devices.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace crossdock::testing {

class HostNetwork {
  public:
    static constexpr int kMostHosts = 8;

    // Empty where hosts can be made here, else why not.
    static std::string why_impossible();

    explicit HostNetwork(int num_hosts);
    ~HostNetwork();
    HostNetwork(const HostNetwork&) = delete;
    HostNetwork& operator=(const HostNetwork&) = delete;

    // This process, which has one thread, becomes one of the host.
    void enter(int host) const;

    // Of a port of host 0.
    std::string address() const { return "10.77.0.1:7000"; }

    // Returns when `count` processes have called it. Once per network.
    void meet(int num_processes);

    // From any process: frames from and to the host are lost until the cable is mended.
    void cut(int host) { cables_->is_cut[host] = true; }
    void mend(int host) { cables_->is_cut[host] = false; }

    // Sets the delay of every frame and the bandwidth of every cable.
    void slow_down(uint64_t delay_us, uint64_t bytes_per_ms) {
        cables_->delay_us = delay_us;
        cables_->bytes_per_ms = bytes_per_ms;
    }

  private:
    struct Cables {
        std::atomic<int> num_met;
        std::atomic<bool> is_cut[kMostHosts];
        std::atomic<uint64_t> delay_us;
        std::atomic<uint64_t> bytes_per_ms;  // 0: no limit
    };
    struct Host {
        int network = -1;  // namespaces, and the switch's end of the cable
        int ipc = -1;
        int tap = -1;
    };
    static Host make_host(int number);
    [[noreturn]] void run_switch() const;

    std::vector<Host> hosts_;
    Cables* cables_;
    pid_t switch_ = -1;
};

}  // namespace crossdock::testing
