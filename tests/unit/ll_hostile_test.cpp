// SPDX-License-Identifier: Apache-2.0
// Low latency beside a rank that writes garbage into another's arena.
#include "core/group.h"
#include "core/handle.h"
#include "core/ll/arena.h"
#include "core/structs.h"
#include "hostile.h"
#include "runtime/cpu/sanitizer.h"

namespace crossdock {
namespace {

constexpr uint32_t kTokens = 5;
constexpr uint32_t kTopk = 3;
constexpr uint32_t kHidden = 32;
constexpr uint32_t kLocalExperts = 4;
constexpr uint32_t kSlots = kHostileRanks * kTokens;

struct Shape {
    ncclEpLayout_t layout;
    crossdockSums_t sums;
    bool masks;
};

// A word that announces, or a payload: near what is right, or far from it.
uint64_t garbage(std::mt19937_64& random, uint64_t epoch) {
    const uint64_t any = random();
    switch (any % 5) {
        case 0:
            return any;
        case 1:
            return uint64_t{1} << any / 5 % 64;
        case 2:
            return RowOrigin{static_cast<uint32_t>(any / 5 % 8), static_cast<uint32_t>(any / 40 % 8), 0,
                             static_cast<uint32_t>(any / 320 % 40)}
                .payload();
        case 3:
            return pack_word(epoch, any / 5 % 20);
        default:
            return pack_word(epoch, any / 5);
    }
}

// A false flag, credit or origin lets two ranks use a row at once, which is a race and meant to be one. So under
// ThreadSanitizer garbage goes to counts and weights only, and only in threads: it does not see races of processes.
#if defined(CROSSDOCK_TSAN)
constexpr bool kSeesRaces = true;
#else
constexpr bool kSeesRaces = false;
#endif

// Bytes of a buffer in the victim's arena.
struct Span {
    uint64_t first;
    uint64_t end;
};

Span choose_span(const LlOffsets& offsets, std::mt19937_64& random) {
    const Span weights{offsets.weights.offset, offsets.rows.offset};
    if (kSeesRaces) {
        const bool has_weights = weights.end > weights.first;
        if (has_weights && random() % 2 == 0) return weights;
        return {offsets.counts.offset, offsets.row_flags.offset};
    }
    // Entries seldom: a rank that is taken for one with other terms is found out at once.
    return {random() % 32 == 0 ? 0 : offsets.counts.offset, weights.end};
}

// Now and then anywhere before the rows of the victim's arena, mostly to words that are looked at, as if they were of
// the operation that it is in, or of the next.
void write_garbage(const LlArena& arena, std::mt19937_64& random) {
    const LlOffsets offsets = LlArenaLayout::of(arena.geometry).offsets;
    std::byte* const memory = arena.memory->peers.at(kVictim, 0);
    const auto* entered = reinterpret_cast<const uint64_t*>(arena.memory->peers.at(kHostile, 0)) + kVictim;
    const uint64_t epoch = __atomic_load_n(entered, __ATOMIC_RELAXED) + random() % 2;
    for (int i = 0; i < 50; ++i) {
        const uint64_t kind = kSeesRaces ? 1 + random() % 7 : random() % 8;
        const uint64_t buffer = offsets.buffer(static_cast<uint32_t>(random() % arena.geometry.num_buffers));
        const Span span = choose_span(offsets, random);
        const uint64_t at = buffer + span.first + random() % (span.end - span.first) / 16 * 16;
        auto* const word = reinterpret_cast<uint64_t*>(memory + (kind == 0 ? random() % buffer / 8 * 8 : at));
        if (kind > 3) {
            __atomic_store_n(word, garbage(random, epoch), __ATOMIC_RELAXED);
            __atomic_store_n(word + 1, pack_word(epoch, 0), __ATOMIC_RELEASE);
        } else {
            __atomic_store_n(word + kind % 2, garbage(random, epoch), __ATOMIC_RELEASE);
        }
    }
}

// A rank's program: dispatches and combines until there is an error. The hostile rank does so, too, so that others get
// as far as its words, and writes meanwhile.
Answers run_rank(const std::shared_ptr<Communicator>& communicator, const Shape& shape, uint64_t seed) {
    const int rank = communicator->rank();
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    config.num_experts = kLocalExperts * kHostileRanks;
    config.max_dispatch_tokens_per_rank = kTokens;
    config.max_token_bytes = 2 * kHidden;
    config.enable_mask = shape.masks ? 1 : 0;
    config.timeout_ns = 20'000'000;
    const std::shared_ptr<Group> group = Group::create(communicator, &config, nullptr);
    const std::shared_ptr<Handle> handle =
        Handle::create(group, shape.layout, nullptr, static_cast<int>(kTopk), nullptr);
    const bool expert_major = shape.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
    if (expert_major) handle->set_sums(shape.sums);

    const size_t blocks = expert_major ? kLocalExperts : kHostileRanks;
    const size_t rows = expert_major ? kSlots : kTokens;
    GuardedTensor ids(ncclInt64, 8, {kTokens, kTopk});
    GuardedTensor tokens(ncclBfloat16, 2, {kTokens, kHidden});
    GuardedTensor weights(ncclFloat32, 4, {kTokens, kTopk});
    GuardedTensor received(ncclBfloat16, 2, {blocks, rows, kHidden});
    GuardedTensor received_weights(ncclFloat32, 4, {blocks, rows, kTopk});
    GuardedTensor received_ids(ncclInt32, 4, {blocks, rows, kTopk});
    GuardedTensor counters(ncclInt32, 4, {blocks});
    GuardedTensor combined(ncclBfloat16, 2, {kTokens, kHidden});
    std::mt19937_64 random(seed + static_cast<uint64_t>(rank));
    for (uint32_t i = 0; i < kTokens * kTopk; ++i)
        ids.as<int64_t>()[i] = static_cast<int64_t>(random() % (kLocalExperts * kHostileRanks));
    handle->update(ids.get(), nullptr, nullptr);

    const std::shared_ptr<LlArena> arena = group->arena_for(shape.layout, kTopk);
    HostileWriter writer(rank, seed, [&](std::mt19937_64& draws) { write_garbage(*arena, draws); });
    Answers answers;
    const auto goes_on_after = [&](const std::function<void()>& call) {
        writer.wait_for_some();
        return answers.accept(call);
    };
    for (int step = 0; step < 20; ++step) {
        ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
        ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
        inputs.tokens = tokens.get();
        outputs.tokens = received.get();
        ncclEpCombineInputs_t returned = NCCL_EP_COMBINE_INPUTS_INIT;
        ncclEpCombineOutputs_t sums = NCCL_EP_COMBINE_OUTPUTS_INIT;
        returned.tokens = received.get();
        sums.tokens = combined.get();
        if (expert_major) {
            info.expert_counters = counters.get();
            sums.topk_weights = weights.get();
        } else {
            info.src_rank_counters = counters.get();
            inputs.topk_weights = weights.get();
            outputs.topk_weights = received_weights.get();
            outputs.topk_idx = received_ids.get();
        }
        if (!goes_on_after([&] { handle->dispatch(&inputs, &outputs, &info, nullptr, nullptr); })) break;
        if (!goes_on_after([&] { handle->combine(&returned, &sums, nullptr, nullptr); })) break;
    }
    writer.stop();
    if (shape.masks) answers.errors += group->async_error();
    for (const GuardedTensor* tensor :
         {&ids, &tokens, &weights, &received, &received_weights, &received_ids, &counters, &combined})
        EXPECT_TRUE(tensor->is_intact()) << "rank " << rank << ", seed " << seed;
    group->destroy();
    return answers;
}

class LlHostile : public testing::TestWithParam<Shape> {
  protected:
    static HostileProgram program() {
        return [](const std::shared_ptr<Communicator>& communicator, uint64_t seed) {
            return run_rank(communicator, GetParam(), seed);
        };
    }
};

TEST_P(LlHostile, ThreadsSurviveGarbage) {
    if (kSeesRaces && GetParam().masks)
        GTEST_SKIP() << "who is masked by mistake may write where others do, on purpose";
    survive_in_threads(15, program());
}

TEST_P(LlHostile, ProcessesSurviveGarbage) {
    if (kSeesRaces) GTEST_SKIP() << "ThreadSanitizer does not see races between processes";
    survive_in_processes(5, program());
}

INSTANTIATE_TEST_SUITE_P(Shapes, LlHostile,
                         testing::Values(Shape{NCCL_EP_LAYOUT_EXPERT_MAJOR, CROSSDOCK_SUMS_EXACT, false},
                                         Shape{NCCL_EP_LAYOUT_EXPERT_MAJOR, CROSSDOCK_SUMS_EXACT, true},
                                         Shape{NCCL_EP_LAYOUT_EXPERT_MAJOR, CROSSDOCK_SUMS_SENDER, false},
                                         Shape{NCCL_EP_LAYOUT_RANK_MAJOR, CROSSDOCK_SUMS_EXACT, false},
                                         Shape{NCCL_EP_LAYOUT_RANK_MAJOR, CROSSDOCK_SUMS_EXACT, true}),
                         [](const auto& info) {
                             return std::string(info.param.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? "ExpertMajor"
                                                                                                 : "RankMajor") +
                                    (info.param.sums == CROSSDOCK_SUMS_SENDER ? "SenderSums" : "") +
                                    (info.param.masks ? "WithMasks" : "");
                         });

}  // namespace
}  // namespace crossdock
