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

// Host functions of all streams may run one after the other, so only the first operation has one: it then sets a word
// of the device, which the second one copies.
class StreamOrderTest : public ::testing::TestWithParam<bool> {
  protected:
    void SetUp() override {
        int num_devices = 0;
        if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) GTEST_SKIP() << "no GPU here";
        check_cuda(cudaStreamCreateWithFlags(&other_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        check_cuda(cudaMalloc(&word_, sizeof(int)), "cudaMalloc");
        check_cuda(cudaMallocHost(&seen_, sizeof(int)), "cudaMallocHost");
        order_ = std::make_unique<CudaStreamOrder>(0);
    }
    void TearDown() override {
        if (other_ == nullptr) return;
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        check_cuda(cudaFreeHost(seen_), "cudaFreeHost");
        check_cuda(cudaFree(word_), "cudaFree");
        check_cuda(cudaStreamDestroy(other_), "cudaStreamDestroy");
    }

    void operate_slowly(cudaStream_t stream) {
        check_cuda(cudaMemset(word_, 0, sizeof(int)), "cudaMemset");
        has_ended_ = false;
        const auto end_late = [](void* has_ended) {
            std::this_thread::sleep_for(kSlow);
            *static_cast<std::atomic<bool>*>(has_ended) = true;
        };
        EXPECT_FALSE(order_->before_operation(stream));
        check_cuda(cudaLaunchHostFunc(stream, end_late, &has_ended_), "cudaLaunchHostFunc");
        check_cuda(cudaMemsetAsync(word_, 1, sizeof(int), stream), "cudaMemsetAsync");
        order_->after_operation(stream, GetParam());
    }
    void operate_quickly(cudaStream_t stream) {
        EXPECT_FALSE(order_->before_operation(stream));
        check_cuda(cudaMemcpyAsync(seen_, word_, sizeof(int), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
        order_->after_operation(stream, false);
    }

    cudaStream_t other_ = nullptr;
    int* word_ = nullptr;
    int* seen_ = nullptr;
    std::unique_ptr<CudaStreamOrder> order_;
    std::atomic<bool> has_ended_{false};
};

TEST_P(StreamOrderTest, AnotherStreamFollows) {
    for (const cudaStream_t first : {cudaStream_t{nullptr}, cudaStreamLegacy, other_}) {
        operate_slowly(first);
        operate_quickly(first == other_ ? cudaStreamLegacy : other_);
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        EXPECT_NE(*seen_, 0) << "first stream: " << first;
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
