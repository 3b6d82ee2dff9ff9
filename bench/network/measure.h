// SPDX-License-Identifier: Apache-2.0
// What network_bench measures: between two processes of this host, the time of half a round trip, and a stream's
// bandwidth.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/cpu/clock.h"
#include "tools/common/backend.h"

namespace crossdock::network_bench {

struct Amount {
    uint64_t bytes;
    uint32_t round_trips;  // 0: only the stream
    uint32_t messages;     // of a stream
};

struct Result {
    double half_round_trip_us = 0;
    double gigabytes_per_s = 0;
    double messages_per_us = 0;  // of kernels
};

// Runs `rank` in two processes, with UCX_TLS set to `transports` unless that is empty. Rank 0 returns the result.
// Throws a message if one fails.
struct Meeting;  // what they share
using RankFunction = std::function<Result(Meeting& meeting, int rank)>;
Result run_pair(const std::string& transports, const RankFunction& rank, int cores_per_rank = 1);

// Pins the calling thread to cores_per_rank cores of its rank's own, or to one if there are fewer, so that runs are
// comparable.
void stay_on_cores(int rank, int cores_per_rank);
// "127.0.0.1:PORT", each time another one.
std::string next_address();

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
// Kernels written against NCCL's Device API. Several contexts: each in a launch of its own.
// backend: kThreads, kProcesses or kHosts.
Result measure_kernels(Backend backend, bool by_proxy, const Amount& amount, int num_contexts);
// memcpy() in one thread: the time of a copy, and the bandwidth.
Result measure_memcpy(const Amount& amount);
// write() and read() on a socket that polls.
Result measure_tcp(const Amount& amount);
// ucx_perftest's active messages; nothing where it is not installed.
std::optional<Result> measure_perftest(const Amount& amount, const std::string& transports);

struct Row {
    std::string way;         // "crossdock" (the plugin), "hosts", "direct", "proxy", "ucx_perftest", "tcp socket", ...
    std::string transports;  // "threads", "shared memory", "tcp"
    Amount amount;
    std::vector<Result> results;  // of all repetitions
};
Result median(const Row& row);
// Messages of 8 bytes from one rank to the other, in several contexts at once.
struct RateRow {
    std::string way, transports;
    int contexts;
    std::vector<double> messages_per_us;
};
void print_table(const std::vector<Row>& rows, const std::vector<RateRow>& rates);
void write_json(const std::vector<Row>& rows, const std::vector<RateRow>& rates, const std::string& file);

}  // namespace crossdock::network_bench
