// SPDX-License-Identifier: Apache-2.0
// Failure reports: a rank that fails because it has lost another one says which, before its call returns. So peers that
// find it gone name the rank that was lost first, even if the program ends the reporter at once.
#pragma once

namespace crossdock::cpu {

// The rank to name if `peer` is gone. report_of(rank): the rank whose loss that one has reported; -1: none. A rank does
// not name itself: if it is reported as lost, it names the reporter.
template <typename ReportOf>
int follow_reports(int peer, int own_rank, int num_ranks, ReportOf report_of) {
    int named = peer;
    for (int steps = 0; steps < num_ranks; ++steps) {
        const int lost = report_of(named);
        if (lost < 0 || lost >= num_ranks || lost == own_rank) break;
        named = lost;
    }
    return named;
}

}  // namespace crossdock::cpu
