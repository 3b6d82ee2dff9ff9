// SPDX-License-Identifier: Apache-2.0
// ep_bench: times expert-parallel dispatch and combine beside a lower bound measured in the same run.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

#include "bench/environment.h"
#include "bench/options.h"
#include "bench/rank.h"
#include "tools/common/cli.h"
#include "tools/common/ranks.h"

namespace crossdock::bench {
namespace {

// How long ranks may go on after one has failed.
constexpr double kGraceS = 10;

void run_launched(const Options& options) {
    const LaunchedRank& launched = *options.launched;
    const tools::RankContext context{launched.rank, launched.num_ranks, meet(launched, options.rendezvous_path)};
    run_rank(context, options);
    crossdockCommDestroy(context.host);
}

int run_own(const Options& options) {
    const auto ranks =
        tools::start_ranks(options.backend, {.num_ranks = options.num_ranks},
                           [&options](const tools::RankContext& context) { run_rank(context, options); });
    const auto failures = ranks->wait([] {}, kGraceS);
    for (const tools::RankFailure& failure : failures) {
        fmt::print(stderr, "ep_bench: {}\n", tools::to_string(failure));
    }
    if (!failures.empty()) {
        // Ranks that are threads may still hang in there; nothing of this process is worth waiting for them.
        std::fflush(nullptr);
        std::_Exit(1);
    }
    return 0;
}

}  // namespace
}  // namespace crossdock::bench

int main(int argc, char** argv) {
    namespace bench = crossdock::bench;
    bench::Options options;
    try {
        if (const auto status = bench::parse_options(argc, argv, options)) {
            return *status;
        }
        if (!options.launched) {
            return crossdock::tools::flushed("ep_bench", bench::run_own(options));
        }
        bench::run_launched(options);
        return crossdock::tools::flushed("ep_bench", 0);
    } catch (const std::exception& error) {
        fmt::print(stderr, "ep_bench: {}\n", error.what());
        return 1;
    }
}
