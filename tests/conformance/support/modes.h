// SPDX-License-Identifier: Apache-2.0
// The two modes, for tests that ask the same of both.
#pragma once

#include <gtest/gtest.h>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {

// Each with the operations of its step as phases, which a test may run one by one.
struct LowLatency {
    static constexpr bool kIsHt = false;
    static constexpr ncclEpAlgorithm_t kAlgorithm = NCCL_EP_ALGO_LOW_LATENCY;
    static constexpr const auto& kLayouts = kLlLayouts;

    static constexpr const char* kPhases[] = {"dispatch", "combine"};
    static void prepare(Layer& layer, int phase);
    static ncclResult_t run(Layer& layer, int phase);
    static void check(Layer& layer, int phase);
};

struct HighThroughput {
    static constexpr bool kIsHt = true;
    static constexpr ncclEpAlgorithm_t kAlgorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    static constexpr const auto& kLayouts = kHtLayouts;

    // Forward, then backward.
    static constexpr const char* kPhases[] = {"update", "dispatch", "combine", "dispatch", "combine"};
    static void prepare(Layer& layer, int phase);
    static ncclResult_t run(Layer& layer, int phase);
    static void check(Layer& layer, int phase);
};

template <typename Mode>
constexpr int num_phases() {
    return static_cast<int>(std::size(Mode::kPhases));
}

}  // namespace crossdock::testing

// A test of each mode: suite.name with Mode = LowLatency, Htsuite.name with Mode = HighThroughput.
#define TEST_BOTH_MODES(suite, name)                                                  \
    template <typename Mode>                                                          \
    void suite##_##name();                                                            \
    TEST(suite, name) { suite##_##name<::crossdock::testing::LowLatency>(); }         \
    TEST(Ht##suite, name) { suite##_##name<::crossdock::testing::HighThroughput>(); } \
    template <typename Mode>                                                          \
    void suite##_##name()
