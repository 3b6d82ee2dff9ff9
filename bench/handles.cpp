// SPDX-License-Identifier: Apache-2.0
#include "bench/handles.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "bench/gpu.h"
#include "bench/stopwatch.h"
#include "tools/common/statistics.h"

namespace crossdock::bench {
namespace {

// Taken by this process; GPUs: by all processes that use this one.
double used_mib(const Options& options) {
    constexpr double kMiB = 1 << 20;
    if (is_cuda(options.backend)) {
        return static_cast<double>(used_gpu_memory()) / kMiB;
    }
    long pages = 0;
    if (FILE* file = std::fopen("/proc/self/statm", "r")) {
        if (std::fscanf(file, "%*d %ld", &pages) != 1) {
            pages = 0;
        }
        std::fclose(file);
    }
    return static_cast<double>(pages) * static_cast<double>(sysconf(_SC_PAGESIZE)) / kMiB;
}

void print_times(const char* name, std::vector<double> times) {
    const tools::Spread spread = tools::spread_of(times);
    std::sort(times.begin(), times.end());
    fmt::print("  {:8} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f} {:>14.2f}\n", name, spread.median, spread.p99,
               tools::percentile(times, 0.999), spread.max, tools::percentile(times, 0.999) / spread.median);
}

}  // namespace

void measure_handles(const tools::RankContext& context, const Options& options, tools::Device& device,
                     Workload& workload) {
    const auto num_handles = static_cast<size_t>(options.num_handles);
    // Written once before, so that the memory that they take is not taken for the library's.
    std::vector<double> passes(num_handles, -1);
    std::vector<double> ends(num_handles, -1);
    const auto run = [&](size_t count) {
        for (size_t i = 0; i < count; ++i) {
            // The device finishes each pass outside of the times, so that no full queue is timed.
            double end_us = 0;
            const double pass_us = time_us([&] {
                workload.start_pass();
                end_us = time_us([&] { workload.end_pass(); });
            });
            device.synchronize();
            passes[i % num_handles] = pass_us;
            ends[i % num_handles] = end_us;
        }
    };
    run(static_cast<size_t>(options.num_warmups) + 100);
    const double mib_before = used_mib(options);
    run(num_handles);
    const double mib_after = used_mib(options);
    if (context.rank > 0) {
        return;
    }
    fmt::print(
        "\n  {} passes of {}, each with a handle of its own: the host's us in create, update, dispatch, combine\n"
        "  and destroy, and in destroy alone\n",
        num_handles, workload.library().name);
    fmt::print("  {:8} {:>9} {:>9} {:>9} {:>9} {:>14}\n", "", "median", "p99", "p99.9", "max", "p99.9 / median");
    print_times("pass", passes);
    print_times("destroy", ends);
    fmt::print("  memory: {:.1f} MiB before, {:.1f} MiB after\n", mib_before, mib_after);
    std::fflush(stdout);
}

}  // namespace crossdock::bench
