// SPDX-License-Identifier: Apache-2.0
// Low latency over very many ranks of one process, in LSA teams: what an operation puts and signals per rank,
// and what memory and time it takes. Rows are small, results are checked. Prints one JSON line.
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "crossdock.h"
#include "crossdock/group.hpp"
#include "tools/common/cli.h"
#include "tools/common/random.h"
#include "tools/common/ranks.h"

namespace {

using namespace crossdock;

constexpr double kGraceS = 10;

struct Options {
    int num_ranks = 64;
    int lsa_team_size = 8;
    int num_tokens = 1;
    int hidden = 16;  // fp32
    int topk = 2;
    int num_trips = 2;
    bool threads = false;
    uint64_t seed = 1;
};

struct Totals {
    std::atomic<uint64_t> bytes_crossed{0}, rows_crossed{0}, puts{0}, signals{0}, symmetric_bytes{0}, wrong{0};
};

struct Run {
    const Options* options;
    Totals totals;
};

void add(Totals& totals, ncclEpGroup_t group) {
    crossdockTraffic_t traffic = CROSSDOCK_TRAFFIC_INIT;
    check(crossdockGroupTraffic(group, &traffic));
    size_t symmetric = 0;
    check(crossdockGroupMemory(group, &symmetric, nullptr));
    totals.bytes_crossed += traffic.bytes_crossed;
    totals.rows_crossed += traffic.rows_crossed;
    totals.puts += traffic.puts;
    totals.signals += traffic.signals;
    totals.symmetric_bytes += symmetric;
}

// One expert per rank, which returns what it gets; weights sum to 1, so every token returns unchanged.
void run_rank(Run& run, ncclComm_t comm, int rank) {
    const Options& options = *run.options;
    const auto ranks = static_cast<size_t>(options.num_ranks);
    const auto tokens = static_cast<size_t>(options.num_tokens);
    const auto hidden = static_cast<size_t>(options.hidden);
    const auto topk = static_cast<size_t>(options.topk);
    ncclEpGroupConfig_t config = low_latency_config(static_cast<unsigned>(ranks), static_cast<unsigned>(tokens),
                                                    static_cast<unsigned>(hidden * sizeof(float)));
    config.timeout_ns = 600'000'000'000;
    config.num_topk = static_cast<unsigned>(topk);
    crossdockGroupOptions_t group_options = CROSSDOCK_GROUP_OPTIONS_INIT;
    group_options.lsa_team_size = options.lsa_team_size;
    Group group(comm, config, group_options);
    Handle handle(group, NCCL_EP_LAYOUT_EXPERT_MAJOR, options.topk);

    tools::Random random(options.seed * 1'000'003 + static_cast<uint64_t>(rank));
    std::vector<int32_t> ids(tokens * topk);
    std::vector<float> weights(tokens * topk, 1.0f / static_cast<float>(topk));
    std::vector<float> rows(tokens * hidden), received(ranks * tokens * hidden), results(tokens * hidden);
    int32_t received_rows = 0;
    Tensor topk_idx(ids.data(), ncclInt32, {tokens, topk});
    Tensor topk_weights(weights.data(), ncclFloat32, {tokens, topk});
    Tensor input(rows.data(), ncclFloat32, {tokens, hidden});
    Tensor output(received.data(), ncclFloat32, {1, ranks * tokens, hidden});
    Tensor counter(&received_rows, ncclInt32, {1});
    Tensor result(results.data(), ncclFloat32, {tokens, hidden});
    for (int trip = 0; trip < options.num_trips; ++trip) {
        for (size_t i = 0; i < ids.size(); ++i) {
            ids[i] = static_cast<int32_t>(random.next() % ranks);
        }
        for (size_t i = 0; i < rows.size(); ++i) {
            rows[i] = static_cast<float>(static_cast<size_t>(rank) * rows.size() + i);
        }
        handle.update(topk_idx);
        handle.dispatch(input, output, counter);
        handle.combine(output, topk_weights, result);
        for (size_t i = 0; i < rows.size(); ++i) {
            run.totals.wrong += results[i] == rows[i] ? 0 : 1;
        }
    }
    add(run.totals, group.get());
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    CLI::App app("Low latency over many ranks of one process, in LSA teams.", "ll_scale");
    app.add_option("--ranks", options.num_ranks, "ranks (64)")->check(tools::integer_range(1, 4096));
    app.add_option("--lsa-team", options.lsa_team_size, "ranks per LSA team (8)")->check(tools::integer_range(1, 4096));
    app.add_option("--tokens", options.num_tokens, "tokens per rank (1)")->check(tools::integer_range(1, 512));
    app.add_option("--hidden", options.hidden, "elements of a row, fp32 (16)")->check(tools::integer_range(4, 32768));
    app.add_option("--topk", options.topk, "experts per token, a power of two (2)")->check(tools::integer_range(1, 32));
    app.add_option("--trips", options.num_trips, "dispatches, and combines (2)")->check(tools::integer_range(1, 1000));
    app.add_option("--seed", options.seed, "draws the routing (1)");
    app.add_flag("--threads", options.threads, "ranks are threads; without: fibers of the simulation");
    if (const auto status = tools::parse_command_line(app, argc, argv)) return *status;

    const auto begin = std::chrono::steady_clock::now();
    Run run{&options, {}};
    const auto program = [&](const tools::RankContext& self) { run_rank(run, self.host, self.rank); };
    const auto ranks = options.threads ? tools::start_threads(options.num_ranks, program)
                                       : tools::start_simulation(options.num_ranks, options.seed, program);
    const auto failures = ranks->wait([] {}, kGraceS);
    for (const tools::RankFailure& failure : failures) {
        std::fprintf(stderr, "ll_scale: %s\n", tools::to_string(failure).c_str());
    }
    if (!failures.empty()) std::_Exit(1);  // threads may hang
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const double operations = 2.0 * options.num_ranks * options.num_trips;
    const Totals& totals = run.totals;
    std::printf(
        "{\"ranks\": %d, \"lsa_team\": %d, \"tokens\": %d, \"topk\": %d, \"row_bytes\": %d, \"backend\": \"%s\", "
        "\"trips\": %d, \"signals\": %.3f, \"puts\": %.3f, \"rows\": %.3f, \"bytes\": %.1f, \"symmetric_bytes\": %.0f, "
        "\"seconds\": %.2f, \"peak_mib\": %ld, \"wrong\": %llu}\n",
        options.num_ranks, options.lsa_team_size, options.num_tokens, options.topk, options.hidden * 4,
        options.threads ? "threads" : "simulation", options.num_trips, static_cast<double>(totals.signals) / operations,
        static_cast<double>(totals.puts) / operations, static_cast<double>(totals.rows_crossed) / operations,
        static_cast<double>(totals.bytes_crossed) / operations,
        static_cast<double>(totals.symmetric_bytes) / options.num_ranks, seconds, usage.ru_maxrss / 1024,
        static_cast<unsigned long long>(totals.wrong));
    return totals.wrong == 0 ? 0 : 1;
}
