// SPDX-License-Identifier: Apache-2.0
#include "conformance/ll/sequence.h"

#include <algorithm>

namespace crossdock::testing {
namespace {

constexpr int kMostPendingSplits = 3;  // of a group

// What happened to a layer last, and has not been looked at.
enum class Unchecked { kNothing, kDispatch, kCombine };

struct Actor {
    size_t group = 0;
    Problem problem;
    LayerOptions options;
    std::unique_ptr<Layer> layer;
    bool dispatched = false;                  // combine may follow
    Unchecked pending = Unchecked::kNothing;  // sent, not completed
    Unchecked unchecked = Unchecked::kNothing;
};

class Sequence {
  public:
    Sequence(RankContext& context, const SequenceShape& shape, uint64_t seed)
        : context_(context), shape_(shape), random_(seed) {
        make_problems();
        for (int group = 0; group < shape.num_groups; ++group) {
            std::vector<Problem> problems;
            for (const Actor& actor : actors_) {
                if (actor.group == static_cast<size_t>(group)) problems.push_back(actor.problem);
            }
            const bool other_communicator = shape.two_communicators && group % 2 == 1;
            ncclEpGroupConfig_t config = group_config_for(context, problems);
            // Kernels of different groups run at once, and those of one group wait for each other: on a GPU that ranks
            // share, all of them must fit.
            if (context.is_gpu()) config.max_num_sms = 32;
            groups_.push_back(std::make_unique<Group>(
                context, other_communicator ? context.make_communicator() : context.comm(), config));
        }
        for (Actor& actor : actors_) make_layer(actor);
    }

    void run() {
        for (int step = 0; step < shape_.num_steps; ++step)
            act(actors_[random_.below(static_cast<int>(actors_.size()))]);
        for (Actor& actor : actors_) {
            complete(actor);
            check(actor);
        }
    }

  private:
    void make_problems() {
        for (int group = 0; group < shape_.num_groups; ++group) {
            ProblemLimits limits = shape_.limits;
            limits.num_ranks = context_.num_ranks();
            limits.local_experts = random_.pick({1, 2, 3, 8});
            for (int i = 0; i < shape_.layers_per_group; ++i) {
                Actor actor;
                actor.group = static_cast<size_t>(group);
                actor.problem = random_problem(random_.bits(), limits);
                // A group of a version 1 caller is another group's matter (compatibility_test.cpp).
                if (actor.problem.recipe == reference::Recipe::kV1Fp8) actor.problem.recipe = reference::Recipe::kFp8;
                actor.options.create_in_one_call = random_.chance(50);
                actor.options.in_place = random_.chance(50);
                actors_.push_back(std::move(actor));
            }
            // The group's number of tokens shapes the tensors of all its handles.
            int max_tokens = 0;
            const auto first = actors_.end() - shape_.layers_per_group;
            for (auto actor = first; actor != actors_.end(); ++actor)
                max_tokens = std::max(max_tokens, actor->problem.max_tokens);
            for (auto actor = first; actor != actors_.end(); ++actor) {
                actor->problem.max_tokens = max_tokens;
                actor->problem = rerouted(actor->problem, random_.bits());
            }
        }
    }

    void make_layer(Actor& actor) {
        actor.layer = std::make_unique<Layer>(context_, groups_[actor.group]->get(), actor.problem, actor.options);
        actor.dispatched = false;
    }

    int pending_in(size_t group) const {
        int count = 0;
        for (const Actor& actor : actors_) count += actor.group == group && actor.pending != Unchecked::kNothing;
        return count;
    }

    void act(Actor& actor) {
        if (actor.pending != Unchecked::kNothing) return complete(actor);
        const bool split = random_.chance(40) && pending_in(actor.group) < kMostPendingSplits;
        const int choice = random_.below(100);
        if (choice < 10) {
            // With nothing pending, complete is a success without work.
            RANK_OK(context_, actor.layer->complete());
        } else if (choice < 25) {
            check(actor);
            actor.problem = rerouted(actor.problem, random_.bits());
            actor.layer->route(actor.problem);
            actor.dispatched = false;
        } else if (choice < 32) {
            check(actor);
            actor.layer.reset();
            actor.problem = rerouted(actor.problem, random_.bits());
            make_layer(actor);
        } else if (choice < 65 || !actor.dispatched) {
            check(actor);
            actor.layer->prepare_dispatch();
            RANK_OK(context_, actor.layer->dispatch(split));
            (split ? actor.pending : actor.unchecked) = Unchecked::kDispatch;
            actor.dispatched = true;
        } else {
            check(actor);
            actor.layer->prepare_combine();
            RANK_OK(context_, actor.layer->combine(split));
            (split ? actor.pending : actor.unchecked) = Unchecked::kCombine;
        }
    }

    void complete(Actor& actor) {
        if (actor.pending == Unchecked::kNothing) return;
        RANK_OK(context_, actor.layer->complete());
        actor.unchecked = actor.pending;
        actor.pending = Unchecked::kNothing;
    }

    void check(Actor& actor) {
        if (actor.unchecked == Unchecked::kDispatch) actor.layer->check_dispatch();
        if (actor.unchecked == Unchecked::kCombine) actor.layer->check_combine();
        actor.unchecked = Unchecked::kNothing;
        // What comes next relies on this.
        if (!context_.failures().empty()) throw StopProgram("a check failed");
    }

    RankContext& context_;
    SequenceShape shape_;
    Random random_;
    std::vector<std::unique_ptr<Group>> groups_;
    std::vector<Actor> actors_;
};

}  // namespace

void run_sequence(RankContext& context, const SequenceShape& shape, uint64_t seed) {
    Sequence(context, shape, seed).run();
}

}  // namespace crossdock::testing
