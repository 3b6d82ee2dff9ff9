// SPDX-License-Identifier: Apache-2.0
// High throughput beside the experts' kernel (crossdockHandleSetOverlap): what a dispatch publishes is in place. Random
// tests and sequences publish, too (LayerOptions::overlap_rows).
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "conformance/ht/mask_support.h"
#include "conformance/support/scoped_arena.h"

namespace crossdock::testing {
namespace {

constexpr auto kPatience = std::chrono::seconds(60);
constexpr const char* kOtherRows = "experts found other rows than there are";

// What a consumer does wrong, to show that the test sees it.
enum class Flaw { kNone, kReadsEarly };

// A rank's experts, beside its dispatch: each block's rows are copied once they are in place.
class Experts {
  public:
    Experts(RankContext& context, Layer& layer, const Overlap& overlap, Flaw flaw)
        : context_(context),
          layer_(layer),
          overlap_(overlap),
          found_(layer.arrived().bytes()),
          is_found_(found_.size() / layer.problem().received_row_bytes()),
          flaw_(flaw),
          beside_(context.run_beside([this] { run(); })) {}
    ~Experts() { gives_up_ = true; }
    Experts(const Experts&) = delete;
    Experts& operator=(const Experts&) = delete;

    void finish() { beside_->join(); }
    const std::string& complaint() const { return complaint_; }
    // All rows that arrived, and no others.
    bool found(const Bytes& arrived, const std::vector<RowSource>& rows) const {
        const size_t bytes = layer_.problem().received_row_bytes();
        for (size_t row = 0; row < is_found_.size(); ++row) {
            const bool exists = row < rows.size() && !rows[row].is_padding();
            if (is_found_[row] != exists) return false;
            if (exists && std::memcmp(&found_[row * bytes], &arrived[row * bytes], bytes) != 0) return false;
        }
        return true;
    }

  private:
    void run() {
        const OverlapConsumer consumer = overlap_.consumer();
        const uint32_t turn = consumer.turn();
        for (uint32_t zone = overlap_.zones(); zone-- > 0;) read(consumer, turn, zone);
        consumer.leave(1);
    }
    void read(const OverlapConsumer& consumer, uint32_t turn, uint32_t zone) {
        const auto alignment = static_cast<uint32_t>(std::max<size_t>(layer_.problem().alignment, 1));
        uint32_t first = 0, rows = 0;
        wait_until([&] { return consumer.wait_first_row(turn, zone, alignment, 0, first); });
        wait_until([&] { return consumer.wait_count(turn, zone, 0, rows); });
        const uint32_t block_rows = overlap_.block_rows();
        for (uint32_t block = 0; block * block_rows < rows; ++block) {
            const uint32_t expected = std::min(block_rows, rows - block * block_rows);
            uint32_t num = flaw_ == Flaw::kReadsEarly ? expected : 0;
            wait_until([&] { return num != 0 || (num = consumer.wait_block(turn, zone, block, 0)) != 0; });
            if (gives_up_) return;
            if (num != expected) complaint_ = "a block's rows";
            const size_t bytes = layer_.problem().received_row_bytes();
            for (size_t row = first + block * block_rows; num > 0; ++row, --num) {
                std::memcpy(&found_[row * bytes], layer_.arrived().data() + row * bytes, bytes);
                is_found_[row] = 1;
            }
        }
    }
    // For what never comes, the simulation reports a deadlock. Elsewhere the experts stop, with a complaint.
    template <typename Come>
    void wait_until(Come come) {
        const auto begin = std::chrono::steady_clock::now();
        while (!come() && !gives_up_) {
            context_.pause();
            if (context_.is_simulated() || std::chrono::steady_clock::now() - begin < kPatience) continue;
            complaint_ = "waited too long";
            gives_up_ = true;
        }
    }

    RankContext& context_;
    Layer& layer_;
    const Overlap& overlap_;
    Bytes found_;
    std::vector<char> is_found_;  // by row
    Flaw flaw_;
    std::string complaint_;
    std::atomic<bool> gives_up_ = false;  // the program has failed, or rows have not come
    std::unique_ptr<Beside> beside_;
};

// Over several turns, with new routing in each. With even seeds, tensors are in windows.
RankProgram turns_with_experts(uint64_t seed, int num_ranks, Flaw flaw) {
    return [=](RankContext& context) {
        const ProblemLimits limits{.algorithm = kHighThroughput, .num_ranks = num_ranks, .most_row_bytes = 1024};
        Problem problem = random_problem(seed, limits);
        for (uint64_t other = seed; !problem.expert_major(); problem = random_problem(other, limits)) other += 1000;
        std::optional<ScopedArena> arena;
        if (seed % 2 == 0) arena.emplace(context, kHtWindowBytes);
        Group group(context, problem);
        Layer layer(context, group.get(), problem, {.arena = arena ? arena->get() : nullptr});
        const Overlap overlap(context, layer.stream(), layer.handle(), problem, static_cast<uint32_t>(1 + seed % 5));
        for (uint64_t turn = 0; turn < 3; ++turn) {
            layer.prepare_dispatch();
            Experts experts(context, layer, overlap, flaw);
            RANK_OK(context, layer.dispatch());
            const Bytes arrived = layer.arrived().read();
            experts.finish();
            RANK_CHECK(context, experts.complaint().empty(), "experts: {}", experts.complaint());
            RANK_CHECK(context, experts.found(arrived, layer.received().rows), "{}", kOtherRows);
            layer.check_dispatch();
            layer.prepare_combine();
            RANK_OK(context, layer.combine());
            layer.check_combine();
            problem = rerouted(problem, seed * 100 + turn);
            layer.route(problem);
        }
        if (arena) context.barrier();
    };
}

int ranks_of(uint64_t seed) { return ranks_or(1 + static_cast<int>(seed % 4)); }

TEST(HtOverlap, ExpertsReadWhileRowsArrive) {
    on_each_backend({Backend::kThreads, Backend::kProcesses, Backend::kSimulation}, [](const BackendSpec& spec) {
        const Seeds seeds = seeds_or(1, spec.kind == Backend::kSimulation ? 100 : 24);
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed)
            expect_clean(spec, ranks_of(seed), seed, turns_with_experts(seed, ranks_of(seed), Flaw::kNone));
    });
}

void expect_caught(Flaw flaw, cpu::Fault fault) {
    on_each_backend({Backend::kSimulation}, [=](const BackendSpec& backend) {
        expect_fault_is_caught(backend, 100, kOtherRows, [=](BackendSpec spec) {
            spec.fault = fault;
            const uint64_t seed = spec.simulation.seed;
            return run_ranks(spec, ranks_of(seed), turns_with_experts(seed, ranks_of(seed), flaw));
        });
    });
}

// Experts that read a block before its counter says that it is in place.
TEST(HtOverlap, AnEarlyReadIsCaught) { expect_caught(Flaw::kReadsEarly, cpu::Fault::kNone); }
// A dispatch that publishes a block before its rows have landed.
TEST(HtOverlap, AnEarlyPublicationIsCaught) { expect_caught(Flaw::kNone, cpu::Fault::kSkipStoreWait); }

TEST(HtOverlap, WrongCallsAreRefused) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 5, kHighThroughput);
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            size_t words = 0;
            RANK_OK(context, crossdockOverlapWords(layer.handle(), 4, &words));
            RANK_REFUSED(context, ncclInvalidArgument, "block_rows is 0",
                         crossdockOverlapWords(layer.handle(), 0, &words));
            Buffer memory(context, layer.stream(), words * sizeof(uint32_t));
            Tensor tensor(ncclUint32, {words}, memory);
            Tensor small(ncclUint32, {words - 1}, memory);
            crossdockOverlap_t overlap = CROSSDOCK_OVERLAP_INIT;
            overlap.block_rows = 4;
            RANK_REFUSED(context, ncclInvalidArgument, "overlap->memory is NULL",
                         crossdockHandleSetOverlap(layer.handle(), &overlap));
            overlap.memory = small;
            RANK_REFUSED(context, ncclInvalidArgument, "overlap->memory has",
                         crossdockHandleSetOverlap(layer.handle(), &overlap));
            overlap.memory = tensor;
            overlap.done_value = 1;
            RANK_REFUSED(context, ncclInvalidUsage, "overlap->done_value is 1, allowed for HT handles: NULL, 0",
                         crossdockHandleSetOverlap(layer.handle(), &overlap));
            overlap.done_value = 0;
            RANK_OK(context, crossdockHandleSetOverlap(layer.handle(), &overlap));
            crossdockElasticDispatch_t elastic = CROSSDOCK_ELASTIC_DISPATCH_INIT;
            RANK_REFUSED(context, ncclInvalidUsage, "crossdockHandleSetOverlap",
                         crossdockElasticDispatch(layer.handle(), &elastic, layer.stream()));
            RANK_OK(context, crossdockHandleSetOverlap(layer.handle(), nullptr));

            // Between several LSA teams there are no masks.
            if (const OwnedGroup masked = try_mask_group(context, problem, kNeverNs)) {
                Layer of_masks(context, masked.get(), problem);
                RANK_REFUSED(context, ncclInvalidUsage, "in HT ht_masks",
                             crossdockHandleSetOverlap(of_masks.handle(), &overlap));
            }

            const Problem flat = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 5, kHighThroughput);
            Group flat_group(context, flat);
            Layer flat_layer(context, flat_group.get(), flat);
            RANK_REFUSED(context, ncclInvalidUsage, "the handle's layout is flat",
                         crossdockOverlapWords(flat_layer.handle(), 4, &words));
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
