// SPDX-License-Identifier: Apache-2.0
// The clock of CPU ranks' waits in tests: never faster than real time, and as slow as the rank that gets least of a
// busy machine. With it a short timeout loses ranks that stay away, and no others.
#pragma once

namespace crossdock::testing {

// Shared with processes that are forked while it lives. One at a time.
//
// It moves by a small step whenever every rank that lives has looked at it since the last step. A rank looks while it
// waits, in a kernel or in a barrier, and only then; so the clock stands still while a rank computes, or has what it
// waited for but no core to go on.
class PatientClock {
  public:
    explicit PatientClock(int num_ranks);
    ~PatientClock();
    PatientClock(const PatientClock&) = delete;
    PatientClock& operator=(const PatientClock&) = delete;

    // This thread is the rank from now on. Other threads keep their clock.
    static void start(int rank);
    // The rank has ended, or was killed. From any thread or process.
    static void end(int rank);
};

}  // namespace crossdock::testing
