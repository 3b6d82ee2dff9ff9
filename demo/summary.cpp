// SPDX-License-Identifier: Apache-2.0
#include "demo/summary.h"

#include <algorithm>
#include <map>
#include <set>

namespace crossdock::demo {
namespace {

void add_routing(const Options& options, const Text& text, size_t num_tokens, Board& board, Summary& summary) {
    const auto num_ranks = static_cast<size_t>(options.num_ranks);
    const auto num_experts = static_cast<size_t>(options.layer.num_experts);
    const auto topk = static_cast<size_t>(options.layer.topk);
    const size_t num_local = num_experts / num_ranks;
    summary.counts_agree = true;
    for (int step = 0; step < board.num_steps; ++step) {
        std::vector<int32_t> routed(num_experts);
        for (size_t from = 0; from < num_ranks; ++from) {
            const Share share = share_of(options, num_tokens, step, static_cast<int>(from));
            summary.ranks[from].tokens += share.count;
            for (size_t choice = share.first * topk; choice < (share.first + share.count) * topk; ++choice) {
                const auto expert = static_cast<size_t>(board.routing[choice]);
                ++routed[expert];
                ++summary.traffic[from * num_ranks + expert / num_local];
            }
        }
        for (size_t expert = 0; expert < num_experts; ++expert) {
            const int32_t received = board.rows_received[static_cast<size_t>(step) * num_experts + expert];
            summary.counts_agree = summary.counts_agree && received == routed[expert];
            summary.ranks[expert / num_local].rows_in += static_cast<uint64_t>(received);
            summary.expert_rows[expert] += static_cast<uint64_t>(routed[expert]);
        }
    }
    for (size_t from = 0; from < num_ranks; ++from) {
        for (size_t to = 0; to < num_ranks; ++to) {
            summary.ranks[from].rows_out += summary.traffic[from * num_ranks + to];
        }
        summary.ranks[from].own_rows = summary.traffic[from * num_ranks + from];
    }
    summary.num_words =
        std::set<uint32_t>(text.tokens.begin(), text.tokens.begin() + static_cast<ptrdiff_t>(num_tokens)).size();
}

void find_busiest(const Options& options, const Text& text, size_t num_tokens, const Board& board, Summary& summary) {
    const auto busiest = std::max_element(summary.expert_rows.begin(), summary.expert_rows.end());
    summary.busiest_expert = static_cast<int>(busiest - summary.expert_rows.begin());
    std::map<uint32_t, uint64_t> counts;
    const auto topk = static_cast<size_t>(options.layer.topk);
    for (size_t choice = 0; choice < num_tokens * topk; ++choice) {
        if (board.routing[choice] == summary.busiest_expert) {
            ++counts[text.tokens[choice / topk]];
        }
    }
    for (const auto& [word, count] : counts) {
        summary.busiest_words.emplace_back(text.words[word], count);
    }
    std::stable_sort(summary.busiest_words.begin(), summary.busiest_words.end(),
                     [](const auto& left, const auto& right) { return left.second > right.second; });
    summary.busiest_words.resize(std::min<size_t>(summary.busiest_words.size(), 8));
}

void add_reports(Board& board, Summary& summary) {
    for (size_t rank = 0; rank < board.reports.size(); ++rank) {
        const RankReport& report = board.reports[rank];
        summary.outputs.add(report.outputs);
        summary.token_gradients.add(report.token_gradients);
        summary.weight_gradients.add(report.weight_gradients);
        summary.reference_s = std::max(summary.reference_s, report.reference_s);
    }
    for (int step = 0; step < board.num_steps; ++step) {
        StageTimes slowest{};
        for (size_t rank = 0; rank < board.reports.size(); ++rank) {
            for (int stage = 0; stage < kNumStages; ++stage) {
                const double seconds = board.stage_times(step, static_cast<int>(rank)).seconds[stage];
                slowest.seconds[stage] = std::max(slowest.seconds[stage], seconds);
            }
        }
        summary.step_times.push_back(slowest);
    }
}

void add_nodes(const Options& options, const Board& board, Summary& summary) {
    if (options.num_nodes == 1) {
        return;
    }
    summary.nodes.resize(static_cast<size_t>(options.num_nodes));
    const auto ranks_of_node = static_cast<size_t>(options.num_ranks / options.num_nodes);
    for (size_t rank = 0; rank < board.reports.size(); ++rank) {
        const crossdockTraffic_t& sent = board.reports[rank].traffic;
        NodeTotals& node = summary.nodes[rank / ranks_of_node];
        node.rows_inside += sent.rows_inside;
        node.bytes_inside += sent.bytes_inside;
        node.rows_crossed += sent.rows_crossed;
        node.bytes_crossed += sent.bytes_crossed;
        node.puts += sent.puts;
        node.signals += sent.signals;
    }
}

}  // namespace

Summary summarise(const Options& options, const Text& text, size_t num_tokens, Board& board) {
    const auto num_ranks = static_cast<size_t>(options.num_ranks);
    Summary summary;
    summary.num_tokens = num_tokens;
    summary.row_bytes = static_cast<uint64_t>(options.layer.hidden) * 2;
    summary.has_backward = options.is_high_throughput();
    summary.ranks.resize(num_ranks);
    summary.traffic.resize(num_ranks * num_ranks);
    summary.expert_rows.resize(static_cast<size_t>(options.layer.num_experts));
    add_routing(options, text, num_tokens, board, summary);
    find_busiest(options, text, num_tokens, board, summary);
    add_reports(board, summary);
    add_nodes(options, board, summary);
    return summary;
}

}  // namespace crossdock::demo
