// SPDX-License-Identifier: Apache-2.0
// The end of a peer's process is reported to a warp after one more poll, so that the warp sees the peer's last writes.
// The report names the rank that ended first, or that was lost when others left.
#include "runtime/cpu/ended_peers.h"

#include <gtest/gtest.h>

namespace crossdock::cpu {
namespace {

TEST(EndedPeers, AreReportedAfterOneMorePoll) {
    PeerEnd ends[3] = {PeerEnd::kNone, PeerEnd::kNone, PeerEnd::kLeft};
    int num_looks = 0;
    EndedPeers peers(3, [&](int rank) {
        if (rank == 0) ++num_looks;
        return ends[rank];
    });
    const auto look_again = [&] {
        const int before = num_looks;
        while (num_looks == before) peers.look();
    };
    uint32_t told = 0;
    uint32_t told_another = 0;
    EXPECT_EQ(peers.first_ended(2, told), -1) << "before the first look";
    look_again();
    EXPECT_EQ(peers.first_ended(0, told_another), -1);
    EXPECT_EQ(peers.first_ended(2, told), -1) << "not polled since";
    EXPECT_EQ(peers.first_ended(2, told), 2);
    EXPECT_EQ(peers.first_ended(2, told_another), 2) << "polled since, for another rank";
    EXPECT_EQ(peers.first_ended(0, told), -1) << "it is alive";
    ends[0] = PeerEnd::kLost;
    look_again();
    EXPECT_EQ(peers.first_ended(0, told), -1) << "not polled since";
    EXPECT_EQ(peers.first_ended(0, told), 2) << "2 ended first";
    EXPECT_EQ(peers.first_ended(1, told), -1);
}

TEST(EndedPeers, ALostRankIsReportedBeforeRanksThatLeft) {
    const PeerEnd ends[3] = {PeerEnd::kLeft, PeerEnd::kNone, PeerEnd::kLost};
    EndedPeers peers(3, [&](int rank) { return ends[rank]; });
    peers.look();
    uint32_t told = 0;
    EXPECT_EQ(peers.first_ended(0, told), -1) << "not polled since";
    EXPECT_EQ(peers.first_ended(0, told), 2);
}

}  // namespace
}  // namespace crossdock::cpu
