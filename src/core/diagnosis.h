// SPDX-License-Identifier: Apache-2.0
// The record that a kernel leaves of a wait that expired, in the public struct's and in a reader's words.
#pragma once

#include <string>

#include "crossdock.h"
#include "device/wait.h"

namespace crossdock {

// Fills what the record knows; leaves diagnosis as it is where no wait has expired.
void read_diagnosis(const ExpiredWait& record, int rank, crossdockDiagnosis_t& diagnosis);

// "rank 2 announced 70000 rows, allowed: at most 128 ...", "top_k is 8 on rank 0, 4 on rank 1 ...". mode: "LL", "HT".
std::string describe(const PeerFault& fault, int rank, const char* mode);

// "rank 2 waited 1000 us for rank 5 in LL dispatch ...".
std::string describe(const crossdockDiagnosis_t& diagnosis, const char* mode);

}  // namespace crossdock
