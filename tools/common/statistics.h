// SPDX-License-Identifier: Apache-2.0
// What is reported of a set of timings.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace crossdock::tools {

struct Spread {
    double median = 0;
    double p99 = 0;
    double min = 0;
    double max = 0;
    double mean = 0;
    int count = 0;
};

// The smallest sample that at least `part` of all samples do not exceed; samples sorted and not empty.
inline double percentile(const std::vector<double>& sorted, double part) {
    const auto rank = static_cast<size_t>(std::ceil(part * static_cast<double>(sorted.size())));
    return sorted[std::clamp<size_t>(rank, 1, sorted.size()) - 1];
}

// All zero for no samples.
inline Spread spread_of(std::vector<double> samples) {
    if (samples.empty()) {
        return {};
    }
    std::sort(samples.begin(), samples.end());
    double sum = 0;
    for (double sample : samples) {
        sum += sample;
    }
    const size_t middle = samples.size() / 2;
    const double median = samples.size() % 2 == 1 ? samples[middle] : (samples[middle - 1] + samples[middle]) / 2;
    return {median,
            percentile(samples, 0.99),
            samples.front(),
            samples.back(),
            sum / static_cast<double>(samples.size()),
            static_cast<int>(samples.size())};
}

}  // namespace crossdock::tools
