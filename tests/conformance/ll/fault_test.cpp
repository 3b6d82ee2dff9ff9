// SPDX-License-Identifier: Apache-2.0
// Low latency without masks: what fault_test.cpp does not ask of both modes.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "conformance/support/fault_support.h"

namespace crossdock::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kNumBuffers = 3;  // of an LL group, at most

// The kernel ends this process when the time is over, wherever it is then.
void die_after(uint64_t delay_us) {
    sigevent event{};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = SIGKILL;
    timer_t timer{};
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) abort();
    itimerspec when{};
    when.it_value.tv_sec = static_cast<time_t>(delay_us / 1'000'000);
    when.it_value.tv_nsec = static_cast<long>(delay_us % 1'000'000) * 1000 + 1;
    timer_settime(timer, 0, &when, nullptr);
}

ncclEpGroupConfig_t config_with(RankContext& context, const Problem& problem, uint64_t timeout_ns) {
    ncclEpGroupConfig_t config = group_config_for(context, problem);
    config.timeout_ns = timeout_ns;
    return config;
}

// After the first failure: every further call says the same at once, and the group can be destroyed.
// Returns the rank that this one names as lost.
int check_failed_group(RankContext& context, Layer& layer, ncclEpGroup_t group) {
    const int lost = diagnosed_peer(context, group);
    RANK_REFUSED(context, ncclRemoteError, fmt::format("rank {}", lost), layer.dispatch());
    RANK_REFUSED(context, ncclRemoteError, fmt::format("rank {}", lost), layer.combine());
    RANK_REFUSED(context, ncclRemoteError, fmt::format("rank {}", lost), layer.complete());
    return lost;
}

// Killed at any moment.
TEST(Fault, AProcessKilledAtAnyMomentIsNamed) {
    on_each_backend({Backend::kProcesses, Backend::kHosts}, [](const BackendSpec& backend) {
        for (int round = 0; round < 8; ++round) {
            const int num_ranks = 3 + round % 2;
            const int dead = round % num_ranks;
            BackendSpec spec = backend;
            spec.doomed = {dead};
            LostRanks lost_ranks;
            expect_clean(spec, num_ranks, std::nullopt, [=, &lost_ranks](RankContext& context) {
                const auto layout = round % 2 == 0 ? NCCL_EP_LAYOUT_EXPERT_MAJOR : NCCL_EP_LAYOUT_RANK_MAJOR;
                const Problem problem = busy_problem(num_ranks, layout, static_cast<uint64_t>(round));
                Group group(context, context.comm(), config_with(context, problem, kNeverNs));
                Layer layer(context, group.get(), problem);
                layer.round_trip();
                if (context.rank() == dead) die_after(static_cast<uint64_t>(round) * 1300);
                step_until_failure(context, layer);
                lost_ranks.note(context.rank(), check_failed_group(context, layer, group.get()));
            });
            EXPECT_EQ(lost_ranks.complaint(num_ranks, dead, true), "");
        }
    });
    EXPECT_EQ(left_in_shared_memory(), std::vector<std::string>());
}

TEST(Fault, AProcessKilledBetweenTheHalvesIsNamed) {
    on_each_backend({Backend::kProcesses, Backend::kHosts}, [](const BackendSpec& backend) {
        BackendSpec spec = backend;
        spec.doomed = {1};
        expect_clean(spec, 3, std::nullopt, [](RankContext& context) {
            const Problem problem = busy_problem(3, NCCL_EP_LAYOUT_EXPERT_MAJOR, 3);
            Group group(context, context.comm(), config_with(context, problem, kNeverNs));
            Layer layer(context, group.get(), problem);
            layer.prepare_dispatch();
            RANK_OK(context, layer.send_dispatch());
            if (context.rank() == 1) raise(SIGKILL);
            // What the dead rank sent before its end may still be received.
            if (layer.complete() == ncclSuccess) {
                layer.check_dispatch();
                layer.prepare_combine();
                RANK_CHECK(context, layer.combine() == ncclRemoteError, "combine without rank 1 succeeded");
            }
            RANK_CHECK(context, check_failed_group(context, layer, group.get()) == 1, "the wrong rank is named");
        });
    });
}

// A diagnosis says what was seen instead: the number of the earlier operation whose words lie in that buffer.
TEST(Fault, ADiagnosisSaysWhichOperationWasSeen) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const bool is_dispatch : {true, false}) {
            expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                const int absent = context.num_ranks() - 1;
                const Problem problem = busy_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 5);
                Group group(context, context.comm(), config_with(context, problem, short_timeout_ns(context)));
                Layer layer(context, group.get(), problem);
                for (int i = 0; i < kNumBuffers; ++i) layer.round_trip();
                if (!is_dispatch) {
                    layer.prepare_dispatch();
                    RANK_OK(context, layer.dispatch());
                    layer.check_dispatch();
                }
                if (context.rank() != absent) {
                    if (is_dispatch) layer.prepare_dispatch();
                    if (!is_dispatch) layer.prepare_combine();
                    const ncclResult_t result = is_dispatch ? layer.dispatch() : layer.combine();
                    context.synchronize(layer.stream());
                    RANK_CHECK(context, result == ncclRemoteError || context.is_gpu(), "{}", result_name(result));
                    crossdockDiagnosis_t seen = CROSSDOCK_DIAGNOSIS_INIT;
                    RANK_OK(context, crossdockGroupDiagnosis(group.get(), &seen));
                    RANK_CHECK(context,
                               seen.valid != 0 && seen.peer == absent && seen.expected == seen.epoch && seen.seen > 0 &&
                                   seen.seen < seen.expected,
                               "peer {} in step {}: expected {}, saw {}", seen.peer, seen.step, seen.expected,
                               seen.seen);
                }
                context.barrier();
            });
        }
    });
}

// What this process and its forked ranks write to stderr goes to a file while this lives.
class StderrInFile {
  public:
    StderrInFile() : file_(tmpfile()), stderr_(dup(STDERR_FILENO)) { dup2(fileno(file_), STDERR_FILENO); }
    ~StderrInFile() {
        dup2(stderr_, STDERR_FILENO);
        close(stderr_);
        fclose(file_);
    }
    StderrInFile(const StderrInFile&) = delete;
    StderrInFile& operator=(const StderrInFile&) = delete;

    int count(const std::string& words) const {
        struct stat status {};
        fstat(fileno(file_), &status);
        std::string text(static_cast<size_t>(status.st_size), '\0');
        text.resize(static_cast<size_t>(std::max<ssize_t>(0, pread(fileno(file_), text.data(), text.size(), 0))));
        int found = 0;
        for (size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) ++found;
        return found;
    }

  private:
    FILE* file_;
    int stderr_;
};

// On a GPU a failure is printed when it happens, once per group, before any further call. On a CPU the failed call
// returns it, and prints nothing. What NCCL_DEBUG and NCCL_EP_DEBUG let calls print is no warning.
constexpr const char* kReport = "crossdock: warning: the group has failed: rank 0 timed out";

TEST(Fault, AFailureIsReportedWhenItHappens) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const bool quiet : {false, true}) {
            setenv("NCCL_EP_QUIET", quiet ? "1" : "0", 1);
            int printed = 0;
            bool is_gpu = false;
            {
                const StderrInFile log;
                expect_clean(spec, 2, std::nullopt, [&, quiet](RankContext& context) {
                    const Problem problem = busy_problem(2, NCCL_EP_LAYOUT_RANK_MAJOR, 5);
                    Group group(context, context.comm(), config_with(context, problem, short_timeout_ns(context)));
                    Layer layer(context, group.get(), problem);
                    if (context.rank() == 0) {
                        layer.prepare_dispatch();
                        (void)layer.dispatch();
                        context.synchronize(layer.stream());
                        const auto deadline = Clock::now() + std::chrono::seconds(10);
                        while (context.is_gpu() && !quiet && log.count(kReport) == 0 && Clock::now() < deadline) {
                            std::this_thread::yield();
                        }
                        const int expected = context.is_gpu() && !quiet ? 1 : 0;
                        RANK_CHECK(context, log.count(kReport) == expected, "printed {} times", log.count(kReport));
                        check_failed_group(context, layer, group.get());
                    }
                    context.barrier();
                });
                printed = log.count(kReport);
                is_gpu = spec.kind == Backend::kCuda || spec.kind == Backend::kCudaProcesses;
            }
            EXPECT_EQ(printed, is_gpu && !quiet ? 1 : 0);
        }
        unsetenv("NCCL_EP_QUIET");
    });
}

// NCCL_EP_TIMEOUT_MS rules over the configuration.
TEST(Fault, TheEnvironmentSetsTheTimeout) {
    on_each_backend(kCpuBackends, [](const BackendSpec& spec) {
        setenv("NCCL_EP_TIMEOUT_MS", "200", 1);
        expect_clean(spec, 2, std::nullopt, [](RankContext& context) {
            const Problem problem = busy_problem(2, NCCL_EP_LAYOUT_EXPERT_MAJOR, 7);
            Group group(context, context.comm(), config_with(context, problem, kNeverNs));
            Layer layer(context, group.get(), problem);
            if (context.rank() == 0) RANK_CHECK(context, layer.dispatch() == ncclRemoteError, "rank 1 was not there");
            context.barrier();
        });
        unsetenv("NCCL_EP_TIMEOUT_MS");
    });
}

}  // namespace
}  // namespace crossdock::testing
