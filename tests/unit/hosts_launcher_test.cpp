// SPDX-License-Identifier: Apache-2.0
// What torchrun, mpirun and srun put into the environment is understood, and what is missing or contradicts gets a
// message with the variable's name and value; ranks must be laid out evenly over hosts.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "core/error.h"
#include "fabric/hosts/launcher.h"
#include "fabric/hosts/layout.h"
#include "messages.h"

namespace crossdock::hosts {
namespace {

using Environment = std::map<std::string, std::string>;

Launch read(const Environment& environment) {
    return read_launch([&](const char* name) -> const char* {
        const auto found = environment.find(name);
        return found == environment.end() ? nullptr : found->second.c_str();
    });
}

Environment with(Environment environment, const Environment& changes) {
    for (const auto& [name, value] : changes) environment[name] = value;
    return environment;
}

// The message, which must contain all words.
void expect_refused(const Environment& environment, const std::vector<std::string>& words) {
    expect_mentions(message_of([&] { read(environment); }, ncclInvalidUsage), words);
}

const Environment kTorchrun = {{"RANK", "5"},
                               {"WORLD_SIZE", "8"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "node-a"},
                               {"MASTER_PORT", "29500"}};
const Environment kMpirun = {{"OMPI_COMM_WORLD_RANK", "2"},
                             {"OMPI_COMM_WORLD_SIZE", "4"},
                             {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                             {"CROSSDOCK_ADDRESS", "node-a:7000"}};
const Environment kSrun = {{"SLURM_PROCID", "3"},  {"SLURM_NTASKS", "6"},  {"SLURM_LOCALID", "1"},
                           {"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NODELIST", "gpu[03-04,07],x1"}};

TEST(HostsLauncher, TorchrunIsUnderstood) {
    const Launch launch = read(kTorchrun);
    EXPECT_EQ(launch.rank, 5);
    EXPECT_EQ(launch.num_ranks, 8);
    EXPECT_EQ(launch.local_ranks, 4);
    EXPECT_EQ(launch.address, "node-a:29501");  // torch itself listens on the port
    EXPECT_EQ(read(with(kTorchrun, {{"MASTER_ADDR", "fe80::1"}})).address, "[fe80::1]:29501");
}

TEST(HostsLauncher, MpirunIsUnderstood) {
    const Launch launch = read(kMpirun);
    EXPECT_EQ(launch.rank, 2);
    EXPECT_EQ(launch.num_ranks, 4);
    EXPECT_EQ(launch.local_ranks, 2);
    EXPECT_EQ(launch.address, "node-a:7000");
    // All ranks on this host: its address is known.
    EXPECT_EQ(read(with(kMpirun, {{"CROSSDOCK_ADDRESS", ""}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}))
                  .address.find("localhost:1"),
              0u);
    // With any process between mpirun and the ranks, a job has one port on its host.
    const Environment local = with(kMpirun, {{"CROSSDOCK_ADDRESS", ""}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}});
    const std::string address = read(with(local, {{"PMIX_NAMESPACE", "job-1"}})).address;
    EXPECT_EQ(read(with(local, {{"PMIX_NAMESPACE", "job-1"}})).address, address);
    EXPECT_NE(read(with(local, {{"PMIX_NAMESPACE", "job-2"}})).address, address);
    const Launch other = read({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"CROSSDOCK_ADDRESS", "[::1]:7000"}});
    EXPECT_EQ(other.num_ranks, 2);
    EXPECT_FALSE(other.local_ranks.has_value());
}

TEST(HostsLauncher, SrunIsUnderstood) {
    const Launch launch = read(kSrun);
    EXPECT_EQ(launch.rank, 3);
    EXPECT_EQ(launch.num_ranks, 6);
    EXPECT_EQ(launch.address, "gpu03:21232");
    EXPECT_EQ(read(with(kSrun, {{"SLURM_STEP_ID", "1"}})).address, "gpu03:21233");
    for (const auto& [list, first] : {std::pair("one", "one:"), std::pair("a,b", "a:"), std::pair("a[1,3]", "a1:"),
                                      std::pair("a[08]", "a08:"), std::pair("a[2-3]-ib,b", "a2-ib:")}) {
        EXPECT_EQ(read(with(kSrun, {{"SLURM_STEP_NODELIST", list}})).address.find(first), 0u) << list;
    }
}

// Slurm's PMI-2 plugin sets variables that MPICH's mpirun sets too.
TEST(HostsLauncher, SrunIsUnderstoodWithPmi2) {
    const Environment pmi2 = with(kSrun, {{"PMI_RANK", "3"}, {"PMI_SIZE", "6"}});
    EXPECT_EQ(read(pmi2).launcher, "srun");
    EXPECT_EQ(read(pmi2).address, "gpu03:21232");
    const Environment hydra = with(pmi2, {{"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "6"}});
    EXPECT_EQ(read(hydra).launcher, "mpirun");
}

TEST(HostsLauncher, TheInnermostLauncherCounts) {
    EXPECT_EQ(read(with(kSrun, kTorchrun)).launcher, "torchrun");
    EXPECT_EQ(read(with(kSrun, kMpirun)).launcher, "mpirun");
    const Environment own = {{"CROSSDOCK_RANK", "0"}, {"CROSSDOCK_NUM_RANKS", "1"}, {"CROSSDOCK_ADDRESS", "a:1"}};
    EXPECT_EQ(read(with(kTorchrun, own)).num_ranks, 1);
}

// What tells jobs of a launcher apart, or what the user says.
TEST(HostsLauncher, JobsAreTold) {
    EXPECT_EQ(read(with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "run 7"}})).job, "torchrun-run 7");
    EXPECT_EQ(read(with(kMpirun, {{"PMIX_NAMESPACE", "prterun-5"}})).job, "mpirun-prterun-5");
    const std::string step_1 = read(with(kSrun, {{"SLURM_STEP_ID", "1"}})).job;
    EXPECT_EQ(step_1.find("srun-"), 0u);
    EXPECT_NE(read(with(kSrun, {{"SLURM_STEP_ID", "2"}})).job, step_1);
    EXPECT_EQ(read(kMpirun).job, "");
    EXPECT_EQ(read(with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "7"}, {"CROSSDOCK_JOB", "mine"}})).job, "mine");
    // Of the launcher that counts.
    EXPECT_EQ(read(with(with(kSrun, kTorchrun), {{"TORCHELASTIC_RUN_ID", "7"}})).job, "torchrun-7");
}

TEST(HostsLauncher, NamesContradictions) {
    expect_refused({}, {"no launcher", "OMPI_COMM_WORLD_RANK"});
    expect_refused({{"RANK", "0"}}, {"WORLD_SIZE is not set", "RANK"});
    expect_refused(with(kTorchrun, {{"RANK", "8"}}), {"RANK is 8", "WORLD_SIZE", "8"});
    expect_refused(with(kTorchrun, {{"RANK", "x"}}), {"RANK is 'x'"});
    expect_refused(with(kTorchrun, {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE is '0'", "allowed: 1.."});
    expect_refused(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}}), {"LOCAL_WORLD_SIZE is 9", "WORLD_SIZE", "8"});
    expect_refused(with(kTorchrun, {{"LOCAL_RANK", "4"}}), {"LOCAL_RANK is 4", "LOCAL_WORLD_SIZE"});
    expect_refused(with(kTorchrun, {{"MASTER_ADDR", ""}}), {"MASTER_ADDR is not set"});
    expect_refused(with(kTorchrun, {{"MASTER_PORT", "65535"}}), {"MASTER_PORT is '65535'"});
    expect_refused(with(kMpirun, {{"CROSSDOCK_ADDRESS", ""}}), {"CROSSDOCK_ADDRESS is not set", "rank 2 of 4"});
    expect_refused(with(kSrun, {{"SLURM_STEP_NODELIST", ""}}), {"SLURM_STEP_NODELIST is not set"});
    expect_refused(with(kSrun, {{"SLURM_STEP_NODELIST", "a[3"}}), {"SLURM_STEP_NODELIST is 'a[3'"});
}

HostLayout layout_of(const std::vector<uint64_t>& hosts, int rank) {
    std::vector<std::string> names;
    for (const uint64_t host : hosts) names.push_back(fmt::format("h{}", host));
    return lay_out(hosts, names, rank);
}

TEST(HostsLayout, RanksOfAHostAreAdjacent) {
    const HostLayout layout = layout_of({7, 7, 3, 3, 5, 5}, 3);
    EXPECT_EQ(layout.ranks_per_host, 2);
    EXPECT_FALSE(layout.is_local(1));
    EXPECT_TRUE(layout.is_local(2) && layout.is_local(3));
    EXPECT_FALSE(layout.is_local(4));
    EXPECT_EQ(layout_of({1}, 0).ranks_per_host, 1);
}

TEST(HostsLayout, UnevenHostsAreRefused) {
    const auto message_for = [](const std::vector<uint64_t>& hosts) {
        return message_of([&] { layout_of(hosts, 0); }, ncclInvalidUsage);
    };
    expect_mentions(message_for({1, 1, 2}), {"h1 has 2 ranks", "h2 has 1"});
    expect_mentions(message_for({1, 2, 1, 2}), {"ranks 0 and 2", "host h1"});
}

}  // namespace
}  // namespace crossdock::hosts
