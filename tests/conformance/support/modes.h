// SPDX-License-Identifier: Apache-2.0
// The two modes, for tests that ask the same of both.
#pragma once

#include <gtest/gtest.h>

#include <span>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {

inline bool is_ht(ncclEpAlgorithm_t mode) { return mode == kHighThroughput; }

// The operations of a step, which a test may run one by one: in low latency dispatch and combine; in high throughput an
// update, then both forward and backward.
struct Phase {
    enum Operation { kUpdate, kDispatch, kCombine } operation;
    ncclEpPassDir_t direction = NCCL_EP_FWD_PASS;
    const char* name() const;  // as diagnoses have it
};
std::span<const Phase> phases_of(ncclEpAlgorithm_t mode);
inline int num_phases(ncclEpAlgorithm_t mode) { return static_cast<int>(phases_of(mode).size()); }

// Phase number `phase` of the layer's mode.
void prepare_phase(Layer& layer, int phase);
ncclResult_t run_phase(Layer& layer, int phase);
void check_phase(Layer& layer, int phase);

}  // namespace crossdock::testing

// A test of each mode: suite.name with mode kLowLatency, Htsuite.name with kHighThroughput.
#define TEST_BOTH_MODES(suite, name)                                                 \
    void suite##_##name(ncclEpAlgorithm_t mode);                                     \
    TEST(suite, name) { suite##_##name(::crossdock::testing::kLowLatency); }         \
    TEST(Ht##suite, name) { suite##_##name(::crossdock::testing::kHighThroughput); } \
    void suite##_##name(ncclEpAlgorithm_t mode)
