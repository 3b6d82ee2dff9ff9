// SPDX-License-Identifier: Apache-2.0
// Low latency: the text step by step, a few tokens at a time, forward only.
#include <vector>

#include "crossdock/group.hpp"
#include "demo/rank.h"
#include "demo/rank_parts.h"
#include "tools/common/device.h"

namespace crossdock::demo {
namespace {

using tools::DeviceArray;

ncclEpGroupConfig_t group_config(const Options& options) {
    ncclEpGroupConfig_t config = low_latency_config(static_cast<unsigned>(options.layer.num_experts),
                                                    static_cast<unsigned>(options.tokens_per_rank),
                                                    static_cast<unsigned>(options.layer.hidden) * 2);
    config.timeout_ns = kTimeoutNs;
    return config;
}

// The layer on one rank: device tensors of the largest step, and the operations on them.
class LlLayer {
  public:
    LlLayer(const tools::RankContext& context, const Options& options, tools::Device& device, ncclComm_t comm)
        : shape_(options.layer),
          device_(device),
          num_local_(static_cast<size_t>(shape_.num_experts / context.num_ranks)),
          slots_(static_cast<size_t>(context.num_ranks) * static_cast<size_t>(options.tokens_per_rank)),
          experts_(make_experts(options, context.rank, device)),
          router_(shape_),
          tokens_(device, max_tokens(options) * hidden()),
          results_(device, max_tokens(options) * hidden()),
          topk_idx_(device, max_tokens(options) * topk()),
          weights_(device, max_tokens(options) * topk()),
          received_(device, num_local_ * slots_ * hidden()),
          counters_(device, num_local_),
          group_(comm, group_config(options), group_options(options)),
          handle_(group_, NCCL_EP_LAYOUT_EXPERT_MAJOR, shape_.topk) {}

    // Runs one step over these tokens; the arguments that follow are what it leaves behind.
    void run_step(const Text& text, Share share, RankTokens& tokens, int32_t* routing, int32_t* rows_received,
                  StageTimes& times) {
        const auto seconds = [&times](Stage stage) -> double& { return times.seconds[static_cast<int>(stage)]; };
        Stopwatch stopwatch;
        route(text, share, tokens, routing);
        Tensor rows(tokens_.data(), ncclBfloat16, {share.count, hidden()});
        Tensor topk_idx(topk_idx_.data(), ncclInt32, {share.count, topk()});
        Tensor weights(weights_.data(), ncclFloat32, {share.count, topk()});
        Tensor received(received_.data(), ncclBfloat16, {num_local_, slots_, hidden()});
        Tensor counters(counters_.data(), ncclInt32, {num_local_});
        Tensor results(results_.data(), ncclBfloat16, {share.count, hidden()});
        handle_.update(topk_idx, device_.stream());
        seconds(Stage::kRoute) = stopwatch.lap();

        handle_.dispatch(rows, received, counters, device_.stream());
        device_.synchronize();
        seconds(Stage::kDispatch) = stopwatch.lap();

        experts_->run(received_.data(), counters_.data(), slots_);
        device_.synchronize();
        seconds(Stage::kExperts) = stopwatch.lap();

        handle_.combine(received, weights, results, device_.stream());
        device_.synchronize();
        seconds(Stage::kCombine) = stopwatch.lap();

        const std::vector<int32_t> counted = counters_.download();
        std::copy(counted.begin(), counted.end(), rows_received);
        const std::vector<uint16_t> outputs = results_.download(0, share.count * hidden());
        tokens.outputs.insert(tokens.outputs.end(), outputs.begin(), outputs.end());
    }

    size_t num_local() const { return num_local_; }

    crossdockTraffic_t traffic() const { return traffic_of(group_.get()); }

  private:
    static size_t max_tokens(const Options& options) { return static_cast<size_t>(options.tokens_per_rank); }

    size_t hidden() const { return static_cast<size_t>(shape_.hidden); }
    size_t topk() const { return static_cast<size_t>(shape_.topk); }

    // Embeds and routes the share, appends it to `tokens`, and brings it to the device.
    void route(const Text& text, Share share, RankTokens& tokens, int32_t* routing) {
        const size_t first = tokens.rows.size() / hidden();
        route_share(shape_, router_, text, share, tokens);
        device_.to_device(tokens_.data(), tokens.rows.data() + first * hidden(),
                          share.count * hidden() * sizeof(uint16_t));
        device_.to_device(topk_idx_.data(), tokens.experts.data() + first * topk(),
                          share.count * topk() * sizeof(int32_t));
        device_.to_device(weights_.data(), tokens.weights.data() + first * topk(),
                          share.count * topk() * sizeof(float));
        std::copy(tokens.experts.begin() + static_cast<ptrdiff_t>(first * topk()), tokens.experts.end(), routing);
    }

    LayerShape shape_;
    tools::Device& device_;
    size_t num_local_;
    size_t slots_;
    std::unique_ptr<ExpertRunner> experts_;
    Router router_;
    DeviceArray<uint16_t> tokens_;
    DeviceArray<uint16_t> results_;
    DeviceArray<int32_t> topk_idx_;
    DeviceArray<float> weights_;
    DeviceArray<uint16_t> received_;
    DeviceArray<int32_t> counters_;
    Group group_;
    Handle handle_;
};

}  // namespace

void run_low_latency(const tools::RankContext& context, const Options& options, const Text& text, size_t num_tokens,
                     tools::Device& device, ncclComm_t comm, Board& board, RankTokens& tokens) {
    LlLayer layer(context, options, device, comm);
    for (int step = 0; step < board.num_steps; ++step) {
        const Share share = share_of(options, num_tokens, step, context.rank);
        int32_t* routing = board.routing.data() + share.first * static_cast<size_t>(options.layer.topk);
        int32_t* rows_received = board.rows_received.data() +
                                 static_cast<size_t>(step) * static_cast<size_t>(options.layer.num_experts) +
                                 static_cast<size_t>(context.rank) * layer.num_local();
        layer.run_step(text, share, tokens, routing, rows_received, board.stage_times(step, context.rank));
        board.reports[static_cast<size_t>(context.rank)].steps_done.store(step + 1);
    }
    board.reports[static_cast<size_t>(context.rank)].traffic = layer.traffic();
}

}  // namespace crossdock::demo
