// SPDX-License-Identifier: Apache-2.0
// What the demo was asked to do.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tools/common/backend.h"

namespace crossdock::demo {

enum class Mode { kLowLatency, kHighThroughput };

// Sizes of the layer; the seed draws all its weights.
struct LayerShape {
    int hidden = 512;        // elements of a token's row, a multiple of 8
    int intermediate = 256;  // width inside an expert
    int num_experts = 64;
    int topk = 4;
    uint64_t seed = 1;
};

struct Options {
    std::string text_path;  // empty: the texts that are found here
    std::string json_path;  // empty: none
    Mode mode = Mode::kLowLatency;
    Backend backend = Backend::kProcesses;
    uint64_t schedule_seed = 0;  // simulation
    int num_ranks = 8;
    int num_nodes = 1;        // LSA teams that the ranks play
    int tokens_per_rank = 0;  // in one step; 0 (high throughput): all of the text
    int num_steps = 6;        // 0: to the end of the text. High throughput: 1
    LayerShape layer;

    bool is_high_throughput() const { return mode == Mode::kHighThroughput; }
};

// Fills options. Holds the exit status where the program must end: after --help, or after a message about an argument.
std::optional<int> parse_options(int argc, char** argv, Options& options);

}  // namespace crossdock::demo
