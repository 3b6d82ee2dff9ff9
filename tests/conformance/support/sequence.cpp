// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/sequence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <list>

#include "conformance/support/scoped_arena.h"

namespace crossdock::testing {
namespace {

constexpr int kMostPendingSplits = 2;  // of a group
constexpr int kSmsOfSharedGpu = 96;

// What happened to a layer last, and has not been looked at.
enum class Unchecked { kNothing, kDispatch, kCombine };

// A handle, and what is done with it.
class Actor {
  public:
    // pending_in_group: low-latency splits of the group that are sent and not completed.
    Actor(RankContext& context, ncclEpGroup_t group, int& pending_in_group, const Problem& problem,
          const LayerOptions& options)
        : context_(context),
          group_(group),
          pending_in_group_(pending_in_group),
          problem_(problem),
          options_(options),
          layer_(std::make_unique<Layer>(context, group, problem, options)) {}

    void act(Random& random) { problem_.is_ht() ? act_in_ht(random) : act_in_ll(random); }

    // Completes what is pending and looks at what has not been looked at.
    void finish() {
        complete();
        check();
    }

  private:
    // Low latency splits operations; high throughput repeats them, and goes backward. What one may do at a time says
    // nothing of the other, so there are two functions.
    void act_in_ll(Random& random) {
        if (pending_ != Unchecked::kNothing) return complete();
        const bool split = random.chance(40) && pending_in_group_ < kMostPendingSplits;
        const int choice = random.below(100);
        // With nothing pending, complete is a success without work.
        if (choice < 10) return RANK_OK(context_, layer_->complete());
        check();
        if (choice < 25) {
            route(random);
            dispatched_ = false;
        } else if (choice < 32) {
            remake(random);
            dispatched_ = false;
        } else if (choice < 65 || !dispatched_) {
            layer_->prepare_dispatch();
            RANK_OK(context_, split ? layer_->send_dispatch() : layer_->dispatch());
            issued(Unchecked::kDispatch, split);
            dispatched_ = true;
        } else {
            layer_->prepare_combine();
            RANK_OK(context_, split ? layer_->send_combine() : layer_->combine());
            issued(Unchecked::kCombine, split);
        }
    }

    void act_in_ht(Random& random) {
        check();
        const int choice = random.below(100);
        direction_ = random.pick({NCCL_EP_FWD_PASS, NCCL_EP_BWD_PASS});
        // The same again, with nothing between.
        const int times = random.pick({1, 1, 1, 2, 3});
        if (choice < 5) {
            RANK_OK(context_, layer_->complete());
        } else if (choice < 10) {
            context_.synchronize(layer_->stream());  // its memory is given to others
            remake(random);
        } else if (choice < 35) {
            for (int i = 0; i < times; ++i) route(random);
            layer_->check_update();
        } else if (choice < 70) {
            layer_->change_data(random.bits());
            layer_->prepare_dispatch();
            for (int i = 0; i < times; ++i) RANK_OK(context_, layer_->dispatch(direction_));
            issued(Unchecked::kDispatch, false);
        } else {
            layer_->change_data(random.bits());
            layer_->prepare_combine();
            for (int i = 0; i < times; ++i) RANK_OK(context_, layer_->combine(direction_));
            issued(Unchecked::kCombine, false);
        }
    }

    void route(Random& random) {
        problem_ = rerouted(problem_, random.bits());
        layer_->route(problem_);
    }

    void remake(Random& random) {
        layer_.reset();
        options_.arena = nullptr;  // a window has room for one set of buffers of each actor
        problem_ = rerouted(problem_, random.bits());
        layer_ = std::make_unique<Layer>(context_, group_, problem_, options_);
    }

    void issued(Unchecked operation, bool split) {
        (split ? pending_ : unchecked_) = operation;
        pending_in_group_ += split ? 1 : 0;
    }

    void complete() {
        if (pending_ == Unchecked::kNothing) return;
        RANK_OK(context_, layer_->complete());
        unchecked_ = pending_;
        pending_ = Unchecked::kNothing;
        --pending_in_group_;
    }

    void check() {
        if (unchecked_ == Unchecked::kDispatch) layer_->check_dispatch(direction_);
        if (unchecked_ == Unchecked::kCombine) layer_->check_combine(direction_);
        unchecked_ = Unchecked::kNothing;
    }

    RankContext& context_;
    ncclEpGroup_t group_;
    int& pending_in_group_;
    Problem problem_;
    LayerOptions options_;
    std::unique_ptr<Layer> layer_;
    bool dispatched_ = false;                  // a low-latency combine may follow
    Unchecked pending_ = Unchecked::kNothing;  // sent, not completed
    Unchecked unchecked_ = Unchecked::kNothing;
    ncclEpPassDir_t direction_ = NCCL_EP_FWD_PASS;
};

class Sequence {
  public:
    Sequence(RankContext& context, const SequenceShape& shape, uint64_t seed)
        : context_(context), shape_(shape), random_(seed) {
        if (shape.windows) arena_.emplace(context, kHtWindowBytes);
        for (const ProblemLimits& limits : shape.groups) make_group(limits);
    }

    void run() {
        for (int step = 0; step < shape_.num_steps; ++step) {
            actors_[static_cast<size_t>(random_.below(static_cast<int>(actors_.size())))].act(random_);
            // What comes next relies on this.
            if (!context_.failures().empty()) throw StopProgram("a check failed");
        }
        for (Actor& actor : actors_) actor.finish();
        if (shape_.windows) context_.barrier();
    }

  private:
    // Of one group. Handles of different layouts, types, K and alignment share experts, numbers of tokens and the
    // budget.
    std::vector<Problem> random_problems(ProblemLimits limits) {
        const bool in_ht = limits.algorithm == kHighThroughput;
        limits.num_ranks = context_.num_ranks();
        if (in_ht) limits.quantised_combines = is_one_lsa_team(limits.num_ranks);
        const Room room = in_ht ? random_.pick({Room::kEnough, Room::kDropping, Room::kEager}) : Room::kAny;
        limits.local_experts = random_.pick({1, 2, 3, 8});
        std::vector<Problem> problems;
        int max_tokens = 0;
        for (int i = 0; i < shape_.layers_per_group; ++i) {
            problems.push_back(random_problem(random_.bits(), limits));
            max_tokens = std::max(max_tokens, problems.back().max_tokens);
        }
        for (Problem& problem : problems) problem.max_tokens = max_tokens;
        if (in_ht) share_budget(problems, room);
        const bool is_invariant = std::ranges::all_of(problems, can_be_invariant) && random_.chance(50);
        for (Problem& problem : problems) {
            // A group of a version 1 caller is another group's matter (compatibility_test.cpp).
            problem.asks_as_v1 = false;
            problem.invariant = is_invariant;
            problem = rerouted(problem, random_.bits());
        }
        return problems;
    }

    void share_budget(std::vector<Problem>& problems, Room room) {
        const int max_tokens = problems[0].max_tokens;
        size_t budget = static_cast<size_t>(max_tokens);
        for (const Problem& problem : problems) budget = std::max(budget, problem.most_rows());
        if (room == Room::kDropping)
            budget = static_cast<size_t>(random_.between(max_tokens, static_cast<int>(budget)));
        for (Problem& problem : problems) {
            problem.drops = room == Room::kDropping;
            problem.budget = room == Room::kEager ? 0 : budget;
            problem.group_topk = room == Room::kEager ? problem.num_experts : 0;
        }
    }

    void make_group(const ProblemLimits& limits) {
        const std::vector<Problem> problems = random_problems(limits);
        ncclEpGroupConfig_t config = group_config_for(context_, problems);
        config.max_num_sms = sms_of_a_group(limits.algorithm);
        const bool other_communicator = shape_.two_communicators && groups_.size() % 2 == 1;
        groups_.emplace_back(context_, other_communicator ? context_.make_communicator() : context_.comm(), config,
                             problems[0].invariant);
        int& pending = pending_.emplace_back(0);
        for (const Problem& problem : problems) {
            LayerOptions options;
            if (problem.is_ht()) {
                options = random_options(random_.bits(), kHighThroughput, arena_ ? arena_->get() : nullptr);
            } else {
                options.create_in_one_call = random_.chance(50);
                options.in_place = random_.chance(50);
            }
            actors_.emplace_back(context_, groups_.back().get(), pending, problem, options);
        }
    }

    // Kernels of different groups run at once: on a GPU that ranks share, all of them must fit.
    unsigned sms_of_a_group(ncclEpAlgorithm_t algorithm) const {
        const auto num_groups = static_cast<int>(shape_.groups.size());
        if (!context_.is_gpu()) return NCCL_EP_AUTO;
        if (num_groups == 1) return algorithm == kLowLatency ? 32 : NCCL_EP_AUTO;
        return static_cast<unsigned>(std::max(1, kSmsOfSharedGpu / (num_groups * context_.num_ranks())));
    }

    RankContext& context_;
    SequenceShape shape_;
    Random random_;
    std::optional<ScopedArena> arena_;
    std::list<Group> groups_;
    std::list<int> pending_;  // of each group
    std::deque<Actor> actors_;
};

}  // namespace

void run_sequence(RankContext& context, const SequenceShape& shape, uint64_t seed) {
    Sequence(context, shape, seed).run();
}

void run_sequences(const BackendSpec& spec, SequenceShape shape, const Seeds& seeds) {
    for (ProblemLimits& limits : shape.groups) limits.quantised_combines = !is_cuda(spec.kind);
    for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
        const int num_ranks = ranks_or(1 + static_cast<int>(reference::random_bits(seed, 3) % 4));
        expect_clean(spec, num_ranks, seed, [=](RankContext& context) { run_sequence(context, shape, seed); });
    }
}

}  // namespace crossdock::testing
