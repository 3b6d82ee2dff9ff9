// SPDX-License-Identifier: Apache-2.0
#include "bench/overlap.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <library_types.h>

#include <array>
#include <stdexcept>
#include <vector>

#include "tools/common/bfloat16.h"
#include "tools/common/nccl_library.h"
#include "tools/common/random.h"

namespace crossdock::bench {
namespace {

constexpr const char* kCublas = "libcublas.so.13";

// The part of cuBLAS's interface that is used here.
using CublasHandle = void*;
constexpr int kNotTransposed = 0;    // CUBLAS_OP_N
constexpr int kComputeFloat32 = 68;  // CUBLAS_COMPUTE_32F
constexpr int kDefaultAlgorithm = -1;
using CublasCreate = int (*)(CublasHandle*);
using CublasDestroy = int (*)(CublasHandle);
using CublasSetStream = int (*)(CublasHandle, cudaStream_t);
using CublasGemmEx = int (*)(CublasHandle, int, int, int, int, int, const void*, const void*, cudaDataType, int,
                             const void*, cudaDataType, int, const void*, void*, cudaDataType, int, int, int);

class Product {
  public:
    Product(void* library, tools::Device& device)
        : destroy_(resolve<CublasDestroy>(library, "cublasDestroy_v2")),
          gemm_(resolve<CublasGemmEx>(library, "cublasGemmEx")),
          left_(device, random_matrix(1)),
          right_(device, random_matrix(2)),
          result_(device, kNumElements) {
        check(resolve<CublasCreate>(library, "cublasCreate_v2")(&handle_), "cublasCreate");
        check(resolve<CublasSetStream>(library, "cublasSetStream_v2")(handle_, device.stream()), "cublasSetStream");
    }
    ~Product() { destroy_(handle_); }
    Product(const Product&) = delete;
    Product& operator=(const Product&) = delete;

    void enqueue() {
        constexpr float kOne = 1;
        constexpr float kZero = 0;
        check(gemm_(handle_, kNotTransposed, kNotTransposed, kProductEdge, kProductEdge, kProductEdge, &kOne,
                    left_.data(), CUDA_R_16BF, kProductEdge, right_.data(), CUDA_R_16BF, kProductEdge, &kZero,
                    result_.data(), CUDA_R_16BF, kProductEdge, kComputeFloat32, kDefaultAlgorithm),
              "cublasGemmEx");
    }

  private:
    static constexpr size_t kNumElements = size_t{kProductEdge} * kProductEdge;

    template <class Function>
    static Function resolve(void* library, const char* name) {
        const auto function = reinterpret_cast<Function>(dlsym(library, name));
        if (function == nullptr) {
            throw std::runtime_error(fmt::format("{} has no function {}", kCublas, name));
        }
        return function;
    }

    static void check(int status, const char* call) {
        if (status != 0) {
            throw std::runtime_error(fmt::format("{} failed with {}", call, status));
        }
    }

    // Zeros would need less power, and so less time.
    static std::vector<uint16_t> random_matrix(uint64_t seed) {
        tools::Random random(seed);
        std::vector<uint16_t> elements(kNumElements);
        for (uint16_t& element : elements) {
            element = tools::float_to_bfloat16(random.symmetric());
        }
        return elements;
    }

    CublasDestroy destroy_;
    CublasGemmEx gemm_;
    tools::DeviceArray<uint16_t> left_;
    tools::DeviceArray<uint16_t> right_;
    tools::DeviceArray<uint16_t> result_;
    CublasHandle handle_ = nullptr;
};

class CublasOverlap : public GpuOverlap {
  public:
    CublasOverlap(void* library, tools::Device& device, GpuGate& gate)
        : device_(device), gate_(gate), product_(library, device) {
        for (cudaEvent_t& event : events_) {
            tools::check_cuda(cudaEventCreate(&event), "cudaEventCreate");
        }
        // The first product loads and allocates, which must not happen behind a closed gate.
        product_.enqueue();
        device.synchronize();
    }
    ~CublasOverlap() override {
        for (cudaEvent_t event : events_) {
            cudaEventDestroy(event);
        }
    }

    OverlapSample run(const std::function<void()>& send, const std::function<void()>& complete) override {
        enum { kAlone, kAloneEnd, kSend, kBetween, kComplete, kEnd };
        gate_.close();
        gate_.meet();
        product_.enqueue();
        record(kAlone);
        product_.enqueue();
        record(kAloneEnd);
        product_.enqueue();
        gate_.meet();
        record(kSend);
        send();
        record(kBetween);
        product_.enqueue();
        record(kComplete);
        complete();
        record(kEnd);
        gate_.open();
        device_.synchronize();
        return {elapsed_us(kAlone), elapsed_us(kBetween), elapsed_us(kSend), elapsed_us(kComplete)};
    }

  private:
    void record(size_t index) {
        tools::check_cuda(cudaEventRecord(events_[index], device_.stream()), "cudaEventRecord");
    }

    // To the next event.
    double elapsed_us(size_t index) {
        float milliseconds = 0;
        tools::check_cuda(cudaEventElapsedTime(&milliseconds, events_[index], events_[index + 1]),
                          "cudaEventElapsedTime");
        return milliseconds * 1e3;
    }

    tools::Device& device_;
    GpuGate& gate_;
    Product product_;
    std::array<cudaEvent_t, 6> events_{};
};

}  // namespace

std::unique_ptr<GpuOverlap> make_gpu_overlap(tools::Device& device, GpuGate& gate, std::string& why) {
    void* library = dlopen(kCublas, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        why = fmt::format("{} (its folder belongs into LD_LIBRARY_PATH)", dlerror());
        return nullptr;
    }
    return std::make_unique<CublasOverlap>(library, device, gate);
}

}  // namespace crossdock::bench
