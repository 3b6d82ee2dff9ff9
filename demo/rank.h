// SPDX-License-Identifier: Apache-2.0
// One rank's run: its share of the text through the layer, then the comparison with the reference.
#pragma once

#include "demo/board.h"
#include "demo/options.h"
#include "demo/reference.h"
#include "demo/text.h"
#include "tools/common/device.h"
#include "tools/common/ranks.h"

namespace crossdock::demo {

// Throws std::exception where the rank cannot go on. Tokens past num_tokens are not part of the run.
void run_rank(const tools::RankContext& context, const Options& options, const Text& text, size_t num_tokens,
              Board& board);

// The part of it that communicates, of each mode: what goes into the layer and comes out of it is left in `tokens`.
void run_low_latency(const tools::RankContext& context, const Options& options, const Text& text, size_t num_tokens,
                     tools::Device& device, ncclComm_t comm, Board& board, RankTokens& tokens);
void run_high_throughput(const tools::RankContext& context, const Options& options, const Text& text, size_t num_tokens,
                         tools::Device& device, ncclComm_t comm, Board& board, RankTokens& tokens);

}  // namespace crossdock::demo
