// SPDX-License-Identifier: Apache-2.0
// crossdock_demo: one Mixture-of-Experts layer on real text, over several ranks, checked against plain loops.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "demo/board.h"
#include "demo/options.h"
#include "demo/rank.h"
#include "demo/report.h"
#include "demo/summary.h"
#include "demo/text.h"
#include "tools/common/cli.h"
#include "tools/common/ranks.h"
#include "tools/common/terminal.h"

namespace crossdock::demo {
namespace {

// How long ranks may go on after one has failed.
constexpr double kGraceS = 10;

// Shows how far the slowest rank is. Where each line stays, about ten of them are enough.
class Progress {
  public:
    Progress(const Options& options, Board& board) : options_(options), board_(board) {}

    void show() {
        int step = board_.num_steps;
        int expert = options_.layer.num_experts;
        for (size_t rank = 0; rank < board_.reports.size(); ++rank) {
            step = std::min(step, board_.reports[rank].steps_done.load());
            expert = std::min(expert, board_.reports[rank].experts_checked.load());
        }
        const int granule = line_.is_terminal() ? 1 : std::max(1, (board_.num_steps + 4) / 5);
        const int expert_granule = line_.is_terminal() ? 1 : std::max(1, (options_.layer.num_experts + 3) / 4);
        if (step < board_.num_steps) {
            line_.show(fmt::format("  running: {} of {} steps done", step / granule * granule, board_.num_steps));
        } else if (expert < options_.layer.num_experts) {
            line_.show(fmt::format("  comparing: {} of {} experts recomputed", expert / expert_granule * expert_granule,
                                   options_.layer.num_experts));
        } else {
            line_.clear();
        }
    }

    void clear() { line_.clear(); }

  private:
    const Options& options_;
    Board& board_;
    tools::ProgressLine line_;
};

int run(Options options) {
    const Text text = read_text(options.text_path);
    const auto num_ranks = static_cast<size_t>(options.num_ranks);
    if (options.tokens_per_rank == 0) {
        options.tokens_per_rank = static_cast<int>((text.tokens.size() + num_ranks - 1) / num_ranks);
    }
    const size_t tokens_per_step = num_ranks * static_cast<size_t>(options.tokens_per_rank);
    const size_t num_tokens =
        options.num_steps == 0 ? text.tokens.size()
                               : std::min(text.tokens.size(), tokens_per_step * static_cast<size_t>(options.num_steps));
    const int num_steps = static_cast<int>((num_tokens + tokens_per_step - 1) / tokens_per_step);
    print_heading(options, text, num_tokens, num_steps);

    Board board(options, num_tokens, num_steps);
    const auto begin = std::chrono::steady_clock::now();
    const auto ranks = tools::start_ranks(
        options.backend,
        {.num_ranks = options.num_ranks,
         .ranks_per_host = options.num_ranks / options.num_nodes,
         .seed = options.schedule_seed},
        [&](const tools::RankContext& context) { run_rank(context, options, text, num_tokens, board); });
    Progress progress(options, board);
    const auto failures = ranks->wait([&] { progress.show(); }, kGraceS);
    progress.clear();

    Summary summary = summarise(options, text, num_tokens, board);
    summary.total_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    for (const tools::RankFailure& failure : failures) {
        summary.failures.push_back(tools::to_string(failure));
    }
    if (!options.json_path.empty()) {
        write_json(options.json_path, options, text, summary);
    }
    print_report(options, summary);
    if (!failures.empty()) {
        // Ranks that are threads may still hang in there; nothing of this process is worth waiting for them.
        std::fflush(nullptr);
        std::_Exit(1);
    }
    return summary.passed() ? 0 : 1;
}

}  // namespace
}  // namespace crossdock::demo

int main(int argc, char** argv) {
    crossdock::demo::Options options;
    if (const auto status = crossdock::demo::parse_options(argc, argv, options)) {
        return *status;
    }
    try {
        return crossdock::tools::flushed("crossdock_demo", crossdock::demo::run(options));
    } catch (const std::exception& error) {
        fmt::print(stderr, "crossdock_demo: {}\n", error.what());
        return crossdock::tools::kUsageStatus;
    }
}
