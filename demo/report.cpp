// SPDX-License-Identifier: Apache-2.0
#include "demo/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "tools/common/statistics.h"
#include "tools/common/terminal.h"

namespace crossdock::demo {
namespace {

using tools::Colour;
using tools::paint;

constexpr double kMegabyte = 1e6;
constexpr const char* kStageNames[kNumForwardStages] = {"route", "dispatch", "experts", "combine"};

// 1234567 -> 1,234,567
std::string grouped(uint64_t number) {
    std::string digits = std::to_string(number);
    for (auto position = static_cast<int>(digits.size()) - 3; position > 0; position -= 3) {
        digits.insert(static_cast<size_t>(position), 1, ',');
    }
    return digits;
}

void print_title(const std::string& title) { fmt::print("\n{}\n", paint(Colour::kBold, title)); }

void print_ranks(const Summary& summary) {
    print_title(
        summary.has_backward
            ? "What dispatch delivered, rank by rank (a row is a token for one expert; a rank gets it only once)"
            : "What dispatch carried, rank by rank (a row is a token sent to one expert; combine returns it)");
    fmt::print("  {:>4} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9}   {}\n", "rank", "tokens", "rows out", "rows in",
               "own rows", "MB out", "MB in", "load");
    uint64_t most_rows = 1;
    for (const RankTotals& rank : summary.ranks) {
        most_rows = std::max(most_rows, rank.rows_in);
    }
    for (size_t r = 0; r < summary.ranks.size(); ++r) {
        const RankTotals& rank = summary.ranks[r];
        const auto megabytes = [&](uint64_t rows) { return static_cast<double>(rows * summary.row_bytes) / kMegabyte; };
        fmt::print("  {:>4} {:>8} {:>9} {:>9} {:>9} {:>9.2f} {:>9.2f}   {}\n", r, grouped(rank.tokens),
                   grouped(rank.rows_out), grouped(rank.rows_in), grouped(rank.own_rows), megabytes(rank.rows_out),
                   megabytes(rank.rows_in),
                   tools::bar(static_cast<double>(rank.rows_in) / static_cast<double>(most_rows), 28));
    }
}

void print_heat_map(const Summary& summary) {
    const size_t num_ranks = summary.ranks.size();
    print_title("Who sent how much to whom (rows; from the rank at the left to the rank above)");
    const uint64_t most = std::max<uint64_t>(1, *std::max_element(summary.traffic.begin(), summary.traffic.end()));
    const int fitting = static_cast<int>(90 / num_ranks);
    const int width = std::clamp(fitting, 1, 8);
    const bool has_numbers = static_cast<int>(grouped(most).size()) + 2 <= width;
    std::string head(7, ' ');
    for (size_t to = 0; to < num_ranks; ++to) {
        head += width >= 3 ? fmt::format("{:>{}} ", to, width - 1) : std::string(static_cast<size_t>(width), ' ');
    }
    fmt::print("{}\n", head);
    for (size_t from = 0; from < num_ranks; ++from) {
        std::string line = fmt::format("  {:>4} ", from);
        for (size_t to = 0; to < num_ranks; ++to) {
            const uint64_t rows = summary.traffic[from * num_ranks + to];
            line += tools::heat_cell(static_cast<double>(rows) / static_cast<double>(most),
                                     has_numbers ? grouped(rows) : "", width);
        }
        fmt::print("{}\n", line);
    }
}

void print_nodes(const Options& options, const Summary& summary) {
    print_title(options.is_high_throughput()
                    ? "What stayed inside the nodes and what crossed (one row per node, both ways)"
                    : "What stayed inside the nodes and what crossed (dispatch sends one row per rank, combine one "
                      "per choice)");
    fmt::print("  {:>4} {:>8} {:>12} {:>10} {:>13} {:>11} {:>9} {:>9}\n", "node", "ranks", "rows inside", "MB inside",
               "rows crossed", "MB crossed", "puts", "signals");
    const int ranks = options.num_ranks / options.num_nodes;
    for (size_t i = 0; i < summary.nodes.size(); ++i) {
        const NodeTotals& node = summary.nodes[i];
        const int first = static_cast<int>(i) * ranks;
        fmt::print("  {:>4} {:>8} {:>12} {:>10.2f} {:>13} {:>11.2f} {:>9} {:>9}\n", i,
                   fmt::format("{}..{}", first, first + ranks - 1), grouped(node.rows_inside),
                   static_cast<double>(node.bytes_inside) / kMegabyte, grouped(node.rows_crossed),
                   static_cast<double>(node.bytes_crossed) / kMegabyte, grouped(node.puts), grouped(node.signals));
    }
}

void print_busiest(const Options& options, const Summary& summary) {
    const uint64_t rows = summary.expert_rows[static_cast<size_t>(summary.busiest_expert)];
    const uint64_t all = std::accumulate(summary.expert_rows.begin(), summary.expert_rows.end(), uint64_t{0});
    const double average = static_cast<double>(all) / options.layer.num_experts;
    const int rank = summary.busiest_expert / (options.layer.num_experts / options.num_ranks);
    print_title("The busiest expert");
    fmt::print("  expert {} on rank {} computed {} of {} rows, {:.1f} times the average\n  its words:",
               summary.busiest_expert, rank, grouped(rows), grouped(all), static_cast<double>(rows) / average);
    size_t column = 12;
    for (const auto& [word, count] : summary.busiest_words) {
        const std::string item = fmt::format("  {} {}", word, grouped(count));
        column += item.size();
        if (column > 98) {
            break;
        }
        fmt::print("{}", item);
    }
    fmt::print("\n");
}

void print_step_heading(const char* label) {
    fmt::print("  {:>8} {:>10} {:>10} {:>10} {:>10} {:>10}\n", label, kStageNames[0], kStageNames[1], kStageNames[2],
               kStageNames[3], "sum");
}

void print_step(const std::string& label, const double* seconds) {
    fmt::print("  {:>8}", label);
    for (int stage = 0; stage < kNumForwardStages; ++stage) {
        fmt::print(" {:>10.3f}", seconds[stage] * 1e3);
    }
    fmt::print(" {:>10.3f}\n", std::accumulate(seconds, seconds + kNumForwardStages, 0.0) * 1e3);
}

// Of high throughput.
void print_passes(const Options& options, const Summary& summary) {
    print_title(options.backend == Backend::kSimulation
                    ? "Time, ms (all ranks take turns on one thread: a stage includes the others' work)"
                    : "Time, ms (the slowest rank's; dispatch and combine include waiting for late ranks)");
    print_step_heading("pass");
    const double* seconds = summary.step_times[0].seconds;
    print_step("forward", seconds);
    const double* backward = seconds + static_cast<int>(Stage::kBackwardDispatch);
    fmt::print("  {:>8} {:>10} {:>10.3f} {:>10.3f} {:>10.3f} {:>10.3f}\n", "backward", "-", backward[0] * 1e3,
               backward[1] * 1e3, backward[2] * 1e3, (backward[0] + backward[1] + backward[2]) * 1e3);
}

void print_times(const Options& options, const Summary& summary) {
    constexpr size_t kMaxLines = 12;
    print_title(
        options.backend == Backend::kSimulation
            ? "Time of each step, ms (all ranks take turns on one thread: a stage includes the others' work)"
            : "Time of each step, ms (the slowest rank's; dispatch and combine include waiting for late ranks)");
    print_step_heading("step");
    for (size_t step = 0; step < std::min(summary.step_times.size(), kMaxLines); ++step) {
        print_step(std::to_string(step + 1), summary.step_times[step].seconds);
    }
    if (summary.step_times.size() > kMaxLines) {
        fmt::print("  {:>8}\n", "...");
    }
    double medians[kNumForwardStages];
    for (int stage = 0; stage < kNumForwardStages; ++stage) {
        std::vector<double> samples;
        for (const StageTimes& times : summary.step_times) {
            samples.push_back(times.seconds[stage]);
        }
        medians[stage] = tools::spread_of(samples).median;
    }
    print_step("median", medians);
}

void print_comparison(const char* name, const Comparison& comparison) {
    fmt::print("  {:26} {:>12} {:>12} {:>14.3e} {:>14.3e} {:>11.1f} %\n", name, grouped(comparison.num_values),
               grouped(comparison.num_nonzero), comparison.largest_error, comparison.bound_of_largest,
               comparison.largest_part * 100);
}

// Of high throughput.
void print_gradient_check(const Options& options, const Summary& summary) {
    print_title("Compared with the same layer computed densely, without communication, forward and backward");
    fmt::print("  {:26} {:>12} {:>12} {:>14} {:>14} {:>13}\n", "", "values", "not zero", "largest error",
               "allowed there", "most of bound");
    print_comparison("outputs", summary.outputs);
    print_comparison("gradients of tokens", summary.token_gradients);
    print_comparison("gradients of their weights", summary.weight_gradients);
    fmt::print(
        "  bound of the first two: a row's, a rank's sum's{} and the result's rounding to bf16, and the sum's in\n"
        "  fp32, for each value by itself; the weights' gradients must be equal\n",
        options.num_nodes > 1 ? ", a node's" : "");
    fmt::print("  rows that arrived at every expert: {}; reference computed in {:.2f} s\n",
               summary.counts_agree ? "exactly those that were routed to it" : "NOT those that were routed to it",
               summary.reference_s);
}

void print_check(const Summary& summary) {
    print_title("Compared with the same layer computed densely, without communication");
    const Comparison& outputs = summary.outputs;
    fmt::print("  {} values, {} of them not zero; reference computed in {:.2f} s\n", grouped(outputs.num_values),
               grouped(outputs.num_nonzero), summary.reference_s);
    fmt::print("  largest error {:.3e}, where {:.3e} is allowed; nearest to its bound: {:.1f} % of it\n",
               outputs.largest_error, outputs.bound_of_largest, outputs.largest_part * 100);
    fmt::print("  bound: one rounding to bf16 plus the sum's K roundings in fp32, for each value by itself\n");
    fmt::print("  rows that arrived at every expert, in every step: {}\n",
               summary.counts_agree ? "exactly those that were routed to it" : "NOT those that were routed to it");
}

}  // namespace

void print_heading(const Options& options, const Text& text, size_t num_tokens, int num_steps) {
    const LayerShape& layer = options.layer;
    std::string backend = backend_name(options.backend);
    if (options.num_nodes > 1) {
        backend += fmt::format(" as {} nodes", options.num_nodes);
    }
    if (options.backend == Backend::kSimulation) {
        backend += fmt::format(", seed {}", options.schedule_seed);
    }
    fmt::print("{}\n", paint(Colour::kBold, fmt::format("Crossdock: one Mixture-of-Experts layer over {} ranks ({})",
                                                        options.num_ranks, backend)));
    fmt::print("  text   {}: {} of its {} tokens\n", text.name, grouped(num_tokens), grouped(text.tokens.size()));
    fmt::print("  layer  hidden {}, {} SwiGLU experts of width {} ({} per rank), top-{}, bf16, seed {}\n", layer.hidden,
               layer.num_experts, layer.intermediate, layer.num_experts / options.num_ranks, layer.topk, layer.seed);
    if (options.is_high_throughput()) {
        fmt::print("  step   one of up to {} tokens per rank; high throughput, expert-major, forward and backward\n",
                   grouped(static_cast<uint64_t>(options.tokens_per_rank)));
    } else {
        fmt::print("  steps  {} of up to {} tokens per rank; low latency, expert-major\n", num_steps,
                   options.tokens_per_rank);
    }
    std::fflush(stdout);
}

void print_report(const Options& options, const Summary& summary) {
    if (summary.failures.empty()) {
        print_ranks(summary);
        print_heat_map(summary);
        if (!summary.nodes.empty()) {
            print_nodes(options, summary);
        }
        print_busiest(options, summary);
        if (summary.has_backward) {
            print_passes(options, summary);
            print_gradient_check(options, summary);
        } else {
            print_times(options, summary);
            print_check(summary);
        }
    }
    for (const std::string& failure : summary.failures) {
        fmt::print("  {}\n", failure);
    }
    fmt::print("\n");
    if (summary.passed()) {
        fmt::print("{}  {} tokens through {} experts on {} ranks in {:.1f} s, every value within its bound\n",
                   paint(Colour::kGreen, "PASS"), grouped(summary.num_tokens), options.layer.num_experts,
                   options.num_ranks, summary.total_s);
    } else if (!summary.failures.empty()) {
        fmt::print("{}  {} rank{} did not finish\n", paint(Colour::kRed, "FAIL"), summary.failures.size(),
                   summary.failures.size() == 1 ? "" : "s");
    } else {
        fmt::print("{}  {} of {} values are outside their bounds, row counts {}\n", paint(Colour::kRed, "FAIL"),
                   grouped(summary.outputs.num_above_bound + summary.token_gradients.num_above_bound +
                           summary.weight_gradients.num_above_bound),
                   grouped(summary.outputs.num_values + summary.token_gradients.num_values +
                           summary.weight_gradients.num_values),
                   summary.counts_agree ? "agree" : "differ");
    }
}

}  // namespace crossdock::demo
