// SPDX-License-Identifier: Apache-2.0
// What the benchmark was asked to measure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/environment.h"
#include "nccl_ep.h"
#include "src/core/data_types.h"
#include "src/core/layouts.h"
#include "src/core/recipes.h"
#include "tools/common/backend.h"

namespace crossdock::bench {

enum class Mode { kLowLatency, kHighThroughput };
enum class Operation { kUpdate, kDispatch, kCombine, kPair };
inline constexpr int kNumOperations = 4;

struct Options {
    Mode mode = Mode::kLowLatency;
    Backend backend = Backend::kThreads;
    std::optional<LaunchedRank> launched;  // this process is one rank of a launcher's job
    std::string rendezvous_path;

    int num_ranks = 8;
    // Every combination of hidden size, experts, top-k and SMs is a setting, in which all of `tokens` are measured.
    std::vector<int> tokens;  // default: of the mode
    std::vector<int> hidden_sizes = {7168};
    std::vector<int> expert_counts = {256};
    std::vector<int> topks = {8};
    std::vector<int> sms = {NCCL_EP_AUTO};
    // Of one setting.
    int hidden = 0;
    int num_experts = 0;
    int topk = 0;
    int max_num_sms = NCCL_EP_AUTO;
    ncclEpLayout_t layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
    ncclEpDispQuant_t recipe = NCCL_EP_DISP_QUANT_NONE;
    ncclDataType_t dtype = ncclBfloat16;
    std::string routing = "uniform";
    uint64_t seed = 1;
    double skew_us = 0;
    bool windows = false;
    bool sender_sums = false;

    // HT
    ncclEpCombQuant_t combine_recipe = NCCL_EP_COMB_QUANT_NONE;
    bool backward = false;
    bool eager = false;
    bool elastic = false;  // crossdockElasticDispatch and crossdockElasticCombine
    int64_t budget = 0;    // rows (flat) or slots (expert-major) that a rank can receive; 0: what the setting needs
    int alignment = 1;

    int num_warmups = 10;
    int num_iterations = 100;
    int graph_operations = 20;  // in one graph, at most
    bool validate = false;
    bool kernels = false;
    bool overlap = false;
    bool split = false;  // send_only, then ncclEpComplete
    bool int32_ids = false;
    bool masks = false;
    int num_handles = 0;
    std::string library_path;  // another library to time beside ours
    std::string json_path;
    std::string command_line;

    // One copy of the options per setting.
    std::vector<Options> settings() const;
    std::vector<Operation> operations() const;  // that are timed
    int max_tokens() const;
    int num_local() const { return num_experts / num_ranks; }
    bool is_high_throughput() const { return mode == Mode::kHighThroughput; }
    bool quantises() const { return recipe_of(recipe).computes_scales(); }
    bool quantises_combine() const { return recipe_of(combine_recipe).quantises(); }
    ncclEpAlgorithm_t algorithm() const {
        return is_high_throughput() ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
    }
    bool is_expert_major() const { return layout == NCCL_EP_LAYOUT_EXPERT_MAJOR; }
};

// Fills options. Holds the exit status where the program must end: after --help, or after a message about an argument.
std::optional<int> parse_options(int argc, char** argv, Options& options);

const char* mode_name(Mode mode);
const char* operation_name(Operation operation);

}  // namespace crossdock::bench
