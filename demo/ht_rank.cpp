// SPDX-License-Identifier: Apache-2.0
// High throughput: the whole text at once, forward and backward. The experts' rows lie in zones; the host learns
// nothing of the routing before it all is done.
#include <algorithm>
#include <vector>

#include "crossdock/group.hpp"
#include "demo/rank.h"
#include "demo/rank_parts.h"
#include "tools/common/device.h"

namespace crossdock::demo {
namespace {

using tools::DeviceArray;

// Rows that the rank which receives most receives: what ranks agree on as their budget.
size_t most_received(const tools::RankContext& context, const LayerShape& shape, const std::vector<int32_t>& experts) {
    const auto num_experts = static_cast<size_t>(shape.num_experts);
    const auto num_ranks = static_cast<size_t>(context.num_ranks);
    std::vector<uint64_t> own(num_ranks);
    for (int32_t expert : experts) {
        ++own[static_cast<size_t>(expert) / (num_experts / num_ranks)];
    }
    std::vector<uint64_t> all(num_ranks * num_ranks);
    check(crossdockCommAllGather(context.host, own.data(), all.data(), own.size() * sizeof(uint64_t)));
    uint64_t most = 0;
    for (size_t to = 0; to < num_ranks; ++to) {
        uint64_t sum = 0;
        for (size_t from = 0; from < num_ranks; ++from) {
            sum += all[from * num_ranks + to];
        }
        most = std::max(most, sum);
    }
    return most;
}

// The layer on one rank: device tensors and the operations on them.
class HtLayer {
  public:
    HtLayer(const tools::RankContext& context, const Options& options, tools::Device& device, ncclComm_t comm,
            const RankTokens& tokens)
        : shape_(options.layer),
          device_(device),
          num_tokens_(tokens.experts.size() / topk()),
          num_local_(static_cast<size_t>(shape_.num_experts / context.num_ranks)),
          num_rows_(
              std::max(most_received(context, shape_, tokens.experts), static_cast<size_t>(options.tokens_per_rank))),
          experts_(make_experts(options, context.rank, device)),
          tokens_(device, tokens.rows),
          gradients_(device, tokens.gradients),
          topk_idx_(device, tokens.experts),
          weights_(device, tokens.weights),
          received_(device, num_rows_ * hidden()),
          received_weights_(device, num_rows_),
          expert_rows_(device, num_rows_ * hidden()),
          received_gradients_(device, num_rows_ * hidden()),
          weight_gradients_(device, num_rows_),
          counters_(device, num_local_),
          offsets_(device, num_local_),
          results_(device, num_tokens_ * hidden()),
          result_weights_(device, num_tokens_ * topk()),
          group_(comm, group_config(options, num_rows_), group_options(options)),
          handle_(group_, NCCL_EP_LAYOUT_EXPERT_MAJOR, shape_.topk) {}

    void update() {
        Tensor topk_idx(topk_idx_.data(), ncclInt32, {num_tokens_, topk()});
        Tensor counters(counters_.data(), ncclInt32, {num_local_});
        Tensor offsets(offsets_.data(), ncclInt32, {num_local_});
        auto layout_info = make_struct<ncclEpLayoutInfo_t>();
        layout_info.expert_counters = counters.get();
        layout_info.expert_offsets = offsets.get();
        handle_.update(topk_idx, layout_info, device_.stream());
        device_.synchronize();
    }

    void dispatch() {
        Tensor tokens(tokens_.data(), ncclBfloat16, {num_tokens_, hidden()});
        Tensor weights(weights_.data(), ncclFloat32, {num_tokens_, topk()});
        Tensor received(received_.data(), ncclBfloat16, {num_rows_, hidden()});
        Tensor received_weights(received_weights_.data(), ncclFloat32, {num_rows_});
        auto inputs = make_struct<ncclEpDispatchInputs_t>();
        auto outputs = make_struct<ncclEpDispatchOutputs_t>();
        inputs.tokens = tokens.get();
        inputs.topk_weights = weights.get();
        outputs.tokens = received.get();
        outputs.topk_weights = received_weights.get();
        handle_.dispatch(inputs, outputs, nullptr, nullptr, device_.stream());
        device_.synchronize();
    }

    void run_experts() {
        experts_->run_zones(zones(), expert_rows_.data());
        device_.synchronize();
    }

    void combine() {
        Tensor rows(expert_rows_.data(), ncclBfloat16, {num_rows_, hidden()});
        Tensor results(results_.data(), ncclBfloat16, {num_tokens_, hidden()});
        auto inputs = make_struct<ncclEpCombineInputs_t>();
        auto outputs = make_struct<ncclEpCombineOutputs_t>();
        inputs.tokens = rows.get();
        outputs.tokens = results.get();
        handle_.combine(inputs, outputs, nullptr, device_.stream());
        device_.synchronize();
    }

    // The gradients of the outputs go where the tokens went.
    void dispatch_backward() {
        Tensor gradients(gradients_.data(), ncclBfloat16, {num_tokens_, hidden()});
        Tensor received(received_gradients_.data(), ncclBfloat16, {num_rows_, hidden()});
        auto inputs = make_struct<ncclEpDispatchInputs_t>();
        auto outputs = make_struct<ncclEpDispatchOutputs_t>();
        auto config = make_struct<ncclEpDispatchConfig_t>();
        inputs.tokens = gradients.get();
        outputs.tokens = received.get();
        config.pass_direction = NCCL_EP_BWD_PASS;
        handle_.dispatch(inputs, outputs, nullptr, &config, device_.stream());
        device_.synchronize();
    }

    void run_experts_backward() {
        experts_->run_zones_backward(zones(), received_gradients_.data(), expert_rows_.data(),
                                     weight_gradients_.data());
        device_.synchronize();
    }

    void combine_backward() {
        Tensor rows(expert_rows_.data(), ncclBfloat16, {num_rows_, hidden()});
        Tensor weight_gradients(weight_gradients_.data(), ncclFloat32, {num_rows_});
        Tensor results(results_.data(), ncclBfloat16, {num_tokens_, hidden()});
        Tensor result_weights(result_weights_.data(), ncclFloat32, {num_tokens_, topk()});
        auto inputs = make_struct<ncclEpCombineInputs_t>();
        auto outputs = make_struct<ncclEpCombineOutputs_t>();
        auto config = make_struct<ncclEpCombineConfig_t>();
        inputs.tokens = rows.get();
        inputs.topk_weights = weight_gradients.get();
        outputs.tokens = results.get();
        outputs.topk_weights = result_weights.get();
        config.pass_direction = NCCL_EP_BWD_PASS;
        handle_.combine(inputs, outputs, &config, device_.stream());
        device_.synchronize();
    }

    // Of the last combine, forward or backward.
    std::vector<uint16_t> results() { return results_.download(); }
    std::vector<float> result_weights() { return result_weights_.download(); }
    std::vector<int32_t> counters() { return counters_.download(); }
    crossdockTraffic_t traffic() const { return traffic_of(group_.get()); }

  private:
    static ncclEpGroupConfig_t group_config(const Options& options, size_t num_rows) {
        ncclEpGroupConfig_t config = high_throughput_config(
            static_cast<unsigned>(options.layer.num_experts), static_cast<unsigned>(options.tokens_per_rank),
            static_cast<unsigned>(num_rows), static_cast<unsigned>(options.layer.hidden) * 2);
        config.timeout_ns = kTimeoutNs;
        return config;
    }

    size_t hidden() const { return static_cast<size_t>(shape_.hidden); }
    size_t topk() const { return static_cast<size_t>(shape_.topk); }
    ZoneRows zones() { return {received_.data(), received_weights_.data(), offsets_.data(), counters_.data()}; }

    LayerShape shape_;
    tools::Device& device_;
    size_t num_tokens_;
    size_t num_local_;
    size_t num_rows_;  // the budget: rows of all receive tensors
    std::unique_ptr<ExpertRunner> experts_;
    DeviceArray<uint16_t> tokens_;
    DeviceArray<uint16_t> gradients_;
    DeviceArray<int32_t> topk_idx_;
    DeviceArray<float> weights_;
    DeviceArray<uint16_t> received_;
    DeviceArray<float> received_weights_;
    DeviceArray<uint16_t> expert_rows_;
    DeviceArray<uint16_t> received_gradients_;
    DeviceArray<float> weight_gradients_;
    DeviceArray<int32_t> counters_;
    DeviceArray<int32_t> offsets_;
    DeviceArray<uint16_t> results_;
    DeviceArray<float> result_weights_;
    Group group_;
    Handle handle_;
};

}  // namespace

void run_high_throughput(const tools::RankContext& context, const Options& options, const Text& text, size_t num_tokens,
                         tools::Device& device, ncclComm_t comm, Board& board, RankTokens& tokens) {
    const auto hidden = static_cast<size_t>(options.layer.hidden);
    const Share share = share_of(options, num_tokens, 0, context.rank);
    StageTimes& times = board.stage_times(0, context.rank);
    Stopwatch stopwatch;
    const auto timed = [&](Stage stage, const auto& work) {
        stopwatch.lap();
        work();
        times.seconds[static_cast<int>(stage)] += stopwatch.lap();
    };
    timed(Stage::kRoute, [&] { route_share(options.layer, Router(options.layer), text, share, tokens); });
    tokens.gradients.resize(tokens.rows.size());
    for (size_t t = 0; t < share.count; ++t) {
        draw_gradient(options.layer, share.first + t, &tokens.gradients[t * hidden]);
    }
    std::copy(tokens.experts.begin(), tokens.experts.end(),
              board.routing.data() + share.first * static_cast<size_t>(options.layer.topk));

    HtLayer layer(context, options, device, comm, tokens);
    timed(Stage::kRoute, [&] { layer.update(); });
    timed(Stage::kDispatch, [&] { layer.dispatch(); });
    timed(Stage::kExperts, [&] { layer.run_experts(); });
    timed(Stage::kCombine, [&] { layer.combine(); });
    tokens.outputs = layer.results();
    timed(Stage::kBackwardDispatch, [&] { layer.dispatch_backward(); });
    timed(Stage::kBackwardExperts, [&] { layer.run_experts_backward(); });
    timed(Stage::kBackwardCombine, [&] { layer.combine_backward(); });
    tokens.token_gradients = layer.results();
    tokens.weight_gradients = layer.result_weights();

    const std::vector<int32_t> counted = layer.counters();
    std::copy(counted.begin(), counted.end(),
              board.rows_received.data() + static_cast<size_t>(context.rank) * counted.size());
    board.reports[static_cast<size_t>(context.rank)].traffic = layer.traffic();
    board.reports[static_cast<size_t>(context.rank)].steps_done.store(1);
}

}  // namespace crossdock::demo
