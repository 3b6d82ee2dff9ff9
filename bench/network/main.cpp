// SPDX-License-Identifier: Apache-2.0
// network_bench: what a put with a signal costs between two ranks of a host: in kernels written against NCCL's Device
// API, posted directly and by the proxy, and through the network plugin, beside UCX's own active messages, a bare
// socket and memcpy, all in one run and in turn, so that changes of the machine's speed affect all of them.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <string_view>

#include "bench/network/measure.h"

using crossdock::Backend;
using namespace crossdock::network_bench;

namespace {

struct Options {
    std::vector<uint64_t> sizes = {8, 64, 512, 4096, 32768, 262144, 1 << 20, 4 << 20};
    std::vector<int> contexts = {1, 2, 4};
    uint32_t repetitions = 5;
    uint32_t round_trips = 2000;
    uint64_t mebibytes = 512;  // of a stream
    uint32_t messages = 200'000;
    std::string plugin = NETWORK_BENCH_PLUGIN;
    std::string json;
    std::vector<std::string> ways, transports;  // empty: all
};

constexpr std::pair<const char*, Backend> kBackends[] = {
    {"threads", Backend::kThreads}, {"shared memory", Backend::kProcesses}, {"tcp", Backend::kHosts}};

Amount amount_of(const Options& options, uint64_t bytes) {
    const uint64_t messages = std::clamp<uint64_t>((options.mebibytes << 20) / bytes, 8, 20'000);
    const uint32_t round_trips =
        std::max<uint32_t>(20, bytes > 100'000 ? options.round_trips / 20 : options.round_trips);
    return {bytes, round_trips, static_cast<uint32_t>(messages)};
}

struct Way {
    const char* name;
    const char* transport;
    std::function<std::optional<Result>(const Amount& amount)> measure;  // nothing: it is not there
};

std::vector<Way> all_ways(const std::string& plugin) {
    std::vector<Way> ways;
    for (const auto& [transport, backend] : kBackends) {
        ways.push_back(
            {"direct", transport, [=](const auto& amount) { return measure_kernels(backend, false, amount, 1); }});
        ways.push_back(
            {"proxy", transport, [=](const auto& amount) { return measure_kernels(backend, true, amount, 1); }});
    }
    ways.push_back({"memcpy", "threads", measure_memcpy});
    for (const auto& [transport, list] : {std::pair("shared memory", ""), std::pair("tcp", "tcp")}) {
        // Shared memory's transports by name: with all of them it would also ask sockets.
        const char* chosen = *list == '\0' ? "posix,sysv,cma,self" : list;
        ways.push_back(
            {"crossdock", transport, [=](const auto& amount) { return measure_plugin(amount, plugin, list); }});
        ways.push_back(
            {"ucx_perftest", transport, [=](const auto& amount) { return measure_perftest(amount, chosen); }});
    }
    // Different hosts share no memory.
    ways.push_back({"hosts", "tcp", [](const auto& amount) { return measure_hosts(amount, "tcp"); }});
    ways.push_back({"tcp socket", "tcp", measure_tcp});
    return ways;
}

bool is_among(const std::vector<std::string>& names, const char* name) {
    return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
}

void run(const Options& options) {
    std::vector<Row> rows;
    std::vector<RateRow> rates;
    std::vector<Way> ways = all_ways(options.plugin);
    std::erase_if(ways, [&](const Way& way) {
        return !is_among(options.ways, way.name) || !is_among(options.transports, way.transport);
    });
    for (const auto& [transport, backend] : kBackends) {
        for (const uint64_t bytes : options.sizes) {
            const size_t first = rows.size();
            for (uint32_t i = 0; i < options.repetitions; ++i) {
                size_t row = first;
                for (const Way& way : ways) {
                    if (std::string_view(way.transport) != transport) continue;
                    const auto result = way.measure(amount_of(options, bytes));
                    if (!result) continue;
                    if (row == rows.size()) rows.push_back({way.name, transport, amount_of(options, bytes), {}});
                    rows[row++].results.push_back(*result);
                }
            }
        }
        for (const bool by_proxy : {false, true}) {
            const char* way = by_proxy ? "proxy" : "direct";
            if (!is_among(options.ways, way) || !is_among(options.transports, transport)) continue;
            for (const int contexts : options.contexts) {
                RateRow row{way, transport, contexts, {}};
                for (uint32_t i = 0; i < options.repetitions; ++i) {
                    row.messages_per_us.push_back(
                        measure_kernels(backend, by_proxy, {8, 0, options.messages}, contexts).messages_per_us);
                }
                rates.push_back(row);
            }
        }
    }
    print_table(rows, rates);
    if (!options.json.empty()) write_json(rows, rates, options.json);
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    CLI::App app("What a put with a signal costs between two ranks");
    app.add_option("--sizes", options.sizes, "bytes per put, a list")
        ->delimiter(',')
        ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 30));
    app.add_option("--contexts", options.contexts, "numbers of contexts for the message-rate test, a list")
        ->delimiter(',')
        ->check(CLI::Range(1, 64));
    app.add_option("--messages", options.messages, "8-byte puts per message-rate test")
        ->check(CLI::Range(32u, 1'000'000'000u));
    app.add_option("--repetitions", options.repetitions, "repetitions; medians are reported")
        ->check(CLI::Range(1, 1000));
    app.add_option("--round-trips", options.round_trips, "round trips per measurement; a 20th of that for large puts")
        ->check(CLI::Range(1, 10'000'000));
    app.add_option("--mebibytes", options.mebibytes, "MiB per bandwidth test, at most 20000 puts")
        ->check(CLI::Range(1, 1 << 20));
    app.add_option("--plugin", options.plugin, "the plugin's file")->check(CLI::ExistingFile);
    app.add_option("--json", options.json, "file for all figures");
    app.add_option("--ways", options.ways, "only these; crossdock is the plugin")
        ->delimiter(',')
        ->check(CLI::IsMember({"direct", "proxy", "memcpy", "crossdock", "ucx_perftest", "hosts", "tcp socket"}));
    app.add_option("--transports", options.transports, "only these")
        ->delimiter(',')
        ->check(CLI::IsMember({"threads", "shared memory", "tcp"}));
    CLI11_PARSE(app, argc, argv);
    try {
        run(options);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "network_bench: %s\n", error.what());
        return 1;
    }
    return 0;
}
