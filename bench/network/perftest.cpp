// SPDX-License-Identifier: Apache-2.0
// ucx_perftest in two processes, as UCX's own documentation runs it; its last line has the figures.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "bench/network/measure.h"

namespace crossdock::network_bench {
namespace {

std::string output_of(const std::string& command) {
    FILE* pipe = popen(command.c_str(), "re");
    if (pipe == nullptr) throw std::runtime_error("popen failed");
    std::string output;
    char part[512];
    while (std::fgets(part, sizeof(part), pipe) != nullptr) output += part;
    pclose(pipe);
    return output;
}

// Columns of -f: iterations, then latency (typical, average, overall), bandwidth in MB/s (average, overall), rate.
std::vector<double> figures(const std::string& test, uint64_t bytes, uint32_t iterations,
                            const std::string& transports) {
    static int port = 17000 + static_cast<int>(now_ns() % 10000);
    ++port;
    const std::string environment = transports.empty() ? "" : fmt::format("UCX_TLS={} ", transports);
    // The server is on core 0 and the client on core 1, like network_bench's own ranks.
    const std::string command = fmt::format(
        "({0} timeout 60 taskset -c 0 ucx_perftest -p {1} >/dev/null 2>&1 & for i in 1 2 3 4 5 6 7 8 9; do sleep 0.1; "
        "{0} timeout 60 taskset -c 1 ucx_perftest -p {1} localhost -t {2} -s {3} -n {4} -w {5} -f 2>/dev/null "
        "| grep '^ *[0-9][0-9]* ' && break; done | tail -n 1; wait)",
        environment, port, test, bytes, iterations, iterations / 10 + 1);
    const std::string line = output_of(command);
    std::vector<double> numbers;
    const char* at = line.c_str();
    for (char* end = nullptr;; at = end) {
        const double number = std::strtod(at, &end);
        if (end == at) break;
        numbers.push_back(number);
    }
    if (numbers.size() < 6) throw std::runtime_error("ucx_perftest said nothing that can be read: '" + line + "'");
    return numbers;
}

}  // namespace

std::optional<Result> measure_perftest(const Amount& amount, const std::string& transports) {
    if (output_of("command -v ucx_perftest").empty()) return std::nullopt;
    Result result;
    result.half_round_trip_us = figures("ucp_am_lat", amount.bytes, amount.round_trips, transports)[3];
    // It counts in units of 2^20 bytes.
    result.gigabytes_per_s = figures("ucp_am_bw", amount.bytes, amount.messages, transports)[5] * 1048576 / 1e9;
    return result;
}

}  // namespace crossdock::network_bench
