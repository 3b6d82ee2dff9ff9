// SPDX-License-Identifier: Apache-2.0
#include "demo/rank.h"

#include "demo/rank_parts.h"
#include "tools/common/device.h"

namespace crossdock::demo {

void run_rank(const tools::RankContext& context, const Options& options, const Text& text, size_t num_tokens,
              Board& board) {
    const bool on_gpu = options.backend == Backend::kCuda;
    const auto device = on_gpu ? tools::make_cuda_device(context.rank) : tools::make_cpu_device();
    RankReport& report = board.reports[static_cast<size_t>(context.rank)];
    RankTokens tokens;
    {
        const LayerCommunicator comm(context, options.backend);
        const auto run = options.is_high_throughput() ? run_high_throughput : run_low_latency;
        run(context, options, text, num_tokens, *device, comm.get(), board, tokens);
    }
    Stopwatch stopwatch;
    if (options.is_high_throughput()) {
        compare_backward_with_reference(options.layer, options.num_nodes > 1, tokens, report);
    } else {
        compare_with_reference(options.layer, tokens, report);
    }
    report.reference_s = stopwatch.lap();
}

}  // namespace crossdock::demo
