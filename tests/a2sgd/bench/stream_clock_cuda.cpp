// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "tests/a2sgd/bench/stream_clock.h"

namespace crossdock::bench {
namespace {

void check_cuda(cudaError_t result, const char* call) {
    if (result != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(result));
}

class CudaClock : public StreamClock {
  public:
    explicit CudaClock(cudaStream_t stream) : stream_(stream) {}
    ~CudaClock() override { forget(); }
    CudaClock(const CudaClock&) = delete;
    CudaClock& operator=(const CudaClock&) = delete;

    void mark() override {
        cudaEvent_t event = nullptr;
        check_cuda(cudaEventCreate(&event), "cudaEventCreate");
        marks_.push_back(event);
        check_cuda(cudaEventRecord(event, stream_), "cudaEventRecord");
    }
    std::vector<double> laps_us() override {
        check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
        std::vector<double> laps;
        for (size_t i = 1; i < marks_.size(); ++i) {
            float ms = 0;
            check_cuda(cudaEventElapsedTime(&ms, marks_[i - 1], marks_[i]), "cudaEventElapsedTime");
            laps.push_back(1000.0 * static_cast<double>(ms));
        }
        forget();
        return laps;
    }
    void copy(void* target, const void* source, size_t bytes) override {
        check_cuda(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
    }

  private:
    void forget() {
        for (cudaEvent_t event : marks_) static_cast<void>(cudaEventDestroy(event));
        marks_.clear();
    }

    cudaStream_t stream_;
    std::vector<cudaEvent_t> marks_;
};

}  // namespace

std::string name_of_gpu() {
    cudaDeviceProp properties;
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    return properties.name;
}

std::unique_ptr<StreamClock> make_cuda_clock(cudaStream_t stream) { return std::make_unique<CudaClock>(stream); }

}  // namespace crossdock::bench
