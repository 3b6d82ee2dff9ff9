// SPDX-License-Identifier: Apache-2.0
// One rank's run: its share of the text through the layer, step by step, then the comparison with the reference.
#pragma once

#include "demo/board.h"
#include "demo/options.h"
#include "demo/text.h"
#include "tools/common/ranks.h"

namespace crossdock::demo {

// Throws std::exception where the rank cannot go on. Tokens past num_tokens are not part of the run.
void run_rank(const tools::RankContext& context, const Options& options, const Text& text, size_t num_tokens,
              Board& board);

}  // namespace crossdock::demo
