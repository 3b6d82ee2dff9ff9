// SPDX-License-Identifier: Apache-2.0
// How fast the two passes over a gradient are, beside a copy of as many bytes in the same run.
#pragma once

#include <string>
#include <vector>

#include "tools/common/statistics.h"

namespace crossdock::bench {

struct PassSetting {
    std::string device = "cpu";
    std::string dtype = "fp32";
    bool sums_in_fp64 = false;
    size_t entries = 0;
    int iterations = 20;
};

struct PassResult {
    PassSetting setting;
    tools::Spread copy_us, begin_us, end_us;
    double copy_gb_s = 0;   // read and written
    double begin_gb_s = 0;  // read
    double end_gb_s = 0;    // read and written
};

// One rank. Throws with a message.
PassResult time_passes(const PassSetting& setting);

}  // namespace crossdock::bench
