// SPDX-License-Identifier: Apache-2.0
// What a rank of either mode is made of.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "crossdock.h"
#include "demo/board.h"
#include "demo/expert_runner.h"
#include "demo/layer.h"
#include "demo/reference.h"
#include "demo/text.h"
#include "tools/common/ranks.h"

namespace crossdock::demo {

// A peer that does not answer for this long is lost.
inline constexpr uint64_t kTimeoutNs = 60'000'000'000;

class Stopwatch {
  public:
    // Seconds since the last lap.
    double lap() {
        const auto now = std::chrono::steady_clock::now();
        const double seconds = std::chrono::duration<double>(now - last_).count();
        last_ = now;
        return seconds;
    }

  private:
    std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// The communicator that the group is made on: the host's, or NCCL's.
class LayerCommunicator {
  public:
    LayerCommunicator(const tools::RankContext& context, Backend backend)
        : is_nccl_(backend == Backend::kCuda),
          comm_(is_nccl_ ? tools::make_nccl_communicator(context) : context.host) {}
    ~LayerCommunicator() {
        if (is_nccl_) {
            tools::destroy_nccl_communicator(comm_);
        }
    }
    LayerCommunicator(const LayerCommunicator&) = delete;
    LayerCommunicator& operator=(const LayerCommunicator&) = delete;

    ncclComm_t get() const { return comm_; }

  private:
    bool is_nccl_;
    ncclComm_t comm_;
};

// The nodes that ranks play.
crossdockGroupOptions_t group_options(const Options& options);

// What this rank has sent so far.
crossdockTraffic_t traffic_of(ncclEpGroup_t group);

// This rank's experts, where its tensors lie.
std::unique_ptr<ExpertRunner> make_experts(const Options& options, int rank, tools::Device& device);

// Embeds and routes the share, and appends it to `tokens`.
void route_share(const LayerShape& shape, const Router& router, const Text& text, Share share, RankTokens& tokens);

}  // namespace crossdock::demo
