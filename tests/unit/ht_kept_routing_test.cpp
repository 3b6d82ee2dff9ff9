// SPDX-License-Identifier: Apache-2.0
// Routing in a caller's memory that something has written over since: a handle that takes it over refuses it, or its
// operations end, and nothing outside of its tensors is written.
#include <chrono>

#include "core/group.h"
#include "core/handle.h"
#include "core/structs.h"
#include "hostile.h"
#include "kernels/ht/geometry.h"

namespace crossdock {
namespace {

constexpr uint32_t kTokens = 70;  // some chunks
constexpr uint32_t kTopk = 3;
constexpr uint32_t kLocalExperts = 4;
constexpr size_t kHidden = 8;

struct Case {
    int num_ranks;
    ncclEpLayout_t layout;
    int lsa_team_size;
};

// Words behind the magic number; mostly near what is right.
void overwrite(GuardedTensor& memory, size_t bytes, std::mt19937_64& random) {
    auto* const words = memory.as<uint32_t>();
    const size_t first = random() % 4 == 0 ? sizeof(uint64_t) : sizeof(HtRouting);  // the header seldom
    const uint64_t num = 1 + random() % 3 * (random() % 100);
    for (uint64_t i = 0; i < num; ++i) {
        uint32_t& word = words[first / 4 + random() % ((bytes - first) / 4)];
        switch (random() % 4) {
            case 0:
                word = static_cast<uint32_t>(random());
                break;
            case 1:
                word ^= 1u << random() % 32;
                break;
            case 2:
                word += static_cast<uint32_t>(random() % 5) - 2;
                break;
            default:
                word = 0;
        }
    }
}

// Returns the message where a call was refused.
std::string run_rank(const std::shared_ptr<Communicator>& communicator, const Case& tested, uint64_t seed,
                     bool overwrites) {
    const auto ranks = static_cast<uint32_t>(tested.num_ranks);
    const bool is_flat = tested.layout == NCCL_EP_LAYOUT_FLAT;
    const size_t rows = size_t{ranks} * kTokens * kTopk;
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    config.num_experts = kLocalExperts * ranks;
    config.max_dispatch_tokens_per_rank = kTokens;
    config.max_recv_tokens_per_rank = static_cast<unsigned int>(rows);
    config.max_token_bytes = 2 * kHidden;
    config.timeout_ns = 200'000'000;
    crossdockGroupOptions_t options = CROSSDOCK_GROUP_OPTIONS_INIT;
    options.lsa_team_size = tested.lsa_team_size;
    const std::shared_ptr<Group> group = Group::create(communicator, &config, &options);
    const size_t bytes = Handle::memory_bytes(*group, tested.layout, nullptr, kTopk);
    GuardedTensor memory(ncclUint8, 1, {bytes});
    GuardedTensor ids(ncclInt64, 8, {kTokens, kTopk});
    GuardedTensor tokens(ncclBfloat16, 2, {kTokens, kHidden});
    GuardedTensor weights(ncclFloat32, 4, {kTokens, kTopk});
    GuardedTensor received(ncclBfloat16, 2, {rows, kHidden});
    GuardedTensor received_weights =
        is_flat ? GuardedTensor(ncclFloat32, 4, {rows, kTopk}) : GuardedTensor(ncclFloat32, 4, {rows});
    GuardedTensor received_ids(ncclInt64, 8, {rows, kTopk});
    GuardedTensor combined(ncclBfloat16, 2, {kTokens, kHidden});
    std::mt19937_64 random(seed * 100 + static_cast<uint64_t>(communicator->rank()));
    for (uint32_t i = 0; i < kTokens * kTopk; ++i)
        ids.as<int64_t>()[i] = static_cast<int64_t>(random() % (kLocalExperts * ranks));

    const auto make_handle = [&] {
        return Handle::create(group, tested.layout, nullptr, static_cast<int>(kTopk), memory.get());
    };
    make_handle()->update(ids.get(), nullptr, nullptr);
    if (overwrites) overwrite(memory, bytes, random);
    const std::shared_ptr<Handle> handle = make_handle();
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
    Answers answers;
    if (answers.accept([&] { handle->dispatch(&inputs, &outputs, nullptr, nullptr, nullptr); }))
        answers.accept([&] { handle->combine(&returned, &sums, nullptr, nullptr); });
    for (const GuardedTensor* tensor :
         {&memory, &ids, &tokens, &weights, &received, &received_weights, &received_ids, &combined})
        EXPECT_TRUE(tensor->is_intact()) << "seed " << seed;
    return answers.message;
}

std::vector<std::string> run(const Case& tested, uint64_t seed, bool overwrites) {
    auto communicators = cpu::make_thread_communicators(tested.num_ranks);
    std::vector<std::string> messages(communicators.size());
    std::vector<std::thread> ranks;
    for (size_t rank = 0; rank < communicators.size(); ++rank)
        ranks.emplace_back([&, rank] { messages[rank] = run_rank(communicators[rank], tested, seed, overwrites); });
    for (std::thread& rank : ranks) rank.join();
    return messages;
}

constexpr Case kCases[] = {{1, NCCL_EP_LAYOUT_FLAT, 0}, {1, NCCL_EP_LAYOUT_EXPERT_MAJOR, 0},
                           {2, NCCL_EP_LAYOUT_FLAT, 0}, {2, NCCL_EP_LAYOUT_EXPERT_MAJOR, 0},
                           {4, NCCL_EP_LAYOUT_FLAT, 2}, {4, NCCL_EP_LAYOUT_EXPERT_MAJOR, 2}};

TEST(HtKeptRouting, IsTakenOverAsItWasLeft) {
    for (const Case& tested : kCases) {
        for (uint64_t seed = 0; seed < 5; ++seed) {
            for (const std::string& message : run(tested, seed, false)) EXPECT_EQ(message, "");
        }
    }
}

TEST(HtKeptRouting, IsRefusedWhereItWasOverwritten) {
    for (const Case& tested : kCases) {
        int refused = 0;
        const uint64_t seeds = tested.num_ranks == 1 ? 200 : 10;  // the others wait for ranks that have refused it
        for (uint64_t seed = 0; seed < seeds; ++seed) {
            const auto begin = std::chrono::steady_clock::now();
            for (const std::string& message : run(tested, seed, true))
                refused += message.find("has been overwritten") != std::string::npos ? 1 : 0;
            EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30)) << "seed " << seed;
        }
        EXPECT_GT(refused, static_cast<int>(seeds) / 4);
    }
}

}  // namespace
}  // namespace crossdock
