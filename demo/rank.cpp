// SPDX-License-Identifier: Apache-2.0
#include "demo/rank.h"

#include <chrono>
#include <vector>

#include "crossdock/group.hpp"
#include "demo/expert_runner.h"
#include "demo/layer.h"
#include "demo/reference.h"
#include "tools/common/device.h"

namespace crossdock::demo {
namespace {

using tools::DeviceArray;

// A peer that does not answer for so long is given up.
constexpr uint64_t kTimeoutNs = 60'000'000'000;

class Stopwatch {
  public:
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
    LayerCommunicator(const tools::RankContext& context, World world)
        : is_nccl_(world == World::kCuda), comm_(is_nccl_ ? tools::make_nccl_communicator(context) : context.host) {}
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

ncclEpGroupConfig_t group_config(const Options& options) {
    ncclEpGroupConfig_t config = low_latency_config(static_cast<unsigned>(options.layer.num_experts),
                                                    static_cast<unsigned>(options.tokens_per_rank),
                                                    static_cast<unsigned>(options.layer.hidden) * 2);
    config.timeout_ns = kTimeoutNs;
    return config;
}

// The layer on one rank: device tensors of the largest step, and the operations on them.
class LayerRank {
  public:
    LayerRank(const tools::RankContext& context, const Options& options, tools::Device& device, ncclComm_t comm)
        : shape_(options.layer),
          device_(device),
          num_local_(static_cast<size_t>(shape_.num_experts / context.num_ranks)),
          slots_(static_cast<size_t>(context.num_ranks) * static_cast<size_t>(options.tokens_per_rank)),
          experts_(make_experts(options, context.rank, static_cast<int>(num_local_), device)),
          router_(shape_),
          tokens_(device, max_tokens(options) * hidden()),
          results_(device, max_tokens(options) * hidden()),
          topk_idx_(device, max_tokens(options) * topk()),
          weights_(device, max_tokens(options) * topk()),
          received_(device, num_local_ * slots_ * hidden()),
          counters_(device, num_local_),
          group_(comm, group_config(options)),
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

  private:
    static size_t max_tokens(const Options& options) { return static_cast<size_t>(options.tokens_per_rank); }

    static std::unique_ptr<ExpertRunner> make_experts(const Options& options, int rank, int num_local,
                                                      tools::Device& device) {
        return options.world == World::kCuda ? make_cuda_experts(options.layer, rank * num_local, num_local, device)
                                             : make_cpu_experts(options.layer, rank * num_local, num_local);
    }

    size_t hidden() const { return static_cast<size_t>(shape_.hidden); }
    size_t topk() const { return static_cast<size_t>(shape_.topk); }

    // Embeds and routes the share, appends it to `tokens`, and brings it to the device.
    void route(const Text& text, Share share, RankTokens& tokens, int32_t* routing) {
        std::vector<uint16_t> rows(share.count * hidden());
        std::vector<int32_t> experts(share.count * topk());
        std::vector<float> weights(share.count * topk());
        for (size_t t = 0; t < share.count; ++t) {
            const size_t position = share.first + t;
            const int64_t previous = position > 0 ? static_cast<int64_t>(text.tokens[position - 1]) : -1;
            embed(shape_, text.tokens[position], previous, &rows[t * hidden()]);
            router_.route(&rows[t * hidden()], &experts[t * topk()], &weights[t * topk()]);
        }
        std::copy(experts.begin(), experts.end(), routing);
        tokens_.upload(rows);
        topk_idx_.upload(experts);
        weights_.upload(weights);
        tokens.rows.insert(tokens.rows.end(), rows.begin(), rows.end());
        tokens.experts.insert(tokens.experts.end(), experts.begin(), experts.end());
        tokens.weights.insert(tokens.weights.end(), weights.begin(), weights.end());
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

void run_rank(const tools::RankContext& context, const Options& options, const Text& text, size_t num_tokens,
              Board& board) {
    const bool on_gpu = options.world == World::kCuda;
    const auto device = on_gpu ? tools::make_cuda_device(context.rank) : tools::make_cpu_device();
    const LayerCommunicator comm(context, options.world);
    RankReport& report = board.reports[static_cast<size_t>(context.rank)];
    RankTokens tokens;
    {
        LayerRank layer(context, options, *device, comm.get());
        for (int step = 0; step < board.num_steps; ++step) {
            const Share share = share_of(options, num_tokens, step, context.rank);
            int32_t* routing = board.routing.data() + share.first * static_cast<size_t>(options.layer.topk);
            int32_t* rows_received = board.rows_received.data() +
                                     static_cast<size_t>(step) * static_cast<size_t>(options.layer.num_experts) +
                                     static_cast<size_t>(context.rank) * layer.num_local();
            layer.run_step(text, share, tokens, routing, rows_received, board.stage_times(step, context.rank));
            report.steps_done.store(step + 1);
        }
    }
    Stopwatch stopwatch;
    compare_with_reference(options.layer, tokens, report);
    report.reference_s = stopwatch.lap();
}

}  // namespace crossdock::demo
