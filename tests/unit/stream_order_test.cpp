// SPDX-License-Identifier: Apache-2.0
// A group's operations keep their order across streams, also behind a first half on the default stream, of which
// nothing is recorded until another stream follows.
#include "runtime/cuda/stream_order.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "runtime/cuda/cuda_check.h"

namespace crossdock {
namespace {

constexpr std::chrono::milliseconds kSlow{50};

class StreamOrderTest : public ::testing::TestWithParam<bool> {
  protected:
    void SetUp() override {
        int num_devices = 0;
        if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) GTEST_SKIP() << "no GPU here";
        check_cuda(cudaStreamCreateWithFlags(&other_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        order_ = std::make_unique<CudaStreamOrder>(0);
    }
    void TearDown() override {
        if (other_ == nullptr) return;
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        check_cuda(cudaStreamDestroy(other_), "cudaStreamDestroy");
    }

    void operate(cudaStream_t stream, cudaHostFn_t code, bool rest_follows) {
        EXPECT_FALSE(order_->before_operation(stream));
        check_cuda(cudaLaunchHostFunc(stream, code, this), "cudaLaunchHostFunc");
        order_->after_operation(stream, rest_follows);
    }
    // The first of two operations.
    void operate_slowly(cudaStream_t stream) {
        has_ended_ = came_after_ = false;
        const auto end_late = [](void* test) {
            std::this_thread::sleep_for(kSlow);
            static_cast<StreamOrderTest*>(test)->has_ended_ = true;
        };
        operate(stream, end_late, GetParam());
    }
    // The second one: notes whether the first has ended.
    void operate_quickly(cudaStream_t stream) {
        const auto look = [](void* test) {
            auto& here = *static_cast<StreamOrderTest*>(test);
            here.came_after_ = here.has_ended_.load();
        };
        operate(stream, look, false);
    }

    cudaStream_t other_ = nullptr;
    std::unique_ptr<CudaStreamOrder> order_;
    std::atomic<bool> has_ended_{false};
    std::atomic<bool> came_after_{false};
};

TEST_P(StreamOrderTest, AnotherStreamFollows) {
    for (const cudaStream_t first : {cudaStream_t{nullptr}, cudaStreamLegacy, other_}) {
        operate_slowly(first);
        operate_quickly(first == other_ ? cudaStreamLegacy : other_);
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        EXPECT_TRUE(came_after_) << "first stream: " << first;
    }
}

TEST_P(StreamOrderTest, TheOrderIsIdleWhenAllHasEnded) {
    EXPECT_TRUE(order_->is_idle());
    operate_slowly(nullptr);
    EXPECT_FALSE(order_->is_idle());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    EXPECT_TRUE(order_->is_idle());
}

TEST_P(StreamOrderTest, SynchronizeWaits) {
    operate_slowly(nullptr);
    order_->synchronize();
    EXPECT_TRUE(has_ended_);
}

INSTANTIATE_TEST_SUITE_P(RestFollows, StreamOrderTest, ::testing::Bool());

}  // namespace
}  // namespace crossdock
