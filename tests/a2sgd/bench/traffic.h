// SPDX-License-Identifier: Apache-2.0
// What the ways to average gradients send, measured with ranks as threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crossdock::bench {

struct TrafficResult {
    std::string name;
    uint64_t message_bits = 0;  // of one rank and step
    double bytes_sent = 0;      // per rank and step: every copy that goes to another rank
    double step_us = 0;         // plain implementations in memory; A2SGD is the library's
};

std::vector<TrafficResult> compare_traffic(int num_ranks, size_t entries, int num_steps, double top_k_part);

}  // namespace crossdock::bench
