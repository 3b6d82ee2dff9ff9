// SPDX-License-Identifier: Apache-2.0
#include "bench/options.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench/routing.h"
#include "tools/common/cli.h"
#include "tools/common/device.h"

namespace crossdock::bench {
namespace {

using tools::integer_range;
using tools::one_of;

// The words of the command line, as they stand in the options.
struct Words {
    std::string mode = "ll";
    std::string backend;
    std::string layout;
    std::string recipe = "none";
    std::string combine_recipe = "none";
    std::string dtype = "bf16";
    std::string sums;
    std::optional<int> graph_operations;
};

constexpr int kMaxLowLatencyTokens = 8192;

// The words of the command line for the rows of a table that fit.
template <typename Row, size_t kNum, typename Fits>
std::vector<std::string> words_of(const Row (&table)[kNum], Fits fits) {
    std::vector<std::string> words;
    for (const Row& row : table) {
        if (fits(row)) words.emplace_back(row.option);
    }
    return words;
}
constexpr auto kOfAMode = [](const auto& row) { return row.in_ll || row.in_ht; };
constexpr auto kOfHt = [](const auto& row) { return row.in_ht; };

// "ll has em, rm"
template <typename Row, size_t kNum>
std::string offer_of(const Row (&table)[kNum], const Options& options) {
    const auto is_there = [&](const Row& row) { return row.is_in(options.algorithm()); };
    return fmt::format("{} has {}", mode_name(options.mode), fmt::join(words_of(table, is_there), ", "));
}

// What each word means, for --help.
template <typename Row, size_t kNum, typename Fits>
std::string meanings_of(const Row (&table)[kNum], Fits fits) {
    std::string text;
    for (const Row& row : table) {
        if (fits(row)) text += fmt::format(" {}: {}", row.option, row.meaning);
    }
    return text;
}

// The row of a word that was checked.
template <typename Row, size_t kNum>
const Row& row_named(const Row (&table)[kNum], const std::string& word) {
    return *std::ranges::find_if(table, [&](const Row& row) { return word == row.option; });
}

// The first message about options that do not go with the mode; empty if all do.
std::string find_misplaced(const Options& options, const Words& words) {
    const auto is_there = [&](const auto& row) { return row.is_in(options.algorithm()); };
    const char* other_mode = mode_name(options.is_high_throughput() ? Mode::kLowLatency : Mode::kHighThroughput);
    if (!words.layout.empty() && !is_there(row_named(kLayouts, words.layout))) {
        return fmt::format("--layout: {} goes with --mode {} only; {}", words.layout, other_mode,
                           offer_of(kLayouts, options));
    }
    if (!is_there(recipe_of(options.recipe))) {
        return fmt::format("--recipe: {} goes with --mode {} only; {}", words.recipe, other_mode,
                           offer_of(kDispatchRecipes, options));
    }
    if (!options.is_high_throughput()) {
        if (options.max_tokens() > kMaxLowLatencyTokens) {
            return fmt::format("--tokens: {} is more than {}, --mode ll's most", options.max_tokens(),
                               kMaxLowLatencyTokens);
        }
        return options.backward         ? "--backward: goes with --mode ht only"
               : options.eager          ? "--eager: goes with --mode ht only"
               : options.elastic        ? "--elastic: goes with --mode ht only"
               : options.budget > 0     ? "--budget: goes with --mode ht only"
               : options.alignment != 1 ? "--alignment: goes with --mode ht only"
                                        : "";
    }
    if (options.int32_ids) {
        return "--int32-ids: goes with --mode ll only";
    }
    if (options.masks) {
        return "--masks: goes with --mode ll only";
    }
    if (!options.sender_sums && (!options.is_expert_major() || options.elastic || options.quantises_combine())) {
        return fmt::format("--sums: exact {}", !options.is_expert_major() ? "goes with --layout em only in --mode ht"
                                               : options.elastic          ? "does not go with --elastic"
                                                                          : "does not go with --combine-recipe");
    }
    if (options.overlap || options.split) {
        return fmt::format("--{}: goes with --mode ll only; ht's operations have no halves",
                           options.overlap ? "overlap" : "split");
    }
    if (!options.is_expert_major() && options.alignment != 1) {
        return "--alignment: goes with --layout em only; flat has no zones";
    }
    if ((options.alignment & (options.alignment - 1)) != 0) {
        return fmt::format("--alignment: {} is not a power of two", options.alignment);
    }
    if (options.elastic && (options.backward || options.windows || options.quantises_combine())) {
        return fmt::format("--{}: does not go with --elastic", options.backward  ? "backward"
                                                               : options.windows ? "windows"
                                                                                 : "combine-recipe");
    }
    if (options.eager && options.budget > 0) {
        return "--budget: does not go with --eager, where there is none";
    }
    if (options.budget > 0 && options.budget < options.max_tokens()) {
        return fmt::format("--budget: {} is less than --tokens, {}", options.budget, options.max_tokens());
    }
    return "";
}

// The first message about options that do not go together; empty if they do.
std::string find_contradiction(const Options& options, const Words& words, bool ranks_given) {
    if (const std::string misplaced = find_misplaced(options, words); !misplaced.empty()) {
        return misplaced;
    }
    if (options.num_experts % options.num_ranks != 0) {
        return fmt::format("--experts: {} is not a multiple of the number of ranks, {}", options.num_experts,
                           options.num_ranks);
    }
    const CombineRecipe& combine = recipe_of(options.combine_recipe);
    if (!combine.is_in(options.algorithm()) || (combine.needs_expert_major && !options.is_expert_major())) {
        return fmt::format("--combine-recipe: {} goes with --mode ht{} only", combine.option,
                           combine.needs_expert_major ? " --layout em" : "");
    }
    if (combine.quantises() && options.dtype != ncclBfloat16) {
        return fmt::format("--dtype: '{}' does not go with --combine-recipe {}, which needs bf16", words.dtype,
                           combine.option);
    }
    if (options.hidden % static_cast<int>(combine.row_multiple) != 0) {
        return fmt::format("--hidden: {} is not a multiple of {}, as --combine-recipe {} needs", options.hidden,
                           combine.row_multiple, combine.option);
    }
    if (options.topk > options.num_experts) {
        return fmt::format("--topk: {} is not from 1 to the number of experts, {}", options.topk, options.num_experts);
    }
    const size_t row_bytes = static_cast<size_t>(options.hidden) * find_data_type(options.dtype)->bytes;
    if (row_bytes % 16 != 0) {
        return fmt::format("--hidden: a row of {} elements has {} bytes, which is not a multiple of 16", options.hidden,
                           row_bytes);
    }
    if (options.recipe != NCCL_EP_DISP_QUANT_NONE && options.hidden % 512 != 0) {
        return fmt::format("--hidden: {} is not a multiple of 512, as --recipe {} needs", options.hidden, words.recipe);
    }
    if (options.recipe != NCCL_EP_DISP_QUANT_NONE && options.dtype != ncclBfloat16) {
        return fmt::format("--dtype: '{}' does not go with --recipe {}, which combines in bf16", words.dtype,
                           words.recipe);
    }
    if (options.sender_sums && !options.is_high_throughput() && !options.is_expert_major()) {
        return "--sums: sender is a choice of the layout em; rm always sums at the sender";
    }
    // Asking CUDA would spoil it for processes that are forked from this one; those ask for themselves.
    if (options.backend == Backend::kCuda && tools::num_cuda_devices() == 0) {
        return "--backend: cuda is not possible: " + tools::why_no_cuda();
    }
    if (words.graph_operations && !is_cuda(options.backend)) {
        return "--graph-operations: goes with --backend cuda only; CPU ranks have no graphs";
    }
    if (!options.rendezvous_path.empty() && !options.launched) {
        return "--rendezvous: goes with a launcher only (mpirun, srun, torchrun); without one, ranks meet by "
               "themselves";
    }
    if ((options.kernels || options.overlap) && !is_cuda(options.backend)) {
        return fmt::format("--{}: goes with --backend cuda only", options.kernels ? "kernels" : "overlap");
    }
    if (options.launched && !is_cuda(options.backend) && !has_processes(options.backend)) {
        return fmt::format("--backend: {} is not possible where a launcher has started each rank as a process",
                           backend_name(options.backend));
    }
    if (options.launched && ranks_given && options.num_ranks != options.launched->num_ranks) {
        return fmt::format("--ranks: {} is not the {} that {} has started", options.num_ranks,
                           options.launched->num_ranks, options.launched->launcher);
    }
    return check_routing(options.routing);
}

}  // namespace

std::vector<Options> Options::settings() const {
    std::vector<Options> all;
    for (int each_hidden : hidden_sizes) {
        for (int each_count : expert_counts) {
            for (int each_topk : topks) {
                for (int each_sms : sms) {
                    all.push_back(*this);
                    all.back().hidden = each_hidden;
                    all.back().num_experts = each_count;
                    all.back().topk = each_topk;
                    all.back().max_num_sms = each_sms;
                }
            }
        }
    }
    return all;
}

std::vector<Operation> Options::operations() const {
    std::vector<Operation> operations = {Operation::kDispatch, Operation::kCombine, Operation::kPair};
    if (is_high_throughput()) {
        operations.insert(operations.begin(), Operation::kUpdate);
    }
    return operations;
}

int Options::max_tokens() const { return *std::max_element(tokens.begin(), tokens.end()); }

std::optional<int> parse_options(int argc, char** argv, Options& options) {
    CLI::App app(
        "Times dispatch, combine, one after the other (pair) and, in high throughput, the update, beside a lower bound "
        "measured in the same run.",
        "ep_bench");
    Words words;
    const std::vector<Backend> backends = backends_where([](const BackendOption& each) { return each.in_bench; });
    app.add_option("--mode", words.mode, "ll: low latency, ht: high throughput (ll)")->check(one_of({"ll", "ht"}));
    app.add_option(
           "--backend", words.backend,
           "where the ranks run (threads; processes under mpirun, srun, torchrun). " + backend_meanings(backends))
        ->check(one_of(backend_names(backends)));
    CLI::Option* ranks = app.add_option("--ranks", options.num_ranks, "ranks (8)")->check(integer_range(1, 512));
    app.add_option("--rendezvous", options.rendezvous_path, "under a launcher: the file where the ranks meet")
        ->type_name("FILE");
    const auto add_list = [&app](const char* name, std::vector<int>& values, int64_t low, int64_t high,
                                 const char* description) {
        app.add_option(name, values, description)->delimiter(',')->check(integer_range(low, high));
    };
    add_list("--tokens", options.tokens, 1, 1048576, "tokens per rank, a list (ll: 1,8,64,128; ht: 4096)");
    add_list("--hidden", options.hidden_sizes, 4, 262144, "elements of a token, a list (7168)");
    add_list("--experts", options.expert_counts, 1, 1048576, "experts, multiples of the ranks, a list (256)");
    add_list("--topk", options.topks, 1, 64, "experts per token, a list (8)");
    add_list("--sms", options.sms, 0, 1024, "most SMs per operation, a list; 0: the library chooses (0)");
    app.add_option("--layout", words.layout, "em: expert-major, rm: rank-major, flat (ll: em; ht: flat)")
        ->check(one_of(words_of(kLayouts, kOfAMode)));
    app.add_option("--recipe", words.recipe, "dispatch (none)." + meanings_of(kDispatchRecipes, kOfAMode))
        ->check(one_of(words_of(kDispatchRecipes, kOfAMode)));
    app.add_option("--combine-recipe", words.combine_recipe, "ht (none)." + meanings_of(kCombineRecipes, kOfHt))
        ->check(one_of(words_of(kCombineRecipes, kOfHt)));
    app.add_option("--dtype", words.dtype, "type of the rows (bf16)")
        ->check(one_of(words_of(kDataTypes, [](const DataType& type) { return *type.option != '\0'; })));
    app.add_option("--routing", options.routing, "uniform, zipf:A, or FILE.npy of expert ids (uniform)");
    app.add_option("--seed", options.seed, "draws tokens and routing (1)")->check(integer_range(0, INT64_MAX));
    app.add_option("--skew", options.skew_us, "delay of the last rank's start after the first one's, us (0)")
        ->check(tools::number_range(0, 1e6))
        ->type_name("US");
    app.add_flag("--windows", options.windows, "outputs and expert rows are in windows, in HT inputs, too (zero copy)");
    app.add_option("--sums", words.sums,
                   "em: combine sums at the source rank (exact; ht: in an invariant group) or first at the sender "
                   "(sender); default: ll exact, ht sender")
        ->check(one_of({"sender", "exact"}));
    app.add_flag("--backward", options.backward, "ht: the backward pass's dispatch and combine");
    app.add_option(
           "--budget", options.budget,
           "ht: rows or padded slots that a rank can receive (flat: ranks x tokens; em: what the routing needs)")
        ->check(integer_range(1, INT32_MAX));
    app.add_flag("--eager", options.eager, "ht: no budget, receive tensors of the rows routed to the rank");
    app.add_flag("--elastic", options.elastic,
                 "ht: elastic dispatches and combines: packed rows with ids, weights and origins");
    app.add_option("--alignment", options.alignment, "ht, em: alignment of an expert's rows, a power of two (1)")
        ->check(integer_range(1, 1 << 20));
    CLI::Option* iterations =
        app.add_option("--iterations", options.num_iterations, "timed iterations (ll: 100; ht: 30)")
            ->check(integer_range(1, 1000000));
    CLI::Option* warmups =
        app.add_option("--warmup", options.num_warmups, "untimed iterations before them (ll: 10; ht: 5)")
            ->check(integer_range(0, 1000000));
    app.add_option("--graph-operations", words.graph_operations, "--backend cuda: most operations per graph (20)")
        ->check(integer_range(1, 1000));
    app.add_flag("--validate", options.validate, "compare with plain loops before timing");
    app.add_flag("--kernels", options.kernels, "--backend cuda: also time the kernels, by CUPTI");
    app.add_flag("--overlap", options.overlap, "--backend cuda: also time a matrix product between the halves");
    app.add_flag("--int32-ids", options.int32_ids, "ll: topk_idx is int32 instead of int64");
    app.add_flag("--masks", options.masks, "ll: a group with enable_mask, which continues without lost ranks");
    app.add_flag("--split", options.split, "ll: run each operation as a send half and ncclEpComplete");
    app.add_option("--handles", options.num_handles, "also time this many passes, each with its own handle (0)")
        ->check(integer_range(0, 10000000));
    app.add_option("--library", options.library_path, "time this library too, in the same run")->type_name("PATH");
    app.add_option("--json", options.json_path, "also write the results as JSON to FILE")
        ->check(tools::writable_file());
    if (const auto status = tools::parse_command_line(app, argc, argv)) {
        return status;
    }

    for (int i = 0; i < argc; ++i) {
        options.command_line += (i > 0 ? " " : "") + std::string(argv[i]);
    }
    options.launched = launched_rank();
    if (options.launched && !*ranks) {
        options.num_ranks = options.launched->num_ranks;
    }
    options.backend =
        backend_named(words.backend, backends).value_or(options.launched ? Backend::kProcesses : Backend::kThreads);
    options.mode = words.mode == "ht" ? Mode::kHighThroughput : Mode::kLowLatency;
    options.layout = !words.layout.empty()          ? row_named(kLayouts, words.layout).value
                     : options.is_high_throughput() ? NCCL_EP_LAYOUT_FLAT
                                                    : NCCL_EP_LAYOUT_EXPERT_MAJOR;
    if (options.tokens.empty()) {
        options.tokens = options.is_high_throughput() ? std::vector<int>{4096} : std::vector<int>{1, 8, 64, 128};
    }
    if (options.is_high_throughput()) {
        options.num_iterations = *iterations ? options.num_iterations : 30;
        options.num_warmups = *warmups ? options.num_warmups : 5;
    }
    options.graph_operations = words.graph_operations.value_or(options.graph_operations);
    options.recipe = row_named(kDispatchRecipes, words.recipe).value;
    options.combine_recipe = row_named(kCombineRecipes, words.combine_recipe).value;
    options.dtype = row_named(kDataTypes, words.dtype).value;
    options.sender_sums = words.sums == "sender" || (words.sums.empty() && options.is_high_throughput());
    for (const Options& setting : options.settings()) {
        const std::string contradiction = find_contradiction(setting, words, static_cast<bool>(*ranks));
        if (!contradiction.empty()) {
            return tools::refuse(app, contradiction);
        }
    }
    return std::nullopt;
}

}  // namespace crossdock::bench
