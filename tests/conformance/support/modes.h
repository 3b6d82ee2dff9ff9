// SPDX-License-Identifier: Apache-2.0
// The two modes, for tests that ask the same of both.
#pragma once

#include <gtest/gtest.h>

#include "conformance/ht/random_problem.h"
#include "conformance/support/options.h"

namespace crossdock::testing {

struct LowLatency {
    using Problem = testing::Problem;
    using Layer = testing::Layer;
    static constexpr bool kIsHt = false;
    static constexpr ncclEpLayout_t kLayouts[] = {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR};
};

struct HighThroughput {
    using Problem = HtProblem;
    using Layer = HtLayer;
    static constexpr bool kIsHt = true;
    static constexpr ncclEpLayout_t kLayouts[] = {NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR};
};

}  // namespace crossdock::testing

// A test of each mode: suite.name with Mode = LowLatency, Htsuite.name with Mode = HighThroughput.
#define TEST_BOTH_MODES(suite, name)                                                  \
    template <typename Mode>                                                          \
    void suite##_##name();                                                            \
    TEST(suite, name) { suite##_##name<::crossdock::testing::LowLatency>(); }         \
    TEST(Ht##suite, name) { suite##_##name<::crossdock::testing::HighThroughput>(); } \
    template <typename Mode>                                                          \
    void suite##_##name()
