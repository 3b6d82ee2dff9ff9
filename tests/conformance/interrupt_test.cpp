// SPDX-License-Identifier: Apache-2.0
// What crossdockSetInterruptCheck ends: joining, collective calls, operations and closing, each long before its timeout
// and with a message that says so. Afterwards the group has failed, and goes without waiting for anybody.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <new>

#include "backends/cpu_rank.h"
#include "conformance/support/fault_support.h"
#include "conformance/support/modes.h"

namespace crossdock::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kBefore = std::chrono::milliseconds(150);
constexpr double kMostSeconds = 5;  // with room for a loaded machine; timeouts are 60 s and more

thread_local Clock::time_point t_interrupted_at = Clock::time_point::max();

int is_interrupted() { return Clock::now() >= t_interrupted_at ? 1 : 0; }

// Runs a call that waits for others, and interrupts it. Returns its result.
template <typename Call>
ncclResult_t interrupted(Call call, double& elapsed_s) {
    const auto begin = Clock::now();
    t_interrupted_at = begin + kBefore;
    const ncclResult_t result = call();
    t_interrupted_at = Clock::time_point::max();
    elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
    return result;
}

template <typename Call>
void expect_interrupted(RankContext& context, Call call) {
    double elapsed_s = 0;
    const ncclResult_t result = interrupted(call, elapsed_s);
    RANK_CHECK(context, result == ncclRemoteError, "{}: {}", result_name(result), crossdockGetLastError());
    RANK_CHECK(context, elapsed_s > 0.1 && elapsed_s < kMostSeconds, "it took {} s", elapsed_s);
    const std::string message = crossdockGetLastError();
    RANK_CHECK(context, message.find("interrupted") != std::string::npos, "{}", message);
}

// Closed until one rank opens it for all, in memory that processes share.
class Gate {
  public:
    Gate() {
        void* memory = mmap(nullptr, sizeof(*is_open_), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        is_open_ = new (memory) std::atomic<int>(0);
    }
    ~Gate() { munmap(is_open_, sizeof(*is_open_)); }
    Gate(const Gate&) = delete;
    Gate& operator=(const Gate&) = delete;
    void open() { is_open_->store(1); }
    void pass() const {
        while (is_open_->load() == 0) usleep(1000);
    }

  private:
    std::atomic<int>* is_open_;
};

const std::vector<Backend> kInRealTime{Backend::kThreads, Backend::kProcesses, Backend::kHosts};

class Interrupt : public ::testing::Test {
  protected:
    void SetUp() override { ASSERT_EQ(crossdockSetInterruptCheck(is_interrupted), ncclSuccess); }
    void TearDown() override { ASSERT_EQ(crossdockSetInterruptCheck(nullptr), ncclSuccess); }
};

// Rank 1 stays away until rank 0 has been interrupted.
void expect_operation_is_interrupted(ncclEpAlgorithm_t mode, int masks) {
    on_each_backend(kInRealTime, [=](const BackendSpec& spec) {
        Gate gate;
        expect_clean(spec, 2, std::nullopt, [=, &gate](RankContext& context) {
            const Problem problem = busy_problem(2, layouts_of(mode)[0], 5, mode);
            ncclEpGroupConfig_t config = group_config_for(context, problem);
            config.enable_mask = masks;
            ncclEpGroup_t group = nullptr;
            RANK_OK(context, create_group(context, &group, context.comm(), &config));
            {
                Layer layer(context, group, problem);
                layer.round_trip();
                prepare_phase(layer, 0);
                if (context.rank() == 0) {
                    expect_interrupted(context, [&] { return run_phase(layer, 0); });
                    RANK_REFUSED(context, ncclRemoteError, "rank 0 was interrupted", run_phase(layer, 0));
                } else {
                    gate.pass();
                }
            }
            // Rank 0 waits for nobody. Rank 1 would wait for it, as a thread for 100 s, and is interrupted there.
            const auto begin = Clock::now();
            double elapsed_s = 0;
            const auto destroy = [&] { return ncclEpGroupDestroy(group); };
            RANK_OK(context, context.rank() == 0 ? destroy() : interrupted(destroy, elapsed_s));
            elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
            RANK_CHECK(context, elapsed_s < kMostSeconds, "destroying took {} s", elapsed_s);
            gate.open();
        });
    });
}

TEST_F(Interrupt, EndsAnOperation) { expect_operation_is_interrupted(kLowLatency, 0); }
TEST_F(Interrupt, EndsAnOperationOfHighThroughput) { expect_operation_is_interrupted(kHighThroughput, 0); }
TEST_F(Interrupt, EndsAnOperationWithMasks) { expect_operation_is_interrupted(kLowLatency, 1); }

TEST_F(Interrupt, EndsCollectiveCalls) {
    on_each_backend(kInRealTime, [](const BackendSpec& spec) {
        for (const bool is_of_group : {false, true}) {
            Gate gate;
            expect_clean(spec, 2, std::nullopt, [&gate, is_of_group](RankContext& context) {
                if (context.rank() != 0) return gate.pass();
                const Problem problem = busy_problem(2, NCCL_EP_LAYOUT_EXPERT_MAJOR, 5, kLowLatency);
                const ncclEpGroupConfig_t config = group_config_for(context, problem);
                ncclEpGroup_t group = nullptr;
                expect_interrupted(context, [&] {
                    return is_of_group ? create_group(context, &group, context.comm(), &config)
                                       : crossdockCommBarrier(context.comm());
                });
                RANK_CHECK(context, group == nullptr, "a group that was not made");
                gate.open();
            });
        }
    });
}

// A rank that was interrupted while it joined can join again.
TEST_F(Interrupt, EndsJoining) {
    ncclUniqueId id{};
    ASSERT_EQ(crossdockGetUniqueId(&id), ncclSuccess);
    const std::string address = free_address();
    const auto expect_no_join = [](auto join) {
        double elapsed_s = 0;
        ncclComm_t comm = nullptr;
        EXPECT_EQ(interrupted([&] { return join(&comm); }, elapsed_s), ncclRemoteError) << crossdockGetLastError();
        EXPECT_NE(std::string(crossdockGetLastError()).find("interrupted"), std::string::npos)
            << crossdockGetLastError();
        EXPECT_LT(elapsed_s, kMostSeconds);
    };
    for (int attempt = 0; attempt < 2; ++attempt)
        expect_no_join([&](ncclComm_t* comm) { return crossdockCommInitRank(comm, 2, id, 0); });
    ncclComm_t comm = nullptr;
    EXPECT_EQ(crossdockCommInitRank(&comm, 1, id, 0), ncclInvalidArgument) << "the number of ranks is agreed upon";
    if (!why_unavailable(Backend::kHosts).empty()) GTEST_SKIP() << "no hosts";
    for (int rank = 0; rank < 2; ++rank)
        expect_no_join([&](ncclComm_t* made) { return crossdockCommInitHosts(made, 2, rank, address.c_str()); });
}

}  // namespace
}  // namespace crossdock::testing
