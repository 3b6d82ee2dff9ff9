// SPDX-License-Identifier: Apache-2.0
// What gin_bench measures: between two processes of this host, the time of half a round trip, and a stream's bandwidth.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/cpu/clock.h"

namespace crossdock::gin_bench {

struct Amount {
    uint64_t bytes;
    uint32_t round_trips;
    uint32_t messages;  // of a stream
};

struct Result {
    double half_round_trip_us = 0;
    double gigabytes_per_s = 0;
};

// Runs `rank` in two processes, with UCX_TLS set to `transports` unless that is empty. Rank 0 returns the result.
// Throws a message if one fails.
struct Meeting;  // what they share
using RankFunction = std::function<Result(Meeting& meeting, int rank)>;
Result run_pair(const std::string& transports, const RankFunction& rank);

// 128 bytes from each to the other.
void exchange(Meeting& meeting, int rank, const void* own, void* others);
// A number that one has and the other waits for.
void publish(Meeting& meeting, uint64_t number);
uint64_t await_number(Meeting& meeting);

inline uint64_t now_ns() { return cpu::steady_now_ns(); }

// Put and signal through the plugin's table of functions.
Result measure_plugin(const Amount& amount, const std::string& plugin, const std::string& transports);
// The same from kernels of CPU ranks that play two hosts.
Result measure_hosts(const Amount& amount, const std::string& transports);
// write() and read() on a socket that polls.
Result measure_tcp(const Amount& amount);
// ucx_perftest's active messages; nothing where it is not installed.
std::optional<Result> measure_perftest(const Amount& amount, const std::string& transports);

struct Row {
    std::string way;         // "crossdock", "hosts", "ucx_perftest", "tcp socket"
    std::string transports;  // "shared memory", "tcp"
    Amount amount;
    std::vector<Result> results;  // of all repetitions
};
Result median(const Row& row);
void print_table(const std::vector<Row>& rows);
void write_json(const std::vector<Row>& rows, const std::string& file);

}  // namespace crossdock::gin_bench
