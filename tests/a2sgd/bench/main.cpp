// SPDX-License-Identifier: Apache-2.0
// a2sgd_bench: the passes of A2SGD over a gradient beside a copy, and what it sends beside other ways to average.
#include <fmt/format.h>
#include <sys/utsname.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/a2sgd/bench/passes.h"
#include "tests/a2sgd/bench/stream_clock.h"
#include "tests/a2sgd/bench/traffic.h"
#include "tools/common/cli.h"

namespace crossdock::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
    std::string device = "cpu";
    std::vector<size_t> entries{size_t{1} << 20, size_t{1} << 24, size_t{1} << 26};
    std::vector<std::string> dtypes{"fp32", "bf16", "fp16"};
    int iterations = 20;
    int num_ranks = 4;
    size_t traffic_entries = 1'000'000;
    double top_k_part = 0.001;
    std::string json_path;
};

std::string cpu_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
    }
    return "unknown";
}

Json passes(const Options& options) {
    fmt::print("{:<5} {:<5} {:>10}  {:>9}  {:>9} {:>5}  {:>9} {:>5}   GB/s; parts are of the copy's\n", "type", "sums",
               "entries", "copy", "begin", "part", "end", "part");
    Json list = Json::array();
    for (const std::string& dtype : options.dtypes) {
        for (const bool sums_in_fp64 : {false, true}) {
            for (const size_t entries : options.entries) {
                const PassResult result =
                    time_passes({options.device, dtype, sums_in_fp64, entries, options.iterations});
                const double begin_part = result.begin_gb_s / result.copy_gb_s;
                const double end_part = result.end_gb_s / result.copy_gb_s;
                fmt::print("{:<5} {:<5} {:>10}  {:>9.1f}  {:>9.1f} {:>5.2f}  {:>9.1f} {:>5.2f}\n", dtype,
                           sums_in_fp64 ? "fp64" : "fp32", entries, result.copy_gb_s, result.begin_gb_s, begin_part,
                           result.end_gb_s, end_part);
                std::fflush(stdout);
                list.push_back({{"dtype", dtype},
                                {"sums", sums_in_fp64 ? "fp64" : "fp32"},
                                {"entries", entries},
                                {"copy_us", result.copy_us.median},
                                {"begin_us", result.begin_us.median},
                                {"end_us", result.end_us.median},
                                {"copy_gb_s", result.copy_gb_s},
                                {"begin_part_of_copy", begin_part},
                                {"end_part_of_copy", end_part}});
            }
        }
    }
    return list;
}

Json traffic(const Options& options) {
    fmt::print("\n{:<6} {:>14}  {:>16}  {:>12}   {} ranks, {} entries of fp32\n", "way", "bits per message",
               "bytes per rank", "us per step", options.num_ranks, options.traffic_entries);
    Json list = Json::array();
    constexpr int kSteps = 5;
    for (const TrafficResult& result :
         compare_traffic(options.num_ranks, options.traffic_entries, kSteps, options.top_k_part)) {
        fmt::print("{:<6} {:>14}  {:>16.0f}  {:>12.0f}\n", result.name, result.message_bits, result.bytes_sent,
                   result.step_us);
        list.push_back({{"name", result.name},
                        {"message_bits", result.message_bits},
                        {"bytes_sent_per_rank_and_step", result.bytes_sent},
                        {"step_us", result.step_us}});
    }
    return {{"ranks", options.num_ranks},
            {"entries", options.traffic_entries},
            {"top_k_part", options.top_k_part},
            {"ways", list}};
}

Json machine(const std::string& device) {
    utsname system{};
    uname(&system);
    Json found = {{"cpu", cpu_name()}, {"cpus", std::thread::hardware_concurrency()}, {"system", system.sysname}};
    if (device == "cuda") found["gpu"] = name_of_gpu();
    return found;
}

void run(const Options& options, const std::string& command) {
    Json json = {{"command", command}, {"machine", machine(options.device)}, {"device", options.device}};
    json["passes"] = passes(options);
    json["traffic"] = traffic(options);
    if (!options.json_path.empty()) std::ofstream(options.json_path) << json.dump(1) << '\n';
}

}  // namespace
}  // namespace crossdock::bench

int main(int argc, char** argv) {
    using namespace crossdock;
    bench::Options options;
    CLI::App app("The passes of A2SGD beside a copy, and what it sends beside other ways to average.", "a2sgd_bench");
    app.add_option("--device", options.device, "cpu or cuda (cpu)")->check(tools::one_of({"cpu", "cuda"}));
    app.add_option("--entries", options.entries, "entries of the gradient, a list (2^20, 2^24, 2^26)")
        ->delimiter(',')
        ->check(tools::integer_range(1, int64_t{1} << 34));
    app.add_option("--dtype", options.dtypes, "fp32, bf16, fp16, a list (all)")
        ->delimiter(',')
        ->check(tools::one_of({"fp32", "bf16", "fp16"}));
    app.add_option("--iterations", options.iterations, "timed steps (20)")->check(tools::integer_range(1, 100'000));
    app.add_option("--ranks", options.num_ranks, "ranks whose traffic is counted (4)")
        ->check(tools::integer_range(1, 64));
    app.add_option("--traffic-entries", options.traffic_entries, "entries of their gradients (1000000)")
        ->check(tools::integer_range(1, int64_t{1} << 28));
    app.add_option("--top-k", options.top_k_part, "share of entries that Top-K sends (0.001)")
        ->check(tools::number_range(1e-9, 1));
    app.add_option("--json", options.json_path, "file for the results")->check(tools::writable_file());
    if (const auto status = tools::parse_command_line(app, argc, argv)) return *status;
    std::string command = "a2sgd_bench";
    for (int i = 1; i < argc; ++i) {
        if (std::string(argv[i]) == "--json") {
            ++i;
        } else {
            command += std::string(" ") + argv[i];
        }
    }
    try {
        bench::run(options, command);
        return 0;
    } catch (const std::exception& error) {
        fmt::print(stderr, "a2sgd_bench: {}\n", error.what());
        return 1;
    }
}
