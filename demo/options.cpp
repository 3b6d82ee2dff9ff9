// SPDX-License-Identifier: Apache-2.0
#include "demo/options.h"

#include <fmt/format.h>

#include "tools/common/cli.h"
#include "tools/common/device.h"

namespace crossdock::demo {

using tools::integer_range;

namespace {

constexpr int kMaxLowLatencyTokens = 512;

}  // namespace

std::optional<int> parse_options(int argc, char** argv, Options& options) {
    CLI::App app(
        "One Mixture-of-Experts layer on real text: route, dispatch, compute, combine, and compare with the same "
        "layer computed without any communication.",
        "crossdock_demo");
    std::string mode = "ll";
    std::string backend;
    const std::vector<Backend> backends = backends_where([](const BackendOption& each) { return each.in_demo; });
    int num_experts = 0;
    LayerShape& layer = options.layer;

    app.add_option(
           "--mode", mode,
           "ll: low latency, step by step; ht: high throughput, the whole text at once, forward and backward (ll)")
        ->check(tools::one_of({"ll", "ht"}));
    app.add_option("--text", options.text_path,
                   "text file (default: licence texts of this system, or this project's documents)");
    app.add_option("--ranks", options.num_ranks, "ranks (8)")->check(integer_range(1, 64));
    app.add_option("--nodes", options.num_nodes, "nodes to emulate, a divisor of the ranks (1)")
        ->check(integer_range(1, 64));
    app.add_option("--backend", backend, "how ranks run (processes). " + backend_meanings(backends))
        ->check(tools::one_of(backend_names(backends)));
    CLI::Option* schedule_option =
        app.add_option("--schedule-seed", options.schedule_seed, "simulation: decides who runs when (0)")
            ->check(integer_range(0, INT64_MAX));
    app.add_option("--json", options.json_path, "also write the report as JSON to FILE")->check(tools::writable_file());
    app.add_option("--tokens", options.tokens_per_rank,
                   "tokens per rank and step, at most (ll: 128; ht: the whole text)")
        ->check(integer_range(1, 1048576));
    CLI::Option* steps_option = app.add_option("--steps", options.num_steps, "ll: steps, 0: the whole text (6)")
                                    ->check(integer_range(0, 1000000));
    CLI::Option* hidden_option =
        app.add_option("--hidden", layer.hidden, "elements of a token, a multiple of 8 (ll: 512; ht: 256)")
            ->check(integer_range(8, 32768));
    CLI::Option* intermediate_option =
        app.add_option("--intermediate", layer.intermediate, "width inside an expert (ll: 256; ht: 64)")
            ->check(integer_range(1, 65536));
    app.add_option("--experts", num_experts, "experts, a multiple of the ranks (8 per rank)")
        ->check(integer_range(1, 65536));
    app.add_option("--topk", layer.topk, "experts per token (4)")->check(integer_range(1, 32));
    app.add_option("--seed", layer.seed, "draws the layer's weights (1)")->check(integer_range(0, INT64_MAX));
    if (const auto status = tools::parse_command_line(app, argc, argv)) {
        return status;
    }

    if (mode == "ht") {
        // Backward costs twice what forward does, and a whole text is long.
        options.mode = Mode::kHighThroughput;
        layer.hidden = *hidden_option ? layer.hidden : 256;
        layer.intermediate = *intermediate_option ? layer.intermediate : 64;
        if (*steps_option) {
            return tools::refuse(app, "--steps: goes with --mode ll only; ht takes the text in one step");
        }
        options.num_steps = 1;
    } else {
        options.tokens_per_rank = options.tokens_per_rank > 0 ? options.tokens_per_rank : 128;
        if (options.tokens_per_rank > kMaxLowLatencyTokens) {
            return tools::refuse(app, fmt::format("--tokens: {} is more than {}, --mode ll's most",
                                                  options.tokens_per_rank, kMaxLowLatencyTokens));
        }
    }
    if (options.num_ranks % options.num_nodes != 0) {
        return tools::refuse(
            app, fmt::format("--nodes: {} does not divide --ranks {} evenly", options.num_nodes, options.num_ranks));
    }
    layer.num_experts = num_experts > 0 ? num_experts : 8 * options.num_ranks;
    if (layer.num_experts % options.num_ranks != 0) {
        return tools::refuse(
            app, fmt::format("--experts: {} is not a multiple of --ranks {}", num_experts, options.num_ranks));
    }
    if (layer.topk > layer.num_experts) {
        return tools::refuse(
            app, fmt::format("--topk: {} is not from 1 to the number of experts, {}", layer.topk, layer.num_experts));
    }
    if (layer.hidden % 8 != 0) {
        return tools::refuse(app, fmt::format("--hidden: {} is not a multiple of 8 from 8 to 32768", layer.hidden));
    }
    options.backend = backend_named(backend, backends).value_or(Backend::kProcesses);
    if (*schedule_option && options.backend != Backend::kSimulation) {
        return tools::refuse(app, "--schedule-seed: goes with --backend simulation only");
    }
    if (options.backend == Backend::kCuda && tools::num_cuda_devices() == 0) {
        return tools::refuse(app, "--backend: cuda is not possible: " + tools::why_no_cuda());
    }
    return std::nullopt;
}

}  // namespace crossdock::demo
