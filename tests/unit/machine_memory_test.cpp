// SPDX-License-Identifier: Apache-2.0
// Whoever asks for more than there is learns so before anything is taken, with the number and the limit; no product of
// a caller's numbers leaves 64 bits on the way there.
#include "runtime/cpu/machine_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "core/error.h"
#include "core/ht/arena.h"
#include "core/ll/arena.h"
#include "crossdock.h"
#include "nccl_ep.h"

namespace crossdock {
namespace {

namespace fs = std::filesystem;

class ControlGroup : public testing::Test {
  protected:
    void SetUp() override { root_ = fs::path(testing::TempDir()) / fs::path("cgroup_" + std::to_string(getpid())); }
    void TearDown() override { fs::remove_all(root_); }
    void write(const std::string& path, const std::string& text) {
        fs::create_directories((root_ / path).parent_path());
        std::ofstream(root_ / path) << text << "\n";
    }
    uint64_t limit(const std::string& own) const { return cpu::control_group_limit(root_.string(), own); }
    fs::path root_;
};

TEST_F(ControlGroup, TheLeastLimitOnTheWayUpCounts) {
    write("jobs/one/memory.max", "max");
    write("jobs/memory.max", "3000");
    write("memory.max", "5000");
    EXPECT_EQ(limit("0::/jobs/one\n"), 3000u);
    EXPECT_EQ(limit("0::/\n"), 5000u);
    EXPECT_EQ(limit("0::/../elsewhere\n"), 5000u);  // a container sees its own group as the root
}

TEST_F(ControlGroup, Version1IsReadToo) {
    write("memory/docker/memory.limit_in_bytes", "7000");
    EXPECT_EQ(limit("4:cpu,cpuacct:/other\n3:memory:/docker\n"), 7000u);
    EXPECT_EQ(limit("3:cpuset:/docker\n"), UINT64_MAX);
}

TEST_F(ControlGroup, NothingThereIsNoLimit) {
    EXPECT_EQ(limit(""), UINT64_MAX);
    EXPECT_EQ(limit("0::/jobs\n"), UINT64_MAX);
    EXPECT_EQ(limit("rubbish\n::\n"), UINT64_MAX);
}

class TooLarge : public testing::Test {
  protected:
    void SetUp() override { ASSERT_EQ(crossdockCommInitAll(&comm_, 1), ncclSuccess); }
    void TearDown() override { EXPECT_EQ(crossdockCommDestroy(comm_), ncclSuccess); }
    ncclEpGroupConfig_t config(ncclEpAlgorithm_t algorithm) const {
        ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
        config.algorithm = algorithm;
        config.num_experts = 8;
        config.max_dispatch_tokens_per_rank = 16;
        config.max_recv_tokens_per_rank = 16;
        config.max_token_bytes = 1024;
        config.num_topk = 2;
        return config;
    }
    // The group is refused, with a message that has all of these words.
    void expect_refused(const ncclEpGroupConfig_t& config, std::initializer_list<std::string> words) {
        ncclEpGroup_t group = nullptr;
        EXPECT_NE(ncclEpCreateGroup(&group, comm_, &config), ncclSuccess);
        EXPECT_EQ(group, nullptr);
        const std::string message = crossdockGetLastError();
        for (const std::string& word : words)
            EXPECT_NE(message.find(word), std::string::npos) << word << ": " << message;
    }
    ncclComm_t comm_ = nullptr;
};

TEST_F(TooLarge, AGroupThatNoMachineHoldsIsRefused) {
    ncclEpGroupConfig_t low_latency = config(NCCL_EP_ALGO_LOW_LATENCY);
    low_latency.max_dispatch_tokens_per_rank = 1 << 17;
    low_latency.max_token_bytes = static_cast<unsigned>(cpu::machine_memory() >> 17) + (1 << 14);
    expect_refused(low_latency, {"bytes of symmetric memory are needed for each of the 1 ranks",
                                 std::to_string(cpu::machine_memory()), "lower max_dispatch_tokens_per_rank"});
}

TEST_F(TooLarge, ExpertsBeyondAllReasonAreRefused) {
    for (const auto algorithm : {NCCL_EP_ALGO_LOW_LATENCY, NCCL_EP_ALGO_HIGH_THROUGHPUT}) {
        ncclEpGroupConfig_t many = config(algorithm);
        many.num_experts = UINT32_MAX;
        expect_refused(many, {"config->num_experts is 4294967295", "at most 1048576"});
    }
}

TEST_F(TooLarge, AGatherOfHalfTheAddressSpaceIsRefused) {
    std::byte own{};
    const size_t bytes = size_t{1} << 63;
    EXPECT_EQ(crossdockCommAllGather(comm_, &own, &own, bytes), ncclInvalidArgument);
    const std::string message = crossdockGetLastError();
    EXPECT_NE(message.find("bytes is 9223372036854775808"), std::string::npos) << message;
    EXPECT_NE(message.find(std::to_string(cpu::machine_memory())), std::string::npos) << message;
}

// Whatever a caller writes: what is not refused has sizes that 64 bits hold with room, told by wider arithmetic.
TEST(Sizes, ExtremeNumbersNeverWrap) {
    using Wide = unsigned __int128;
    const uint32_t extremes[] = {1, 2, 16, 65536, (1u << 20) - 16, 1u << 20, (1u << 30), INT32_MAX, UINT32_MAX};
    int accepted = 0;
    for (const int num_ranks : {1, 3, 8}) {
        std::vector<ncclComm_t> comms(static_cast<size_t>(num_ranks));
        ASSERT_EQ(crossdockCommInitAll(comms.data(), num_ranks), ncclSuccess);
        const auto communicator = communicator_of(comms[0]);
        for (const bool is_ht : {false, true}) {
            for (const uint32_t experts : extremes) {
                for (const uint32_t tokens : extremes) {
                    for (const uint32_t bytes : extremes) {
                        for (const uint32_t topk : {0u, 1u, 64u, UINT32_MAX}) {
                            ncclEpGroupConfig_t given = NCCL_EP_GROUP_CONFIG_INIT;
                            given.algorithm = is_ht ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
                            given.num_experts =
                                experts / static_cast<uint32_t>(num_ranks) * static_cast<uint32_t>(num_ranks);
                            given.max_dispatch_tokens_per_rank = tokens;
                            given.max_recv_tokens_per_rank = tokens;
                            given.max_token_bytes = bytes / 16 * 16;
                            given.num_topk = topk;
                            const auto judge = [&](Wide rows, Wide whole) {
                                EXPECT_LT(whole, Wide{1} << 61) << experts << " " << tokens << " " << bytes;
                                EXPECT_GE(whole, rows) << experts << " " << tokens << " " << bytes;
                                ++accepted;
                            };
                            try {
                                const GroupConfig config =
                                    GroupConfig::resolve(*communicator, &given, nullptr, Environment{});
                                if (is_ht) {
                                    const HtGeometry arena = ht_geometry(kThreadsBackend, config, 64, 64);
                                    const HtHandleGeometry handle{config.num_ranks, config.num_ranks,
                                                                  config.experts_per_rank(), config.max_tokens, 64};
                                    const Wide slots = Wide{config.num_ranks} * config.max_tokens;
                                    judge(Wide{arena.num_rings()} * arena.ring_bytes +
                                              16 * slots * ((config.experts_per_rank() + 63) / 64),
                                          HtArenaLayout::of(arena).bytes);
                                    judge(8 * (Wide{1} + config.experts_per_rank()) * slots / 32,
                                          HtTables::bytes(handle));
                                    continue;
                                }
                                for (const auto layout : {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR}) {
                                    const uint32_t largest = std::max(1u, std::min({experts, topk, 64u}));
                                    const LlGeometry arena = ll_geometry(config, config.max_tokens, layout, largest);
                                    const Wide slots = Wide{config.num_ranks} * config.max_tokens;
                                    judge(kNumBuffers * slots * config.max_token_bytes, LlArenaLayout::of(arena).bytes);
                                    judge(8 * slots * largest, LlHandleLayout::of(config.num_ranks, config.max_tokens,
                                                                                  largest, config.has_several_teams())
                                                                   .bytes);
                                }
                            } catch (const Error& error) {
                                EXPECT_TRUE(error.code() == ncclInvalidArgument || error.code() == ncclInvalidUsage)
                                    << error.what();
                            }
                        }
                    }
                }
            }
        }
        for (const ncclComm_t comm : comms) EXPECT_EQ(crossdockCommDestroy(comm), ncclSuccess);
    }
    EXPECT_GT(accepted, 100);
}

}  // namespace
}  // namespace crossdock
