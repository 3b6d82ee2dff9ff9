// SPDX-License-Identifier: Apache-2.0
// How long waits last, in simulated time: no longer than nccl_ep.h says ("Waits for peers"), and, where a lost rank
// makes one wait as long as it may, no shorter.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "crossdock.h"
#include "crossdock/group.hpp"
#include "fabric/communicator.h"
#include "fabric/cpu/in_process_communicator.h"
#include "runtime/cpu/cpu_runtime.h"

namespace crossdock {
namespace {

constexpr uint64_t kTimeoutNs = 10'000'000;  // T, far more than everything else takes
constexpr uint32_t kTokens = 3;
constexpr uint32_t kHidden = 16;

// One rank with a group, a handle and tensors that every call gets. Calls may fail: only their time matters.
class TimedRank {
  public:
    TimedRank(ncclComm_t comm, uint32_t num_ranks, bool is_ht, bool masks)
        : executor_(communicator_of(comm)->runtime().cpu_executor()),
          ids_(kTokens * num_ranks),
          weights_(ids_.size(), 1.0f),
          rows_(size_t{num_ranks} * kTokens * num_ranks * kHidden),
          tokens_(kTokens * kHidden),
          received_weights_(size_t{num_ranks} * kTokens * num_ranks),
          topk_idx_(ids_.data(), ncclInt64, {kTokens, num_ranks}),
          topk_weights_(weights_.data(), ncclFloat32, {kTokens, num_ranks}),
          input_(tokens_.data(), ncclFloat32, {kTokens, kHidden}),
          received_(rows_.data(), ncclFloat32,
                    is_ht ? std::initializer_list<size_t>{kTokens * num_ranks, kHidden}
                          : std::initializer_list<size_t>{1, kTokens * num_ranks, kHidden}),
          weights_here_(received_weights_.data(), ncclFloat32, {kTokens * num_ranks}),
          counter_(&count_, ncclInt32, {1}),
          is_ht_(is_ht) {
        // Every token goes to every rank, which has one expert.
        for (size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<int64_t>(i % num_ranks);
        ncclEpGroupConfig_t config = is_ht
                                         ? high_throughput_config(num_ranks, kTokens, kTokens * num_ranks, 4 * kHidden)
                                         : low_latency_config(num_ranks, kTokens, 4 * kHidden);
        config.timeout_ns = kTimeoutNs;
        config.enable_mask = masks;
        crossdockGroupOptions_t options = CROSSDOCK_GROUP_OPTIONS_INIT;
        options.ht_masks = is_ht && masks;
        EXPECT_EQ(crossdockCreateGroup(&group_, comm, &config, &options), ncclSuccess) << crossdockGetLastError();
        for (ncclEpHandle_t& handle : handles_) {
            EXPECT_EQ(ncclEpInitHandle(&handle, group_, NCCL_EP_LAYOUT_EXPERT_MAJOR, nullptr,
                                       static_cast<int>(num_ranks), nullptr),
                      ncclSuccess)
                << crossdockGetLastError();
            if (!is_ht) update(handle);
        }
    }
    ~TimedRank() { destroy(); }
    TimedRank(const TimedRank&) = delete;
    TimedRank& operator=(const TimedRank&) = delete;
    void destroy() {
        for (ncclEpHandle_t& handle : handles_) ncclEpHandleDestroy(std::exchange(handle, nullptr));
        ncclEpGroupDestroy(std::exchange(group_, nullptr));
    }

    ncclEpGroup_t group() const { return group_; }
    ncclEpHandle_t handle(int number = 0) const { return handles_[static_cast<size_t>(number)]; }

    ncclResult_t update(ncclEpHandle_t handle) { return ncclEpUpdateHandle(handle, topk_idx_.get(), nullptr, nullptr); }
    ncclResult_t dispatch(int number = 0, bool send_only = false) {
        ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
        ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
        ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
        config.send_only = send_only;
        inputs.tokens = input_.get();
        outputs.tokens = received_.get();
        if (is_ht_) {
            inputs.topk_weights = topk_weights_.get();
            outputs.topk_weights = weights_here_.get();
        } else {
            info.expert_counters = counter_.get();
        }
        return ncclEpDispatch(handle(number), &inputs, &outputs, &info, &config, nullptr);
    }
    ncclResult_t combine(int number = 0) {
        ncclEpCombineInputs_t inputs = NCCL_EP_COMBINE_INPUTS_INIT;
        ncclEpCombineOutputs_t outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
        inputs.tokens = received_.get();
        outputs.tokens = input_.get();
        if (!is_ht_) outputs.topk_weights = topk_weights_.get();
        return ncclEpCombine(handle(number), &inputs, &outputs, nullptr, nullptr);
    }
    ncclResult_t complete(int number) { return ncclEpComplete(handle(number), nullptr, nullptr); }
    // One step of all operations.
    void run_step() {
        if (is_ht_) update(handle());
        dispatch();
        combine();
    }

    // Simulated time of a call, in timeouts.
    double timeouts_of(const auto& call) const {
        const uint64_t begin_ns = executor_->now_ns();
        call();
        return static_cast<double>(executor_->now_ns() - begin_ns) / kTimeoutNs;
    }
    void sleep(double timeouts) const {
        executor_->wait([] { return false; }, executor_->now_ns() + static_cast<uint64_t>(timeouts * kTimeoutNs));
    }

  private:
    cpu::Executor* executor_;
    std::vector<int64_t> ids_;
    std::vector<float> weights_, rows_, tokens_, received_weights_;
    int32_t count_ = 0;
    Tensor topk_idx_, topk_weights_, input_, received_, weights_here_, counter_;
    bool is_ht_;
    ncclEpGroup_t group_ = nullptr;
    std::array<ncclEpHandle_t, 2> handles_{};
};

using Program = std::function<void(TimedRank&, int rank)>;

void simulate(uint32_t num_ranks, bool is_ht, bool masks, const cpu::SimulationConfig& config, const Program& program) {
    cpu::run_simulation(static_cast<int>(num_ranks), config, [&](ncclComm_t comm, int rank) {
        TimedRank timed(comm, num_ranks, is_ht, masks);
        program(timed, rank);
    });
}

// What a call took that waited `timeouts` timeouts. A rank whose peer began to wait a little earlier hears of it.
void expect_timeouts(double took, double timeouts, const std::string& what) {
    EXPECT_GE(took, timeouts - 0.01) << what;
    EXPECT_LE(took, timeouts + 0.1) << what;
}
std::string named(const char* operation, bool masks) { return std::string(operation) + (masks ? ", masks" : ""); }

constexpr int kAbsent = 2;  // of three ranks

// ---- Low latency ----

TEST(WaitBounds, LowLatencyForARankThatHasNotEntered) {
    for (const bool masks : {false, true}) {
        simulate(3, false, masks, {}, [=](TimedRank& timed, int rank) {
            timed.run_step();
            if (rank == kAbsent) return;
            expect_timeouts(timed.timeouts_of([&] { timed.dispatch(); }), 1, named("dispatch", masks));
        });
        simulate(3, false, masks, {}, [=](TimedRank& timed, int rank) {
            timed.run_step();
            timed.dispatch();
            if (rank == kAbsent) return;
            expect_timeouts(timed.timeouts_of([&] { timed.combine(); }), 1, named("combine", masks));
        });
    }
}

// A send half waits until the buffer is free at the peers, a receive half for rows: each has its own deadline.
TEST(WaitBounds, LowLatencyHalves) {
    for (const bool masks : {false, true}) {
        simulate(3, false, masks, {}, [=](TimedRank& timed, int rank) {
            timed.run_step();
            if (rank == kAbsent) return;
            expect_timeouts(timed.timeouts_of([&] { timed.dispatch(0, true); }), 0, named("first send half", masks));
            expect_timeouts(timed.timeouts_of([&] { timed.dispatch(1, true); }), 1, named("send half", masks));
        });
        simulate(3, false, masks, {}, [=](TimedRank& timed, int rank) {
            timed.run_step();
            if (rank == kAbsent) return;
            expect_timeouts(timed.timeouts_of([&] { timed.dispatch(0, true); }), 0, named("first send half", masks));
            expect_timeouts(timed.timeouts_of([&] { timed.complete(0); }), 1, named("receive half", masks));
        });
    }
}

// The longest of the survivors' calls if rank 2 stops at any step of the last `part` of a program, which notes what its
// calls took.
using NotedProgram = std::function<void(TimedRank&, int rank, const std::function<void(double)>& note)>;
double longest_after_a_kill(bool is_ht, bool masks, double part, const NotedProgram& program) {
    double longest = 0;
    const auto run = [&](const cpu::SimulationConfig& config) {
        return cpu::run_simulation(3, config,
                                   [&](ncclComm_t comm, int rank) {
                                       TimedRank timed(comm, 3, is_ht, masks);
                                       program(timed, rank, [&](double took) {
                                           if (rank != kAbsent) longest = std::max(longest, took);
                                       });
                                   })
            .num_steps;
    };
    cpu::SimulationConfig config;
    const auto most_steps = static_cast<double>(run(config));
    EXPECT_LT(longest, 1) << "nobody is lost";
    config.killed_rank = kAbsent;
    constexpr int kMoments = 1600;
    for (int moment = 0; moment < kMoments; ++moment) {
        config.seed = static_cast<uint64_t>(moment);
        config.killed_at_step = static_cast<uint64_t>(most_steps * (1 - part + part * moment / kMoments));
        run(config);
    }
    return longest;
}

// Groups and handles are made in the first half.
double longest_operation_after_a_kill(bool is_ht, bool masks) {
    return longest_after_a_kill(is_ht, masks, 0.5, [=](TimedRank& timed, int, const auto& note) {
        if (is_ht) note(timed.timeouts_of([&] { timed.update(timed.handle()); }));
        note(timed.timeouts_of([&] { timed.dispatch(); }));
        note(timed.timeouts_of([&] { timed.combine(); }));
    });
}

TEST(WaitBounds, LowLatencyForARankThatHasEntered) {
    expect_timeouts(longest_operation_after_a_kill(false, false), 1, "without masks");
    // It might have waited for another one itself.
    expect_timeouts(longest_operation_after_a_kill(false, true), 2, "with masks");
}

// ---- High throughput ----

TEST(WaitBounds, HighThroughputForASilentRank) {
    for (const bool masks : {false, true}) {
        for (const int missed : {0, 1, 2}) {
            simulate(3, true, masks, {}, [=](TimedRank& timed, int rank) {
                timed.run_step();
                if (missed > 0) timed.update(timed.handle());
                if (missed > 1) timed.dispatch();
                if (rank == kAbsent) return;
                const std::string what = named(missed == 0 ? "update" : missed == 1 ? "dispatch" : "combine", masks);
                const auto call = [&] {
                    return missed == 0   ? timed.update(timed.handle())
                           : missed == 1 ? timed.dispatch()
                                         : timed.combine();
                };
                expect_timeouts(timed.timeouts_of(call), 1, what);
            });
        }
    }
}

TEST(WaitBounds, HighThroughputForARankThatStops) {
    const double without = longest_operation_after_a_kill(true, false);
    EXPECT_GE(without, 1);
    EXPECT_LE(without, 2) << "a silent rank costs one timeout, and one that waits for it one more at most";
    const double with = longest_operation_after_a_kill(true, true);
    EXPECT_GE(with, 1);
    EXPECT_LE(with, 2 * (3 + 1));
}

// Rank 2 is lost. Rank 1, which has masked it, waits for rank 0, which comes late and then waits for rank 2: longer
// than for a silent rank, and without taking rank 0 for lost.
TEST(WaitBounds, HighThroughputBehindARankThatWaits) {
    constexpr double kLate = 0.5;
    simulate(3, true, true, {}, [=](TimedRank& timed, int rank) {
        timed.run_step();
        std::array<int, 3> mask{1, 1, 0};
        if (rank == kAbsent) return;
        if (rank == 0) timed.sleep(kLate);
        if (rank == 1) {
            EXPECT_EQ(ncclEpMaskUpdate(timed.group(), mask.data(), nullptr), ncclSuccess);
        }
        const double took = timed.timeouts_of([&] { timed.update(timed.handle()); });
        expect_timeouts(took, rank == 0 ? 1 : 1 + kLate, fmt::format("rank {}", rank));
        EXPECT_EQ(ncclEpMaskQuery(timed.group(), mask.data(), nullptr), ncclSuccess);
        EXPECT_EQ(mask, (std::array<int, 3>{1, 1, 0})) << "rank " << rank;
    });
}

// ---- What ends a loss ----

TEST(WaitBounds, MaskCleans) {
    for (const bool is_ht : {false, true}) {
        simulate(3, is_ht, true, {}, [=](TimedRank& timed, int rank) {
            timed.run_step();
            if (rank == kAbsent) return;
            expect_timeouts(timed.timeouts_of([&] { ncclEpMaskClean(timed.group(), nullptr); }), 1,
                            is_ht ? "HT mask clean" : "LL mask clean");
        });
        // A rank that comes late and stops between the rounds costs the most.
        constexpr double kLate = 0.9;
        const double longest =
            longest_after_a_kill(is_ht, true, 0.25, [=](TimedRank& timed, int rank, const auto& note) {
                timed.run_step();
                if (rank == kAbsent) timed.sleep(kLate);
                note(timed.timeouts_of([&] { ncclEpMaskClean(timed.group(), nullptr); }));
            });
        EXPECT_GE(longest, 2 + kLate - 0.01) << (is_ht ? "HT" : "LL");
        EXPECT_LE(longest, 3) << (is_ht ? "HT" : "LL");
    }
}

TEST(WaitBounds, Destroy) {
    for (const bool is_ht : {false, true}) {
        for (const bool masks : {false, true}) {
            simulate(2, is_ht, masks, {}, [=](TimedRank& timed, int rank) {
                timed.run_step();
                if (rank == 1) return timed.sleep(2);
                expect_timeouts(timed.timeouts_of([&] { timed.destroy(); }), 1,
                                named(is_ht ? "HT destroy" : "LL destroy", masks));
            });
        }
    }
}

}  // namespace
}  // namespace crossdock
