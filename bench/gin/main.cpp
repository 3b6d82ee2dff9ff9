// SPDX-License-Identifier: Apache-2.0
// gin_bench: what a put with a signal costs between two processes of a host, beside UCX's own active messages and a
// bare socket, all in one run and turn by turn, so that a change of the machine's mood meets all of them.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>

#include "bench/gin/measure.h"

using namespace crossdock::gin_bench;

namespace {

struct Options {
    std::vector<uint64_t> sizes = {8, 64, 512, 4096, 32768, 262144, 1 << 20, 4 << 20};
    uint32_t repetitions = 5;
    uint32_t round_trips = 2000;
    uint64_t mebibytes = 512;  // of a stream
    std::string plugin = GIN_BENCH_PLUGIN;
    std::string json;
    bool only_plugin = false;
};

void run(const Options& options) {
    std::vector<Row> rows;
    const std::pair<const char*, const char*> transports[] = {{"shared memory", ""}, {"tcp", "tcp"}};
    for (const auto& [name, list] : transports) {
        for (const uint64_t bytes : options.sizes) {
            const uint64_t messages = std::clamp<uint64_t>((options.mebibytes << 20) / bytes, 8, 20'000);
            const uint32_t round_trips =
                std::max<uint32_t>(20, bytes > 100'000 ? options.round_trips / 20 : options.round_trips);
            const Amount amount{bytes, round_trips, static_cast<uint32_t>(messages)};
            Row own{"crossdock", name, amount, {}};
            Row hosts{"hosts", name, amount, {}};
            Row perftest{"ucx_perftest", name, amount, {}};
            Row socket{"tcp socket", name, amount, {}};
            for (uint32_t i = 0; i < options.repetitions; ++i) {
                own.results.push_back(measure_plugin(amount, options.plugin, list));
                if (options.only_plugin) continue;
                // Different hosts share no memory.
                if (*list != '\0') hosts.results.push_back(measure_hosts(amount, list));
                // Shared memory's transports by name: with all of them it would also ask sockets.
                const std::string chosen = *list == '\0' ? "posix,sysv,cma,self" : list;
                if (const auto result = measure_perftest(amount, chosen)) perftest.results.push_back(*result);
                if (*list != '\0') socket.results.push_back(measure_tcp(amount));
            }
            for (Row* row : {&own, &hosts, &perftest, &socket}) {
                if (!row->results.empty()) rows.push_back(*row);
            }
        }
    }
    print_table(rows);
    if (!options.json.empty()) write_json(rows, options.json);
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    CLI::App app("What a put with a signal costs between two processes");
    app.add_option("--sizes", options.sizes, "bytes of a put")
        ->delimiter(',')
        ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 30));
    app.add_option("--repetitions", options.repetitions, "medians are of so many")->check(CLI::Range(1, 1000));
    app.add_option("--round-trips", options.round_trips, "of a measurement; large puts take a 20th")
        ->check(CLI::Range(1, 10'000'000));
    app.add_option("--mebibytes", options.mebibytes, "of a stream, at most 20000 puts")->check(CLI::Range(1, 1 << 20));
    app.add_option("--plugin", options.plugin, "the plugin's file")->check(CLI::ExistingFile);
    app.add_option("--json", options.json, "file for all figures");
    app.add_flag("--only-plugin", options.only_plugin, "nothing else in the run");
    CLI11_PARSE(app, argc, argv);
    try {
        run(options);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "gin_bench: %s\n", error.what());
        return 1;
    }
    return 0;
}
