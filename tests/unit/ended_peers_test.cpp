// SPDX-License-Identifier: Apache-2.0
// The end of a peer's process is reported to a warp after one more poll, so that the warp sees the peer's last writes.
// The rank to name is the one that failure reports lead to.
#include "runtime/cpu/ended_peers.h"

#include <gtest/gtest.h>

#include <vector>

#include "runtime/cpu/failure_reports.h"

namespace crossdock::cpu {
namespace {

struct Losses : PeerLosses {
    bool has_ended(int rank) override {
        if (rank == 0) ++num_looks;
        return ended[rank];
    }
    int rank_to_name(int rank) override { return named[rank]; }
    void report_loss(int rank) override { reported = rank; }
    bool ended[3] = {};
    int named[3] = {0, 1, 2};
    int reported = -1;
    int num_looks = 0;
};

TEST(EndedPeers, AreReportedAfterOneMorePoll) {
    Losses losses;
    losses.ended[2] = true;
    EndedPeers peers(3, losses);
    const auto look_again = [&] {
        const int before = losses.num_looks;
        while (losses.num_looks == before) peers.look();
    };
    uint32_t told = 0;
    uint32_t told_another = 0;
    EXPECT_EQ(peers.rank_to_name(2, told), -1) << "before the first look";
    look_again();
    EXPECT_EQ(peers.rank_to_name(0, told_another), -1);
    EXPECT_EQ(peers.rank_to_name(2, told), -1) << "not polled since";
    EXPECT_EQ(peers.rank_to_name(2, told), 2);
    EXPECT_EQ(peers.rank_to_name(2, told_another), 2) << "polled since, for another rank";
    EXPECT_EQ(peers.rank_to_name(0, told), -1) << "it is alive";
    losses.ended[0] = true;
    look_again();
    EXPECT_EQ(peers.rank_to_name(0, told), -1) << "not polled since";
    EXPECT_EQ(peers.rank_to_name(0, told), 0) << "it was needed, though 2 ended first";
    losses.named[0] = 1;
    EXPECT_EQ(peers.rank_to_name(0, told), 1) << "as the communicator says";
    EXPECT_EQ(peers.rank_to_name(1, told), -1);
    peers.report_loss(1);
    EXPECT_EQ(losses.reported, 1);
}

TEST(EndedPeers, ReportsLeadToTheFirstOne) {
    const auto named = [](int peer, const std::vector<int>& reports) {
        return follow_reports(peer, 0, static_cast<int>(reports.size()),
                              [&](int rank) { return reports[static_cast<size_t>(rank)]; });
    };
    EXPECT_EQ(named(3, {-1, -1, -1, -1}), 3) << "no report";
    EXPECT_EQ(named(3, {-1, -1, -1, 2}), 2);
    EXPECT_EQ(named(3, {-1, -1, 1, 2}), 1) << "over several ranks";
    EXPECT_EQ(named(3, {-1, -1, -1, 0}), 3) << "a rank does not name itself";
    EXPECT_EQ(named(3, {-1, -1, -1, 4}), 3) << "no such rank";
    EXPECT_EQ(named(3, {-1, -1, -1, -7}), 3);
    EXPECT_NE(named(3, {-1, -1, 3, 2}), 0) << "ranks that report each other end the search";
}

}  // namespace
}  // namespace crossdock::cpu
