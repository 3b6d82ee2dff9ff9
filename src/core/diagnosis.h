// SPDX-License-Identifier: Apache-2.0
// Turns the record of an expired wait or a peer fault into the public struct and into a message.
#pragma once

#include <string>

#include "core/group_config.h"
#include "crossdock.h"
#include "device/wait_records.h"
#include "kernels/agreement.h"

namespace crossdock {

// Fills in what the record has; does not change diagnosis if no wait has expired.
void read_diagnosis(const ExpiredWait& record, int rank, crossdockDiagnosis_t& diagnosis);

// "rank 2 announced 70000 rows, allowed: at most 128 ...", "top_k is 8 on rank 0, 4 on rank 1 ...". mode: "LL", "HT".
std::string describe(PeerFault fault, int rank, const char* mode);

// ": the layout is flat on rank 0, expert-major on rank 1; ...", or "": what differs between the groups, and between
// the handles, by whose operations the ranks are apart. Terms: null where they do not tell layout and top-k.
struct RankInGroup {
    int rank;
    const GroupConfig& config;
    const Terms* handle;
};
std::string differences_of_groups(const RankInGroup& ours, const RankInGroup& theirs);

// Whether the program has ended the wait; whether rank diagnosis.seen has reported the loss of diagnosis.peer.
bool is_interruption(const crossdockDiagnosis_t& diagnosis);
bool is_report(const crossdockDiagnosis_t& diagnosis);

// "rank 2 timed out after 1000 ms waiting for rank 5 in LL dispatch ...".
std::string describe(const crossdockDiagnosis_t& diagnosis, const char* mode);

}  // namespace crossdock
