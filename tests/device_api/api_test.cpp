// SPDX-License-Identifier: Apache-2.0
// NCCL's Device API, call by call: the kernels of api_kernels.h end without a message over threads, over processes and
// with many seeds of the simulator, which here sees every load and store.
#include "api_kernels.h"

#include <gtest/gtest.h>

#include "run.h"

namespace {

constexpr uint64_t kSeeds = 200;

void expect_success(const Setup& setup, const Body& body) {
    EXPECT_EQ(on_threads(setup, body), "") << "threads";
    EXPECT_EQ(on_processes(setup, body), "") << "processes";
    EXPECT_EQ(in_simulations(setup, kSeeds, body), "");
}

TEST(Api, GetsArriveBeforeTheirFlushReturns) { expect_success({.ranks = 3}, launching(1, 4, gets)); }
TEST(Api, GetsArriveBeforeABarriersFence) {
    expect_success({.ranks = 4, .lsa_team = 2}, launching(1, 32, fenced_gets));
}
TEST(Api, VaSignalsCountInWindows) { expect_success({.ranks = 3}, launching(1, 2, va_signals)); }

}  // namespace
