// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "demo/report.h"

namespace crossdock::demo {

using Json = nlohmann::ordered_json;

namespace {

Json to_json(const Comparison& comparison) {
    return {{"values", comparison.num_values},
            {"nonzero", comparison.num_nonzero},
            {"above_bound", comparison.num_above_bound},
            {"largest_error", comparison.largest_error},
            {"bound_of_largest", comparison.bound_of_largest},
            {"largest_part_of_bound", comparison.largest_part}};
}

}  // namespace

void write_json(const std::string& path, const Options& options, const Text& text, const Summary& summary) {
    const LayerShape& layer = options.layer;
    Json json;
    json["passed"] = summary.passed();
    json["failures"] = summary.failures;
    json["mode"] = options.is_high_throughput() ? "ht" : "ll";
    json["backend"] = backend_name(options.backend);
    if (options.backend == Backend::kSimulation) {
        json["schedule_seed"] = options.schedule_seed;
    }
    json["ranks"] = options.num_ranks;
    json["text"] = {{"name", text.name}, {"bytes", text.num_bytes}, {"tokens", text.tokens.size()}};
    json["layer"] = {{"hidden", layer.hidden},
                     {"intermediate", layer.intermediate},
                     {"experts", layer.num_experts},
                     {"topk", layer.topk},
                     {"seed", layer.seed}};
    json["tokens"] = summary.num_tokens;
    json["words"] = summary.num_words;
    json["row_bytes"] = summary.row_bytes;
    json["total_s"] = summary.total_s;
    json["reference_s"] = summary.reference_s;
    for (const RankTotals& rank : summary.ranks) {
        json["per_rank"].push_back({{"tokens", rank.tokens},
                                    {"rows_out", rank.rows_out},
                                    {"rows_in", rank.rows_in},
                                    {"own_rows", rank.own_rows},
                                    {"dispatch_bytes_out", rank.rows_out * summary.row_bytes},
                                    {"dispatch_bytes_in", rank.rows_in * summary.row_bytes}});
    }
    json["nodes"] = options.num_nodes;
    for (const NodeTotals& node : summary.nodes) {
        json["per_node"].push_back({{"rows_inside", node.rows_inside},
                                    {"bytes_inside", node.bytes_inside},
                                    {"rows_crossed", node.rows_crossed},
                                    {"bytes_crossed", node.bytes_crossed},
                                    {"puts", node.puts},
                                    {"signals", node.signals}});
    }
    const size_t num_ranks = summary.ranks.size();
    for (size_t from = 0; from < num_ranks; ++from) {
        const auto first = summary.traffic.begin() + static_cast<ptrdiff_t>(from * num_ranks);
        json["rows_from_to"].push_back(std::vector<uint64_t>(first, first + static_cast<ptrdiff_t>(num_ranks)));
    }
    json["expert_rows"] = summary.expert_rows;
    json["busiest_expert"]["expert"] = summary.busiest_expert;
    for (const auto& [word, count] : summary.busiest_words) {
        json["busiest_expert"]["words"].push_back({{"word", word}, {"rows", count}});
    }
    for (const StageTimes& times : summary.step_times) {
        json["steps"].push_back({{"route_s", times.seconds[static_cast<int>(Stage::kRoute)]},
                                 {"dispatch_s", times.seconds[static_cast<int>(Stage::kDispatch)]},
                                 {"experts_s", times.seconds[static_cast<int>(Stage::kExperts)]},
                                 {"combine_s", times.seconds[static_cast<int>(Stage::kCombine)]}});
        if (summary.has_backward) {
            Json& step = json["steps"].back();
            step["backward_dispatch_s"] = times.seconds[static_cast<int>(Stage::kBackwardDispatch)];
            step["backward_experts_s"] = times.seconds[static_cast<int>(Stage::kBackwardExperts)];
            step["backward_combine_s"] = times.seconds[static_cast<int>(Stage::kBackwardCombine)];
        }
    }
    json["check"] = to_json(summary.outputs);
    json["check"]["row_counts_agree"] = summary.counts_agree;
    if (summary.has_backward) {
        json["check"]["token_gradients"] = to_json(summary.token_gradients);
        json["check"]["weight_gradients"] = to_json(summary.weight_gradients);
    }
    std::ofstream file(path);
    // Words of the text may be cut or badly encoded UTF-8; such bytes are replaced.
    file << json.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
    if (!file) {
        throw std::runtime_error(fmt::format("--json: {} cannot be written", path));
    }
}

}  // namespace crossdock::demo
