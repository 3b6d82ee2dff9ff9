// SPDX-License-Identifier: Apache-2.0
// High throughput beside a rank that writes nonsense into another's arena: whatever it writes, the other one's
// operations end, with an error or right, and nothing outside its tensors is written.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/group.h"
#include "core/handle.h"
#include "core/ht_arena.h"
#include "core/structs.h"
#include "fabric/cpu/in_process_communicator.h"
#include "fabric/cpu/process_communicator.h"
#include "fabric/cpu/rendezvous.h"

namespace crossdock {
namespace {

constexpr int kRanks = 3;
constexpr int kHostile = 1;
constexpr uint32_t kTokens = 70;  // some chunks
constexpr uint32_t kTopk = 3;
constexpr uint32_t kHidden = 32;
constexpr uint32_t kRows = kRanks * kTokens * kTopk;
constexpr size_t kGuardBytes = 4096;
constexpr std::byte kGuard{0xA5};

// A tensor between two guard zones.
class GuardedTensor {
  public:
    GuardedTensor(ncclDataType_t type, size_t element_bytes, std::initializer_list<size_t> sizes) : sizes_(sizes) {
        size_t bytes = element_bytes;
        for (const size_t size : sizes_) bytes *= size;
        bytes_.assign(bytes + 2 * kGuardBytes + 256, kGuard);
        const auto address = reinterpret_cast<uintptr_t>(bytes_.data() + kGuardBytes);
        first_ = bytes_.data() + kGuardBytes + (256 - address % 256);
        num_bytes_ = bytes;
        std::memset(first_, 0, bytes);
        tensor_.ndim = static_cast<unsigned>(sizes_.size());
        tensor_.datatype = type;
        tensor_.data = first_;
        tensor_.sizes = sizes_.data();
    }
    const ncclEpTensor_t* get() const { return &tensor_; }
    template <typename T>
    T* as() {
        return reinterpret_cast<T*>(first_);
    }
    bool is_intact() const {
        for (const std::byte* at = bytes_.data(); at < bytes_.data() + bytes_.size(); ++at) {
            if (at >= first_ && at < first_ + num_bytes_) continue;
            if (*at != kGuard) return false;
        }
        return true;
    }

  private:
    std::vector<size_t> sizes_;
    std::vector<std::byte> bytes_;
    std::byte* first_;
    size_t num_bytes_;
    ncclEpTensor_t tensor_ = NCCL_EP_TENSOR_INIT;
};

// A number that a hostile rank would choose: near what is right, or far from it.
uint64_t nonsense(std::mt19937_64& random, uint64_t epoch) {
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

// Writes into a rank's arena until told to stop: now and then anywhere, mostly to words that are looked at, tagged as
// this operation's.
void write_nonsense(const HtArena& arena, int victim, uint64_t seed, const std::atomic<bool>& is_over) {
    std::mt19937_64 random(seed);
    const HtGeometry& geometry = arena.geometry;
    std::byte* const memory = arena.memory->peers.at(victim, 0);
    const uint64_t words = geometry.arena_bytes() / 8;
    const uint64_t routing = geometry.tokens_offset() / 8;
    const uint64_t routing_end = geometry.flags_offset() / 8;
    while (!is_over.load(std::memory_order_relaxed)) {
        // The epochs of the two operations that a rank may be in, from what it has been told.
        uint64_t epoch = 0;
        for (uint32_t i = 0; i < 2 * geometry.num_ranks; ++i) {
            const auto* entered = reinterpret_cast<uint64_t*>(memory + geometry.entered_offset()) + i;
            const uint64_t seen = word_epoch(__atomic_load_n(entered, __ATOMIC_RELAXED));
            if (seen < 1000 && seen > epoch) epoch = seen;
        }
        for (int i = 0; i < 200; ++i) {
            const uint64_t kind = random() % 8;
            const uint64_t at = kind == 0   ? random() % words
                                : kind == 1 ? random() % routing
                                            : routing + random() % (routing_end - routing);
            auto* const word = reinterpret_cast<uint64_t*>(memory) + at;
            if (kind > 3) {
                auto* const tagged = reinterpret_cast<TaggedWord*>(memory + at / 2 * 16);
                __atomic_store_n(&tagged->payload, nonsense(random, epoch), __ATOMIC_RELAXED);
                __atomic_store_n(&tagged->tag, pack_word(epoch, 0), __ATOMIC_RELEASE);
            } else {
                __atomic_store_n(word, nonsense(random, epoch), __ATOMIC_RELEASE);
            }
        }
        std::this_thread::yield();
    }
}

struct Seen {
    int errors = 0;
    int successes = 0;
};

// A rank's program: updates, dispatches and combines until there is an error. The hostile rank does so, too, so that
// others get past the entries, and writes meanwhile.
Seen run_rank(const std::shared_ptr<Communicator>& communicator, ncclEpLayout_t layout, bool masks, uint64_t seed) {
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
    const std::vector<std::byte> own_memory_guard(1);

    std::atomic<bool> is_over{false};
    std::thread writer;
    if (rank == kHostile)
        writer = std::thread([&] { write_nonsense(group->ht_arena(), (kHostile + 1) % kRanks, seed, is_over); });
    Seen seen;
    const auto attempt = [&](const auto& call) {
        try {
            call();
            ++seen.successes;
            return true;
        } catch (const Error&) {
            ++seen.errors;
            return false;
        }
    };
    for (int step = 0; step < 6; ++step) {
        ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
        inputs.tokens = const_cast<ncclEpTensor_t*>(tokens.get());
        inputs.topk_weights = const_cast<ncclEpTensor_t*>(weights.get());
        ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        outputs.tokens = const_cast<ncclEpTensor_t*>(received.get());
        outputs.topk_weights = const_cast<ncclEpTensor_t*>(received_weights.get());
        if (is_flat) outputs.topk_idx = const_cast<ncclEpTensor_t*>(received_ids.get());
        ncclEpCombineInputs_t returned = NCCL_EP_COMBINE_INPUTS_INIT;
        returned.tokens = const_cast<ncclEpTensor_t*>(received.get());
        ncclEpCombineOutputs_t sums = NCCL_EP_COMBINE_OUTPUTS_INIT;
        sums.tokens = const_cast<ncclEpTensor_t*>(combined.get());
        if (!attempt([&] { handle->update(ids.get(), nullptr, nullptr); })) break;
        if (!attempt([&] { handle->dispatch(&inputs, &outputs, nullptr, nullptr, nullptr); })) break;
        if (!attempt([&] { handle->combine(&returned, &sums, nullptr, nullptr); })) break;
    }
    is_over = true;
    if (writer.joinable()) writer.join();
    for (const GuardedTensor* tensor :
         {&ids, &tokens, &weights, &received, &received_weights, &received_ids, &combined})
        EXPECT_TRUE(tensor->is_intact()) << "rank " << rank << ", seed " << seed;
    group->destroy();
    return seen;
}

constexpr uint64_t kSeeds = 30;

class HtHostile : public testing::TestWithParam<std::tuple<ncclEpLayout_t, bool>> {};

TEST_P(HtHostile, ThreadsSurviveNonsense) {
    const auto [layout, masks] = GetParam();
    int errors = 0;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
        auto communicators = cpu::make_threads_world(kRanks);
        std::vector<Seen> seen(kRanks);
        std::vector<std::thread> ranks;
        for (int rank = 0; rank < kRanks; ++rank) {
            ranks.emplace_back([&, rank, layout = layout, masks = masks] {
                seen[static_cast<size_t>(rank)] =
                    run_rank(communicators[static_cast<size_t>(rank)], layout, masks, seed);
            });
        }
        for (std::thread& rank : ranks) rank.join();
        for (const Seen& of_rank : seen) errors += of_rank.errors;
    }
    EXPECT_GT(errors, 0) << "nobody saw nonsense in " << kSeeds << " runs";
}

TEST_P(HtHostile, ProcessesSurviveNonsense) {
    const auto [layout, masks] = GetParam();
    for (uint64_t seed = 0; seed < kSeeds / 3; ++seed) {
        const ncclUniqueId id = cpu::make_unique_id();
        std::vector<pid_t> children;
        for (int rank = 0; rank < kRanks; ++rank) {
            const pid_t child = fork();
            if (child == 0) {
                run_rank(cpu::join_processes(id, kRanks, rank), layout, masks, seed);
                _exit(::testing::Test::HasFailure() ? 1 : 0);
            }
            children.push_back(child);
        }
        for (const pid_t child : children) {
            int status = 0;
            ASSERT_EQ(waitpid(child, &status, 0), child);
            EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "seed " << seed << ", status " << status;
        }
    }
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
