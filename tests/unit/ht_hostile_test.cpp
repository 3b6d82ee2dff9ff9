// SPDX-License-Identifier: Apache-2.0
// High throughput beside a rank that writes garbage into another's arena: whatever it writes, the other one's
// operations end, with an error or right, and nothing outside its tensors is written.
#include <algorithm>

#include "core/group.h"
#include "core/handle.h"
#include "core/ht/arena.h"
#include "core/structs.h"
#include "hostile.h"

namespace crossdock {
namespace {

constexpr int kRanks = kHostileRanks;
constexpr uint32_t kTokens = 70;  // some chunks
constexpr uint32_t kTopk = 3;
constexpr uint32_t kHidden = 32;
constexpr uint32_t kRows = kRanks * kTokens * kTopk;

// A number that a hostile rank would choose: near what is right, or far from it.
uint64_t garbage(std::mt19937_64& random, uint64_t epoch) {
    const uint64_t any = random();
    switch (any % 6) {
        case 0:
            return any;
        case 1:
            return uint64_t{1} << any / 6 % 64;
        case 2:
            return any / 6 % 1000;
        case 3:
            return pack_word(epoch + any / 6 % 3, any / 24 % 200);
        case 4:
            return pack_word(epoch + any / 6 % 3, any / 24);
        default:
            return uint64_t{1} << 63 | (any / 6 % 8) << 32 | any / 48 % 8;
    }
}

// Of the latest operation that somebody has told the hostile rank of.
uint64_t epoch_told(const HtArena& arena) {
    const uint64_t* entered = arena.memory->peers.at(kHostile, HtArenaLayout::of(arena.geometry).offsets.entered);
    uint64_t epoch = 0;
    for (uint32_t i = 0; i < 2 * arena.geometry.num_ranks; ++i)
        epoch = std::max(epoch, word_epoch(__atomic_load_n(entered + i, __ATOMIC_RELAXED)));
    return epoch;
}

// The tags of terms say how many tokens their source has.
void write_too_many_tokens(const HtArena& arena, std::mt19937_64& random) {
    TaggedWord* const terms = arena.memory->peers.at(kVictim, HtArenaLayout::of(arena.geometry).offsets.terms);
    const uint64_t tag = pack_word(epoch_told(arena) + random() % 2, kTokens + 1);
    for (uint32_t i = 0; i < 2 * arena.geometry.num_ranks; ++i) __atomic_store_n(&terms[i].tag, tag, __ATOMIC_RELEASE);
}

// Now and then to any word that announces something, or to terms, whose tags hold numbers of tokens; mostly to words of
// updates, tagged as this operation's. Not to the rings behind them: what is in these is a peer's to write, and read by
// ordinary loads.
void write_garbage(const HtArena& arena, std::mt19937_64& random) {
    const HtOffsets offsets = HtArenaLayout::of(arena.geometry).offsets;
    std::byte* const memory = arena.memory->peers.at(kVictim, 0);
    const uint64_t words = offsets.weights.packets.offset / 8;
    const uint64_t terms = offsets.terms.offset / 8;
    const uint64_t routing = offsets.bases.offset / 8;
    const uint64_t routing_end = offsets.rows.flags.offset / 8;
    const uint64_t epoch = epoch_told(arena) + random() % 2;
    for (int i = 0; i < 200; ++i) {
        const uint64_t kind = random() % 8;
        const uint64_t at = kind == 0   ? random() % words
                            : kind == 1 ? random() % routing
                            : kind == 2 ? terms + random() % (4 * arena.geometry.num_ranks)
                                        : routing + random() % (routing_end - routing);
        auto* const word = reinterpret_cast<uint64_t*>(memory) + at;
        if (kind > 3) {
            auto* const tagged = reinterpret_cast<TaggedWord*>(memory + at / 2 * 16);
            __atomic_store_n(&tagged->payload, garbage(random, epoch), __ATOMIC_RELAXED);
            __atomic_store_n(&tagged->tag, pack_word(epoch, 0), __ATOMIC_RELEASE);
        } else {
            __atomic_store_n(word, garbage(random, epoch), __ATOMIC_RELEASE);
        }
    }
}

using Write = void (*)(const HtArena& arena, std::mt19937_64& random);

// A rank's program: updates, dispatches and combines until there is an error. The hostile rank does so, too, so that
// others get past the entries, and writes meanwhile.
Answers run_rank(const std::shared_ptr<Communicator>& communicator, ncclEpLayout_t layout, bool masks, uint64_t seed,
                 Write write = write_garbage) {
    const int rank = communicator->rank();
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    config.num_experts = 4 * kRanks;
    config.max_dispatch_tokens_per_rank = kTokens;
    config.max_recv_tokens_per_rank = kRows;
    config.max_token_bytes = 2 * kHidden;
    config.timeout_ns = 50'000'000;
    crossdockGroupOptions_t options = CROSSDOCK_GROUP_OPTIONS_INIT;
    options.ht_masks = masks ? 1 : 0;
    const std::shared_ptr<Group> group = Group::create(communicator, &config, &options);
    const std::shared_ptr<Handle> handle = Handle::create(group, layout, nullptr, static_cast<int>(kTopk), nullptr);

    GuardedTensor ids(ncclInt64, 8, {kTokens, kTopk});
    std::mt19937_64 random(seed + static_cast<uint64_t>(rank));
    for (uint32_t i = 0; i < kTokens * kTopk; ++i) ids.as<int64_t>()[i] = static_cast<int64_t>(random() % (4 * kRanks));
    const bool is_flat = layout == NCCL_EP_LAYOUT_FLAT;
    GuardedTensor tokens(ncclBfloat16, 2, {kTokens, kHidden});
    GuardedTensor weights(ncclFloat32, 4, {kTokens, kTopk});
    GuardedTensor received(ncclBfloat16, 2, {kRows, kHidden});
    GuardedTensor received_weights =
        is_flat ? GuardedTensor(ncclFloat32, 4, {kRows, kTopk}) : GuardedTensor(ncclFloat32, 4, {kRows});
    GuardedTensor received_ids(ncclInt64, 8, {kRows, kTopk});
    GuardedTensor combined(ncclBfloat16, 2, {kTokens, kHidden});
    HostileWriter writer(rank, seed, [&](std::mt19937_64& draws) { write(group->ht_arena(), draws); });
    Answers answers;
    const auto goes_on_after = [&](const std::function<void()>& call) {
        writer.wait_for_some();
        return answers.accept(call);
    };
    for (int step = 0; step < 6; ++step) {
        ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
        inputs.tokens = tokens.get();
        inputs.topk_weights = weights.get();
        ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        outputs.tokens = received.get();
        outputs.topk_weights = received_weights.get();
        if (is_flat) outputs.topk_idx = received_ids.get();
        ncclEpCombineInputs_t returned = NCCL_EP_COMBINE_INPUTS_INIT;
        returned.tokens = received.get();
        ncclEpCombineOutputs_t sums = NCCL_EP_COMBINE_OUTPUTS_INIT;
        sums.tokens = combined.get();
        if (!goes_on_after([&] { handle->update(ids.get(), nullptr, nullptr); })) break;
        if (!goes_on_after([&] { handle->dispatch(&inputs, &outputs, nullptr, nullptr, nullptr); })) break;
        if (!goes_on_after([&] { handle->combine(&returned, &sums, nullptr, nullptr); })) break;
    }
    writer.stop();
    for (const GuardedTensor* tensor :
         {&ids, &tokens, &weights, &received, &received_weights, &received_ids, &combined})
        EXPECT_TRUE(tensor->is_intact()) << "rank " << rank << ", seed " << seed;
    group->destroy();
    return answers;
}

class HtHostile : public testing::TestWithParam<std::tuple<ncclEpLayout_t, bool>> {
  protected:
    static HostileProgram program() {
        return [](const std::shared_ptr<Communicator>& communicator, uint64_t seed) {
            const auto [layout, masks] = GetParam();
            return run_rank(communicator, layout, masks, seed);
        };
    }
};

TEST_P(HtHostile, ThreadsSurviveGarbage) { survive_in_threads(30, program()); }

TEST_P(HtHostile, ProcessesSurviveGarbage) { survive_in_processes(10, program()); }

TEST(HtHostileTokens, ANumberAboveTheGroupsIsRefusedWithBoth) {
    const HostileProgram program = [](const std::shared_ptr<Communicator>& communicator, uint64_t seed) {
        return run_rank(communicator, NCCL_EP_LAYOUT_FLAT, false, seed, write_too_many_tokens);
    };
    std::string messages;
    for (uint64_t seed = 0; seed < 100; ++seed) {
        for (const Answers& answers : answers_of_threads(seed, program)) {
            messages += answers.message + "\n";
            if (answers.message.find("announced 71 tokens to rank 2, allowed: at most 70; in ") == std::string::npos)
                continue;
            return;
        }
    }
    FAIL() << messages;
}

INSTANTIATE_TEST_SUITE_P(Layouts, HtHostile,
                         testing::Combine(testing::Values(NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR),
                                          testing::Bool()),
                         [](const auto& info) {
                             return std::string(std::get<0>(info.param) == NCCL_EP_LAYOUT_FLAT ? "Flat"
                                                                                               : "ExpertMajor") +
                                    (std::get<1>(info.param) ? "WithMasks" : "");
                         });

}  // namespace
}  // namespace crossdock
