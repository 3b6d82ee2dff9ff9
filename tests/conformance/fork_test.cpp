// SPDX-License-Identifier: Apache-2.0
// A forked child cannot use what its parent made, is told so at once, and takes nothing of the parent's along when it
// ends; the parent goes on.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "a2sgd/support.h"
#include "conformance/support/fault_support.h"
#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

constexpr int kMostMs = 30'000;  // of a child; far more than it needs

// What the parent has made.
struct Inherited {
    ncclComm_t comm;
    Group& group;
    Layer& layer;
    A2sgdRank& a2sgd;
};

// Exit status of a child: 0, or the number of the first call that did not answer as it must.
class ChildCalls {
  public:
    void expect_refused(ncclResult_t result) {
        ++number_;
        const std::string maker = std::to_string(getppid());
        const bool is_named = std::strstr(crossdockGetLastError(), "before fork()") != nullptr &&
                              std::strstr(crossdockGetLastError(), maker.c_str()) != nullptr;
        if (result == ncclInvalidUsage && is_named) return;
        std::fprintf(stderr, "call %d of a forked child: %s, %s\n", number_, result_name(result),
                     crossdockGetLastError());
        if (failed_ == 0) failed_ = number_;
    }
    void expect_success(ncclResult_t result) {
        ++number_;
        if (result != ncclSuccess && failed_ == 0) failed_ = number_;
    }
    int status() const { return failed_; }

  private:
    int number_ = 0;
    int failed_ = 0;
};

int use(const Inherited& parents) {
    ChildCalls calls;
    ncclEpGroup_t group = nullptr;
    const ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    calls.expect_refused(ncclEpCreateGroup(&group, parents.comm, &config));
    calls.expect_refused(crossdockCommBarrier(parents.comm));
    int rank = 0;
    calls.expect_refused(crossdockCommUserRank(parents.comm, &rank));
    calls.expect_refused(parents.layer.dispatch());
    calls.expect_refused(parents.layer.combine());
    ncclEpHandle_t handle = nullptr;
    calls.expect_refused(
        ncclEpInitHandle(&handle, parents.group.get(), NCCL_EP_LAYOUT_EXPERT_MAJOR, nullptr, 1, nullptr));
    int error = 0;
    calls.expect_refused(ncclEpGetAsyncError(parents.group.get(), &error));
    calls.expect_refused(crossdockA2sgdBegin(parents.a2sgd.get(), nullptr));
    return calls.status();
}

int destroy(const Inherited& parents) {
    ChildCalls calls;
    calls.expect_refused(ncclEpHandleDestroy(parents.layer.handle()));
    calls.expect_refused(crossdockA2sgdDestroy(parents.a2sgd.get()));
    calls.expect_refused(ncclEpGroupDestroy(parents.group.get()));
    calls.expect_refused(crossdockCommDestroy(parents.comm));
    return calls.status();
}

// Its own communicator, of one rank, is a child's to make and to use.
int make_its_own(const Inherited&) {
    ChildCalls calls;
    ncclUniqueId id{};
    ncclComm_t comm = nullptr;
    calls.expect_success(crossdockGetUniqueId(&id));
    calls.expect_success(crossdockCommInitRank(&comm, 1, id, 0));
    calls.expect_success(crossdockCommBarrier(comm));
    calls.expect_success(crossdockCommDestroy(comm));
    return calls.status();
}

int just_end(const Inherited&) { return 0; }

// Runs `body` in a child that ends as programs do, by exit().
void in_child(RankContext& context, const char* name, const std::function<int()>& body) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) exit(body());
    if (child < 0) throw StopProgram(fmt::format("fork failed: {}", std::strerror(errno)));
    // As soon as it has ended; the descriptor is readable then.
    const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, child, 0));
    pollfd ended{descriptor, POLLIN, 0};
    const bool came = descriptor >= 0 && poll(&ended, 1, kMostMs) == 1;
    if (!came) kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    close(descriptor);
    RANK_CHECK(context, came, "the child that was to {} had not ended after {} ms", name, kMostMs);
    RANK_CHECK(context, WIFEXITED(status), "the child that was to {} was ended by signal {}", name, WTERMSIG(status));
    RANK_CHECK(context, WEXITSTATUS(status) == 0, "the child that was to {} failed in call {}", name,
               WEXITSTATUS(status));
}

TEST(Fork, AChildIsRefusedAndItsParentGoesOn) {
    on_each_backend({Backend::kThreads, Backend::kProcesses, Backend::kHosts}, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = busy_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 77);
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            A2sgdRank a2sgd(context, {{ncclFloat32, 100}}, a2sgd_config());
            const Inherited parents{context.comm(), group, layer, a2sgd};
            layer.round_trip();
            // One rank after the other has a child, and the others wait for it or are far ahead.
            in_child(context, "use what it inherited", [&] { return use(parents); });
            layer.round_trip();
            in_child(context, "destroy what it inherited", [&] { return destroy(parents); });
            layer.round_trip();
            in_child(context, "make its own", [&] { return make_its_own(parents); });
            in_child(context, "end", [&] { return just_end(parents); });
            layer.round_trip();
            context.barrier();
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
