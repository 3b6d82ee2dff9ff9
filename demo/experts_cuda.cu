// SPDX-License-Identifier: Apache-2.0
// The experts on a GPU: one block a row, one thread a column, sums in the order of the index, so that the bits are
// those of the CPU. Compiled with --fmad=false (activation.h).
#include <cuda_bf16.h>

#include <algorithm>
#include <vector>

#include "demo/activation.h"
#include "demo/expert_runner.h"
#include "demo/layer.h"
#include "tools/common/nccl_library.h"

namespace crossdock::demo {
namespace {

constexpr int kThreads = 256;

struct ExpertArguments {
    __nv_bfloat16* rows;  // [num_local][slots][hidden]
    const int32_t* counters;
    const float* gate;  // [num_local][hidden][intermediate]
    const float* up;
    const float* down;  // [num_local][intermediate][hidden]
    int slots;
    int hidden;
    int intermediate;
};

__device__ float round_to_bfloat16(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// The sum over i of inputs[i] * matrix[i][column].
__device__ float column_sum(const float* inputs, int depth, const float* matrix, int num_columns, int column) {
    float sum = 0;
    for (int i = 0; i < depth; ++i) {
        sum += inputs[i] * matrix[static_cast<size_t>(i) * num_columns + column];
    }
    return round_to_bfloat16(sum);
}

__global__ void __launch_bounds__(kThreads) run_row(ExpertArguments arguments) {
    extern __shared__ float shared[];
    float* inputs = shared;
    float* inner = shared + arguments.hidden;
    const int expert = blockIdx.y;
    const int hidden = arguments.hidden;
    const int intermediate = arguments.intermediate;
    const size_t matrix_size = static_cast<size_t>(hidden) * intermediate;
    const float* gate = arguments.gate + expert * matrix_size;
    const float* up = arguments.up + expert * matrix_size;
    const float* down = arguments.down + expert * matrix_size;

    for (int slot = blockIdx.x; slot < arguments.counters[expert]; slot += gridDim.x) {
        __nv_bfloat16* row = arguments.rows + (static_cast<size_t>(expert) * arguments.slots + slot) * hidden;
        for (int i = threadIdx.x; i < hidden; i += kThreads) {
            inputs[i] = __bfloat162float(row[i]);
        }
        __syncthreads();
        for (int j = threadIdx.x; j < intermediate; j += kThreads) {
            const float gate_value = column_sum(inputs, hidden, gate, intermediate, j);
            const float up_value = column_sum(inputs, hidden, up, intermediate, j);
            inner[j] = round_to_bfloat16(round_to_bfloat16(silu(gate_value)) * up_value);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < hidden; i += kThreads) {
            row[i] = __float2bfloat16_rn(column_sum(inner, intermediate, down, hidden, i));
        }
        // The next row's inputs overwrite what no thread reads any more, its inner values what all must have read.
        __syncthreads();
    }
}

class CudaExperts : public ExpertRunner {
  public:
    CudaExperts(const LayerShape& shape, int first_expert, int num_local, tools::Device& device)
        : shape_(shape),
          num_local_(num_local),
          device_(device),
          gate_(device, matrix_size() * num_local),
          up_(device, matrix_size() * num_local),
          down_(device, matrix_size() * num_local) {
        for (int local = 0; local < num_local; ++local) {
            const ExpertWeights weights = make_expert(shape, first_expert + local);
            const size_t offset = matrix_size() * static_cast<size_t>(local);
            device.to_device(gate_.data() + offset, weights.gate.data(), matrix_size() * sizeof(float));
            device.to_device(up_.data() + offset, weights.up.data(), matrix_size() * sizeof(float));
            device.to_device(down_.data() + offset, weights.down.data(), matrix_size() * sizeof(float));
        }
        tools::check_cuda(cudaFuncSetAttribute(run_row, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(shared_bytes())),
                          "cudaFuncSetAttribute");
    }

    void run(uint16_t* rows, const int32_t* counters, size_t slots) override {
        const ExpertArguments arguments{reinterpret_cast<__nv_bfloat16*>(rows),
                                        counters,
                                        gate_.data(),
                                        up_.data(),
                                        down_.data(),
                                        static_cast<int>(slots),
                                        shape_.hidden,
                                        shape_.intermediate};
        const dim3 grid(static_cast<unsigned>(std::min<size_t>(slots, 64)), static_cast<unsigned>(num_local_));
        run_row<<<grid, kThreads, shared_bytes(), device_.stream()>>>(arguments);
        tools::check_cuda(cudaGetLastError(), "the launch of the experts");
    }

  private:
    size_t matrix_size() const { return static_cast<size_t>(shape_.hidden) * static_cast<size_t>(shape_.intermediate); }
    size_t shared_bytes() const { return static_cast<size_t>(shape_.hidden + shape_.intermediate) * sizeof(float); }

    LayerShape shape_;
    int num_local_;
    tools::Device& device_;
    tools::DeviceArray<float> gate_;
    tools::DeviceArray<float> up_;
    tools::DeviceArray<float> down_;
};

}  // namespace

std::unique_ptr<ExpertRunner> make_cuda_experts(const LayerShape& shape, int first_expert, int num_local,
                                                tools::Device& device) {
    return std::make_unique<CudaExperts>(shape, first_expert, num_local, device);
}

}  // namespace crossdock::demo
