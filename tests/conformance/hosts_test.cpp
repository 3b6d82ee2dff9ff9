// SPDX-License-Identifier: Apache-2.0
// Three hosts with a network between them: results are the same, a cut cable and a dead host are named within the
// timeout, and with masks the others go on. Where namespaces are not allowed these tests say so.
#include "backends/host_network.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "conformance/support/fault_support.h"

namespace crossdock::testing {
namespace {

constexpr int kHosts = 3;

// So long may a healthy host take no data on a busy machine; ranks end as long after they have lost one.
constexpr const char* kNetworkTimeoutMs = "5000";

// Runs `program` on three hosts.
void on_three_hosts(int ranks_per_host, const std::vector<int>& doomed,
                    const std::function<RankProgram(HostNetwork& network)>& make_program) {
    if (!backend_is_selected(Backend::kHosts)) GTEST_SKIP() << "it does not concern the selected backends";
    if (const std::string why = why_unavailable(Backend::kHosts); !why.empty()) GTEST_SKIP() << why;
    if (const std::string why = HostNetwork::why_impossible(); !why.empty()) GTEST_SKIP() << why;
    HostNetwork network(kHosts);
    BackendSpec spec;
    spec.kind = Backend::kHosts;
    spec.network = &network;
    spec.ranks_per_host = ranks_per_host;
    spec.doomed = doomed;
    setenv("CROSSDOCK_NETWORK_TIMEOUT_MS", kNetworkTimeoutMs, 1);
    const RunReport report = run_ranks(spec, kHosts * ranks_per_host, make_program(network));
    unsetenv("CROSSDOCK_NETWORK_TIMEOUT_MS");
    for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
}

// What UCX has to say reaches nobody's terminal. It would warn of a variable that it does not know.
TEST(Hosts, UcxPrintsNothing) {
    on_each_backend({Backend::kHosts}, [](const BackendSpec& backend) {
        BackendSpec spec = backend;
        spec.ranks_per_host = 1;
        char name[] = "/tmp/crossdock_printed_XXXXXX";
        const int file = mkstemp(name);
        unlink(name);
        std::fflush(nullptr);
        const int terminal[] = {dup(STDOUT_FILENO), dup(STDERR_FILENO)};
        for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) dup2(file, stream);
        setenv("UCX_OF_NO_MEANING", "1", 1);
        const RunReport report = run_ranks(spec, 2, [](RankContext& context) {
            RANK_OK(context, crossdockCommBarrier(context.comm()));
            std::fflush(nullptr);
        });
        unsetenv("UCX_OF_NO_MEANING");
        std::fflush(nullptr);
        for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) {
            dup2(terminal[stream - STDOUT_FILENO], stream);
            close(terminal[stream - STDOUT_FILENO]);
        }
        std::string printed(4096, '\0');
        const ssize_t bytes = pread(file, printed.data(), printed.size(), 0);
        close(file);
        printed.resize(static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
        EXPECT_EQ(printed, "");
        EXPECT_EQ(report.failures, std::vector<std::string>());
    });
}

TEST(Hosts, ThreeReachEachOther) {
    on_three_hosts(2, {}, [](HostNetwork&) -> RankProgram {
        return [](RankContext& context) {
            for (uint64_t seed = 1; seed <= 4; ++seed) {
                Problem problem = random_problem(seed, {.num_ranks = 6, .most_row_bytes = 16384});
                problem.layout = seed % 2 == 0 ? NCCL_EP_LAYOUT_EXPERT_MAJOR : NCCL_EP_LAYOUT_RANK_MAJOR;
                Group group(context, problem);
                Layer layer(context, group.get(), problem);
                layer.round_trip();
                layer.route(rerouted(problem, seed + 1000));
                layer.round_trip();
                crossdockTraffic_t traffic = CROSSDOCK_TRAFFIC_INIT;
                RANK_OK(context, crossdockGroupTraffic(group.get(), &traffic));
                const int team = options().lsa_team_size.value_or(2);
                RANK_CHECK(context, traffic.lsa_team_size == team && traffic.puts > 0, "teams of {}, {} puts",
                           traffic.lsa_team_size, traffic.puts);
            }
        };
    });
}

// 2 ms and 10 MB/s a cable, so that frames pile up in sockets and arrive in pieces.
TEST(Hosts, SlowCablesChangeNothing) {
    on_three_hosts(1, {}, [](HostNetwork& network) -> RankProgram {
        return [&network](RankContext& context) {
            if (context.rank() == 0) network.slow_down(2000, 10'000);
            context.barrier();
            for (uint64_t seed = 1; seed <= 2; ++seed) {
                Problem problem = random_problem(seed, {.num_ranks = 3, .most_row_bytes = 16384});
                Group group(context, problem);
                Layer layer(context, group.get(), problem);
                for (int trip = 0; trip < 3; ++trip) layer.round_trip();
            }
        };
    });
}

// What was lost is sent again, as long as nobody's time is over.
TEST(Hosts, AMendedCableLosesNothing) {
    on_three_hosts(1, {}, [](HostNetwork& network) -> RankProgram {
        return [&network](RankContext& context) {
            const Problem problem = busy_problem(kHosts, NCCL_EP_LAYOUT_RANK_MAJOR, 5);
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            layer.round_trip();
            network.meet(kHosts);
            if (context.rank() == 2) {
                network.cut(2);
                RANK_OK(context, layer.send_dispatch());
                usleep(300'000);
                network.mend(2);
                RANK_OK(context, layer.complete());
            } else {
                RANK_OK(context, layer.dispatch());
            }
            for (int trip = 0; trip < 3; ++trip) layer.round_trip();
        };
    });
}

TEST(Hosts, ACutCableIsNamed) {
    LostRanks lost_ranks;
    constexpr int kCut = 1;
    on_three_hosts(1, {}, [&](HostNetwork& network) -> RankProgram {
        return [&](RankContext& context) {
            const Problem problem = busy_problem(kHosts, NCCL_EP_LAYOUT_EXPERT_MAJOR, 1);
            ncclEpGroupConfig_t config = group_config_for(context, problem);
            config.timeout_ns = short_timeout_ns(context);
            Group group(context, context.comm(), config);
            Layer layer(context, group.get(), problem);
            layer.round_trip();
            // Not over the network, which may have words of a barrier under way.
            network.meet(kHosts);
            if (context.rank() == kCut) network.cut(kCut);
            step_until_failure(context, layer);
            lost_ranks.note(context.rank(), diagnosed_peer(context, group.get()));
            // What the host says to the others is bounded, too.
            setenv("CROSSDOCK_JOIN_TIMEOUT_MS", "500", 1);
            RANK_REFUSED(context, ncclRemoteError, context.rank() == kCut ? "rank" : "rank 1",
                         crossdockCommBarrier(context.comm()));
        };
    });
    if (IsSkipped()) return;
    EXPECT_EQ(lost_ranks.complaint(kHosts, kCut, true), "");
}

// Its ranks end without a word on the network.
TEST(Hosts, TheOthersGoOnWithoutADeadHost) {
    constexpr int kDead = 1;
    on_three_hosts(2, {2, 3}, [](HostNetwork& network) -> RankProgram {
        return [&](RankContext& context) {
            const Problem problem = busy_problem(6, NCCL_EP_LAYOUT_RANK_MAJOR, 1);
            Group group(context, context.comm(), mask_config(context, problem, short_timeout_ns(context)));
            Layer layer(context, group.get(), problem);
            degraded_step(context, group.get(), layer);
            network.meet(6);
            if (context.rank() / 2 == kDead) {
                network.cut(kDead);
                raise(SIGKILL);
            }
            for (int step = 0; step < 4; ++step) degraded_step(context, group.get(), layer);
            const ActiveRanks survivors = {1, 1, 0, 0, 1, 1};
            RANK_CHECK(context, query_mask(context, group.get()) == survivors, "not exactly host 1 is masked");
            RANK_CHECK(context, async_error(context, group.get()) == 1, "no asynchronous error");
            RANK_CHECK(context, diagnosed_peer(context, group.get()) / 2 == kDead, "the wrong host is named");
        };
    });
}

}  // namespace
}  // namespace crossdock::testing
