// SPDX-License-Identifier: Apache-2.0
#include "conformance/ht/sequence.h"

#include <algorithm>

#include "conformance/support/scoped_arena.h"

namespace crossdock::testing {
namespace {

constexpr int kSmsOfSharedGpu = 96;

class Actor {
  public:
    virtual ~Actor() = default;
    virtual void act(Random& random) = 0;
    // Looks at what has happened and has not been looked at.
    virtual void finish() = 0;
};

class HtActor : public Actor {
  public:
    HtActor(RankContext& context, ncclEpGroup_t group, const HtProblem& problem, const HtOptions& options)
        : context_(context), group_(group), problem_(problem), options_(options) {
        remake();
    }

    void act(Random& random) override {
        finish();
        const int choice = random.below(100);
        const auto direction = random.pick({NCCL_EP_FWD_PASS, NCCL_EP_BWD_PASS});
        // The same again, with nothing between.
        const int times = random.pick({1, 1, 1, 2, 3});
        if (choice < 5) {
            RANK_OK(context_, ncclEpComplete(layer_->handle(), nullptr, layer_->stream()));
        } else if (choice < 10) {
            context_.synchronize(layer_->stream());  // its memory is given to others
            layer_.reset();
            problem_ = rerouted(problem_, random.bits());
            remake();
        } else if (choice < 35) {
            for (int i = 0; i < times; ++i) {
                problem_ = rerouted(problem_, random.bits());
                layer_->route(problem_);
            }
            layer_->check_update();
        } else if (choice < 70) {
            layer_->change_data(random.bits());
            layer_->prepare_dispatch();
            for (int i = 0; i < times; ++i) RANK_OK(context_, layer_->dispatch(direction));
            unchecked_ = Unchecked::kDispatch;
        } else {
            layer_->change_data(random.bits());
            layer_->prepare_combine();
            for (int i = 0; i < times; ++i) RANK_OK(context_, layer_->combine(direction));
            unchecked_ = Unchecked::kCombine;
        }
        direction_ = direction;
    }

    void finish() override {
        if (unchecked_ == Unchecked::kDispatch) layer_->check_dispatch(direction_);
        if (unchecked_ == Unchecked::kCombine) layer_->check_combine(direction_);
        unchecked_ = Unchecked::kNothing;
    }

  private:
    enum class Unchecked { kNothing, kDispatch, kCombine };

    void remake() {
        // A window has room for one set of buffers of each actor.
        if (options_.arena != nullptr && made_) options_.arena = nullptr;
        if (options_.arena == nullptr)
            options_.output_windows = options_.combine_windows = options_.other_windows = false;
        made_ = true;
        layer_ = std::make_unique<HtLayer>(context_, group_, problem_, options_);
    }

    RankContext& context_;
    ncclEpGroup_t group_;
    HtProblem problem_;
    HtOptions options_;
    bool made_ = false;
    std::unique_ptr<HtLayer> layer_;
    Unchecked unchecked_ = Unchecked::kNothing;
    ncclEpPassDir_t direction_ = NCCL_EP_FWD_PASS;
};

class LlActor : public Actor {
  public:
    LlActor(RankContext& context, ncclEpGroup_t group, const Problem& problem)
        : context_(context), layer_(context, group, problem) {}

    void act(Random& random) override {
        finish();
        layer_.route(rerouted(layer_.problem(), random.bits()));
        if (random.chance(50)) return layer_.round_trip();
        layer_.prepare_dispatch();
        RANK_OK(context_, layer_.dispatch(true));
        is_pending_ = true;
    }

    void finish() override {
        if (!is_pending_) return;
        is_pending_ = false;
        RANK_OK(context_, layer_.complete());
        layer_.check_dispatch();
        layer_.prepare_combine();
        RANK_OK(context_, layer_.combine());
        layer_.check_combine();
    }

  private:
    RankContext& context_;
    Layer layer_;
    bool is_pending_ = false;
};

class HtSequence {
  public:
    HtSequence(RankContext& context, const HtSequenceShape& shape, uint64_t seed)
        : context_(context), shape_(shape), random_(seed) {
        if (shape.windows) arena_.emplace(context, kHtWindowBytes);
        for (int group = 0; group < shape.num_groups; ++group) make_group();
        if (shape.low_latency_layers > 0) make_low_latency_group();
    }

    void run() {
        for (int step = 0; step < shape_.num_steps; ++step) {
            actors_[random_.below(static_cast<int>(actors_.size()))]->act(random_);
            // What comes next relies on this.
            if (!context_.failures().empty()) throw StopProgram("a check failed");
        }
        for (const auto& actor : actors_) actor->finish();
        if (shape_.windows) context_.barrier();
    }

  private:
    // Handles of different layouts, types, K and alignment share experts, numbers of tokens and the budget.
    void make_group() {
        HtLimits limits = shape_.limits;
        limits.num_ranks = context_.num_ranks();
        limits.local_experts = random_.pick({1, 2, 3, 8});
        limits.mxfp8 = is_one_domain(limits.num_ranks);
        const auto room = random_.pick({Room::kEnough, Room::kDropping, Room::kEager});
        std::vector<HtProblem> problems;
        for (int i = 0; i < shape_.layers_per_group; ++i) problems.push_back(random_ht_problem(random_.bits(), limits));
        int max_tokens = 0;
        for (const HtProblem& problem : problems) max_tokens = std::max(max_tokens, problem.max_tokens);
        size_t most_rows = static_cast<size_t>(max_tokens);
        for (HtProblem& problem : problems) {
            problem.max_tokens = max_tokens;
            most_rows = std::max(most_rows, problem.most_rows());
        }
        size_t budget = most_rows;
        if (room == Room::kDropping)
            budget = static_cast<size_t>(random_.between(max_tokens, static_cast<int>(most_rows)));
        for (HtProblem& problem : problems) {
            problem.drops = room == Room::kDropping;
            problem.budget = room == Room::kEager ? 0 : budget;
            problem.group_topk = room == Room::kEager ? problem.num_experts : 0;
            problem = rerouted(problem, random_.bits());
        }
        ncclEpGroupConfig_t config = group_config_for(context_, problems);
        config.max_num_sms = sms_of_a_group();
        groups_.push_back(std::make_unique<Group>(context_, context_.comm(), config));
        for (const HtProblem& problem : problems) {
            const HtOptions options = random_ht_options(random_.bits(), arena_ ? arena_->get() : nullptr);
            actors_.push_back(std::make_unique<HtActor>(context_, groups_.back()->get(), problem, options));
        }
    }

    void make_low_latency_group() {
        std::vector<Problem> problems;
        for (int i = 0; i < shape_.low_latency_layers; ++i) {
            Problem problem = random_problem(random_.bits(), {.num_ranks = context_.num_ranks(),
                                                              .local_experts = 2,
                                                              .most_row_bytes = 256,
                                                              .most_receive_bytes = 64u << 10,
                                                              .nvfp4 = false,
                                                              .scales = false});
            problem.max_tokens = 5;
            problems.push_back(rerouted(problem, random_.bits()));
        }
        ncclEpGroupConfig_t config = group_config_for(context_, problems);
        config.max_num_sms = sms_of_a_group();
        groups_.push_back(std::make_unique<Group>(context_, context_.comm(), config));
        for (const Problem& problem : problems)
            actors_.push_back(std::make_unique<LlActor>(context_, groups_.back()->get(), problem));
    }

    // Kernels of different groups run at once: on a GPU that ranks share, all of them must fit.
    unsigned sms_of_a_group() const {
        const int num_groups = shape_.num_groups + (shape_.low_latency_layers > 0 ? 1 : 0);
        if (num_groups == 1 || !context_.is_gpu()) return NCCL_EP_AUTO;
        return static_cast<unsigned>(std::max(1, kSmsOfSharedGpu / (num_groups * context_.num_ranks())));
    }

    RankContext& context_;
    HtSequenceShape shape_;
    Random random_;
    std::optional<ScopedArena> arena_;
    std::vector<std::unique_ptr<Group>> groups_;
    std::vector<std::unique_ptr<Actor>> actors_;
};

}  // namespace

void run_ht_sequence(RankContext& context, const HtSequenceShape& shape, uint64_t seed) {
    HtSequence(context, shape, seed).run();
}

}  // namespace crossdock::testing
