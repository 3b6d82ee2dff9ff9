// SPDX-License-Identifier: Apache-2.0
// Low latency beside the experts' kernel (crossdockHandleSetOverlap): what a dispatch publishes is in place, and a
// combine sends rows only when they are computed. Random tests and sequences publish and wait, too
// (LayerOptions::overlap_rows).
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "conformance/support/fault_support.h"

namespace crossdock::testing {
namespace {

constexpr uint64_t kPatienceNs = 60'000'000'000;

// Experts find only the rows that there are; elsewhere `found` is zero.
bool is_part_of(const Bytes& found, const Bytes& all) {
    return std::equal(found.begin(), found.end(), all.begin(), all.end(),
                      [](std::byte one, std::byte other) { return one == other || one == std::byte{0}; });
}

constexpr const char* kOtherRows = "experts found other rows than there are";

// What a consumer does wrong, to show that the test sees it.
enum class Flaw { kNone, kReadsEarly, kFinishesEarly };

// A rank's experts, beside its calls: each block is computed once its rows are in place.
class Experts {
  public:
    // answers: all rows that combine reads, as they are to be.
    // The first block of each zone is held back until `combines` is called.
    Experts(RankContext& context, Layer& layer, const Overlap& overlap, Bytes answers, uint64_t seed, Flaw flaw)
        : context_(context),
          layer_(layer),
          overlap_(overlap),
          answers_(std::move(answers)),
          arrived_(layer.arrived().bytes()),
          flaw_(flaw),
          random_(seed),
          beside_(context.run_beside([this] { run(); })) {}
    ~Experts() { gives_up_ = true; }
    Experts(const Experts&) = delete;
    Experts& operator=(const Experts&) = delete;

    // What they found, where they found it.
    const Bytes& finish() {
        beside_->join();
        return arrived_;
    }
    const std::string& complaint() const { return complaint_; }
    void combines() { combines_ = true; }

  private:
    void run() {
        const OverlapConsumer consumer = overlap_.consumer();
        const uint32_t turn = consumer.turn();
        std::vector<uint32_t> order(overlap_.zones());
        std::iota(order.begin(), order.end(), 0u);
        for (size_t i = order.size(); i > 1; --i)
            std::swap(order[i - 1], order[static_cast<size_t>(random_.below(static_cast<int>(i)))]);
        for (const uint32_t zone : order) compute(consumer, turn, zone);
        consumer.leave(1);
    }
    void compute(const OverlapConsumer& consumer, uint32_t turn, uint32_t zone) {
        uint32_t rows = 0;
        wait_until([&] { return consumer.wait_count(turn, zone, 0, rows); });
        const uint32_t slots = static_cast<uint32_t>(layer_.problem().slots());
        const uint32_t block_rows = overlap_.block_rows();
        for (uint32_t block = (rows + block_rows - 1) / block_rows; block-- > 0;) {  // the last one first
            const uint32_t expected = std::min(block_rows, rows - block * block_rows);
            uint32_t num = flaw_ == Flaw::kReadsEarly ? expected : 0;
            wait_until([&] { return num != 0 || (num = consumer.wait_block(turn, zone, block, 0)) != 0; });
            if (gives_up_) return;
            if (num != expected) complaint_ = "a block's rows";
            const size_t first = size_t{zone} * slots + size_t{block} * block_rows;
            copy(layer_.arrived(), arrived_.data(), first, num);
            if (block == 0) {
                wait_until([&] { return combines_.load(); });
                rest();
            }
            if (flaw_ == Flaw::kFinishesEarly) {
                consumer.finish(turn, zone, block, Overlap::kDoneValue);
                rest();
            }
            copy_to(layer_.combine_rows(), answers_.data(), first, num);
            if (flaw_ == Flaw::kFinishesEarly) continue;
            consumer.finish(turn, zone, block, Overlap::kDoneValue - 1);
            if (random_.chance(30)) context_.yield();
            consumer.finish(turn, zone, block);
            context_.yield();
        }
    }
    // For what never comes, the simulation reports a deadlock. Elsewhere the experts stop, with a complaint.
    template <typename Come>
    void wait_until(Come come) {
        const auto begin = std::chrono::steady_clock::now();
        while (!come() && !gives_up_) {
            context_.pause();
            const bool is_late = std::chrono::steady_clock::now() - begin > std::chrono::nanoseconds(kPatienceNs);
            if (context_.is_simulated() || !is_late) continue;
            complaint_ = "waited too long";
            gives_up_ = true;
        }
    }
    // Others go on meanwhile, so that the combine waits.
    void rest() {
        if (!context_.is_simulated()) std::this_thread::sleep_for(std::chrono::microseconds(200));
        for (int i = random_.below(8); i >= 0; --i) context_.yield();
    }
    static size_t row_bytes(const Buffer& buffer, const Problem& problem) {
        return buffer.bytes() / static_cast<size_t>(problem.num_blocks() * problem.slots());
    }
    void copy(const Buffer& from, std::byte* to, size_t first, size_t num) const {
        const size_t bytes = row_bytes(from, layer_.problem());
        std::memcpy(to + first * bytes, from.data() + first * bytes, num * bytes);
    }
    void copy_to(const Buffer& to, const std::byte* from, size_t first, size_t num) const {
        const size_t bytes = row_bytes(to, layer_.problem());
        std::memcpy(to.data() + first * bytes, from + first * bytes, num * bytes);
    }

    RankContext& context_;
    Layer& layer_;
    const Overlap& overlap_;
    Bytes answers_, arrived_;
    Flaw flaw_;
    Random random_;
    std::string complaint_;
    std::atomic<bool> combines_ = false;
    std::atomic<bool> gives_up_ = false;  // the program has failed, or rows have not come
    std::unique_ptr<Beside> beside_;
};

// Rows are looked at, and answered, while others still arrive, over several turns.
RankProgram turns_with_experts(uint64_t seed, const ProblemLimits& limits, Flaw flaw) {
    return [=](RankContext& context) {
        Problem problem = random_problem(seed, limits);
        Group group(context, problem);
        Layer layer(context, group.get(), problem);
        const uint32_t block_rows = static_cast<uint32_t>(1 + seed % 5);
        const Overlap overlap(context, layer.stream(), layer.handle(), problem, block_rows);
        for (uint64_t turn = 0; turn < 4; ++turn) {
            layer.prepare_combine();
            const Bytes answers = layer.combine_rows().read();
            layer.combine_rows().poison();
            layer.prepare_dispatch();
            Experts experts(context, layer, overlap, answers, seed * 10 + turn, flaw);
            RANK_OK(context, layer.dispatch());
            const Bytes arrived = layer.arrived().read();
            experts.combines();
            RANK_OK(context, layer.combine());
            const Bytes found = experts.finish();
            RANK_CHECK(context, experts.complaint().empty(), "experts: {}", experts.complaint());
            RANK_CHECK(context, is_part_of(found, arrived), "{}", kOtherRows);
            layer.check_dispatch();
            layer.check_combine();
            problem = rerouted(problem, seed * 100 + turn);
            layer.route(problem);
        }
    };
}

ProblemLimits limits_of(uint64_t seed) {
    return {.num_ranks = ranks_or(1 + static_cast<int>(seed % 4)), .most_row_bytes = 1024};
}

TEST(Overlap, ExpertsComputeWhileRowsArrive) {
    on_each_backend({Backend::kThreads, Backend::kProcesses, Backend::kSimulation}, [](const BackendSpec& spec) {
        const Seeds seeds = seeds_or(1, spec.kind == Backend::kSimulation ? 100 : 24);
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
            const ProblemLimits limits = limits_of(seed);
            expect_clean(spec, limits.num_ranks, seed, turns_with_experts(seed, limits, Flaw::kNone));
        }
    });
}

void expect_caught(Flaw flaw, cpu::Fault fault, const std::string& words) {
    on_each_backend({Backend::kSimulation}, [=](const BackendSpec& backend) {
        expect_fault_is_caught(backend, 100, words, [=](BackendSpec spec) {
            spec.fault = fault;
            const ProblemLimits limits = limits_of(spec.simulation.seed);
            return run_ranks(spec, limits.num_ranks, turns_with_experts(spec.simulation.seed, limits, flaw));
        });
    });
}

// Experts that read a block before its counter says that it is in place.
TEST(Overlap, AnEarlyReadIsCaught) { expect_caught(Flaw::kReadsEarly, cpu::Fault::kNone, kOtherRows); }
// Experts that count a block as done before they have computed it.
TEST(Overlap, AnEarlyAnswerIsCaught) { expect_caught(Flaw::kFinishesEarly, cpu::Fault::kNone, "combine's tokens"); }
// A dispatch that publishes a block before its rows have landed.
TEST(Overlap, AnEarlyPublicationIsCaught) { expect_caught(Flaw::kNone, cpu::Fault::kSkipStoreWait, kOtherRows); }

// A consumer that runs turn after turn, on its own, and on ranks to which nobody sends.
TEST(Overlap, AConsumerOfManyTurnsKeepsPace) {
    on_each_backend({Backend::kThreads, Backend::kProcesses}, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            constexpr uint32_t kTurns = 200;
            Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 5);
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            const Overlap overlap(context, layer.stream(), layer.handle(), problem, 3, 0);
            std::vector<uint32_t> counted;
            std::atomic<uint32_t> turns_ended = 0;
            std::thread consumer([&] {
                const OverlapConsumer of_words = overlap.consumer();
                for (uint32_t i = 0; i < kTurns; ++i) {
                    const uint32_t turn = of_words.turn();
                    uint32_t sum = turn == i ? 0 : 1'000'000;
                    for (uint32_t zone = 0; zone < overlap.zones(); ++zone) {
                        uint32_t rows = 1'000'000;
                        of_words.wait_count(turn, zone, kPatienceNs, rows);
                        for (uint32_t block = 0; block * overlap.block_rows() < rows; ++block)
                            sum += of_words.wait_block(turn, zone, block, kPatienceNs);
                    }
                    counted.push_back(sum);
                    of_words.leave(1);
                    ++turns_ended;
                }
            });
            std::vector<uint32_t> expected;
            for (uint32_t i = 0; i < kTurns; ++i) {
                // In every second turn all choices are of the last expert, so other ranks have no rows.
                for (reference::RankInput& rank : problem.ranks) {
                    for (size_t k = 0; k < rank.ids.size(); ++k)
                        rank.ids[k] = i % 2 == 0 ? static_cast<int64_t>(k + i) % problem.num_experts
                                                 : (k == 0 ? problem.num_experts - 1 : -1);
                }
                layer.route(problem);
                while (turns_ended < i) std::this_thread::yield();  // the consumer of the dispatch before
                RANK_OK(context, layer.dispatch());
                uint32_t rows = 0;
                for (const reference::RankInput& rank : problem.ranks) {
                    for (const int64_t id : rank.ids)
                        rows += id >= 0 && id / problem.local_experts() == context.rank() ? 1 : 0;
                }
                expected.push_back(rows);
            }
            consumer.join();
            RANK_CHECK(context, counted == expected, "the consumer counted other rows than came");
        });
    });
}

// One counter per expert, which the caller clears.
TEST(Overlap, CombinesWaitForCountersOfTheCallers) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 5);
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            const auto zones = static_cast<size_t>(problem.num_blocks());
            Buffer counters(context, layer.stream(), zones * sizeof(uint32_t));
            const std::vector<uint32_t> done(zones, 17);
            counters.write(done.data(), counters.bytes());
            Tensor tensor(ncclInt32, {zones}, counters);
            crossdockOverlap_t overlap = CROSSDOCK_OVERLAP_INIT;
            overlap.block_rows = static_cast<unsigned>(problem.slots());
            overlap.done = tensor;
            overlap.done_value = 17;
            RANK_OK(context, crossdockHandleSetOverlap(layer.handle(), &overlap));
            layer.round_trip();
            RANK_OK(context, crossdockHandleSetOverlap(layer.handle(), nullptr));
            counters.poison();
            layer.round_trip();
        });
    });
}

// A counter that never comes ends the combine with a message that names it.
TEST(Overlap, ACounterThatDoesNotComeIsNamed) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR}) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Problem problem = busy_problem(context.num_ranks(), layout, 7);
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.timeout_ns = short_timeout_ns(context);
                Group group(context, context.comm(), config);
                Layer layer(context, group.get(), problem);
                const Overlap overlap(context, layer.stream(), layer.handle(), problem, 2);
                layer.prepare_dispatch();
                RANK_OK(context, layer.dispatch());
                layer.check_dispatch();
                layer.prepare_combine();
                layer.combine();  // on CPUs this one fails, on GPUs those after it
                context.synchronize(layer.stream());
                RANK_REFUSED(context, ncclRemoteError, "waiting for its own experts", layer.combine());
                RANK_REFUSED(context, ncclRemoteError, "has counter 0, expected 3 or more", layer.combine());
            });
        }
    });
}

TEST(Overlap, WrongCountersAreRefused) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 5);
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            size_t words = 0;
            RANK_REFUSED(context, ncclInvalidArgument, "words is NULL",
                         crossdockOverlapWords(layer.handle(), 4, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "block_rows is 0",
                         crossdockOverlapWords(layer.handle(), 0, &words));
            RANK_OK(context, crossdockOverlapWords(layer.handle(), 4, &words));
            Buffer memory(context, layer.stream(), words * sizeof(uint32_t));
            const auto set = [&](size_t elements, ncclDataType_t type, unsigned block_rows, bool is_done,
                                 unsigned done_value) {
                Tensor tensor(type, {elements}, memory);
                crossdockOverlap_t overlap = CROSSDOCK_OVERLAP_INIT;
                overlap.block_rows = block_rows;
                overlap.done_value = done_value;
                (is_done ? overlap.done : overlap.memory) = tensor;
                return crossdockHandleSetOverlap(layer.handle(), &overlap);
            };
            RANK_REFUSED(context, ncclInvalidArgument, "block_rows is 0", set(words, ncclUint32, 0, false, 0));
            RANK_REFUSED(context, ncclInvalidArgument, fmt::format("expected at least {}", words),
                         set(words - 1, ncclUint32, 4, false, 0));
            RANK_REFUSED(context, ncclInvalidArgument, "overlap->memory", set(words, ncclFloat32, 4, false, 0));
            RANK_REFUSED(context, ncclInvalidArgument, "overlap->done has 1 elements", set(1, ncclInt32, 1, true, 1));
            RANK_REFUSED(context, ncclInvalidArgument, "done_value is 0", set(words, ncclInt32, 4, true, 0));
            RANK_OK(context, crossdockOverlapWords(layer.handle(), UINT32_MAX, &words));
            {
                const auto zones = static_cast<size_t>(problem.num_blocks());
                Tensor wide(ncclInt32, {zones, 2}, memory);
                crossdockOverlap_t overlap = CROSSDOCK_OVERLAP_INIT;
                overlap.block_rows = UINT32_MAX;
                overlap.done_value = 1;
                overlap.done = wide;
                RANK_REFUSED(context, ncclInvalidArgument, "[zones, blocks]",
                             crossdockHandleSetOverlap(layer.handle(), &overlap));
            }
            {
                layer.round_trip();
                const Overlap late(context, layer.stream(), layer.handle(), problem, 4);
                layer.prepare_combine();
                RANK_REFUSED(context, ncclInvalidUsage, "has not published rows", layer.combine());
                crossdockElasticDispatch_t elastic = CROSSDOCK_ELASTIC_DISPATCH_INIT;
                // With several LSA teams there are no elastic operations in low latency.
                const char* why = is_one_lsa_team(context.num_ranks()) ? "crossdockHandleSetOverlap" : "LSA team";
                RANK_REFUSED(context, ncclInvalidUsage, why,
                             crossdockElasticDispatch(layer.handle(), &elastic, layer.stream()));
                RANK_OK(context, crossdockHandleSetOverlap(layer.handle(), nullptr));
            }
            crossdockOverlap_t neither = CROSSDOCK_OVERLAP_INIT;
            RANK_REFUSED(context, ncclInvalidArgument, "expected at least one of them",
                         crossdockHandleSetOverlap(layer.handle(), &neither));
            layer.round_trip();  // nothing applies

            {
                Group masked(context, context.comm(), mask_config(context, problem, kNeverNs));
                Layer of_masks(context, masked.get(), problem);
                Tensor tensor(ncclUint32, {words}, memory);
                crossdockOverlap_t overlap = CROSSDOCK_OVERLAP_INIT;
                overlap.memory = tensor;
                overlap.block_rows = UINT32_MAX;
                RANK_REFUSED(context, ncclInvalidUsage, "the group has masks (enable_mask",
                             crossdockHandleSetOverlap(of_masks.handle(), &overlap));
            }
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
