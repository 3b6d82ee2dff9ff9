// SPDX-License-Identifier: Apache-2.0
// The experts on a GPU: one block per row, one thread per column, sums in the order of the index, so that the bits are
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

struct ZoneArguments {
    ZoneRows zones;
    const __nv_bfloat16* gradients;
    __nv_bfloat16* results;
    float* weight_gradients;
    const float* gate;  // as above
    const float* up;
    const float* down;
    int hidden;
    int intermediate;
};

// The sum over i of inputs[i] * row[i].
__device__ float row_sum(const float* inputs, int depth, const float* row) {
    float sum = 0;
    for (int i = 0; i < depth; ++i) {
        sum += inputs[i] * row[i];
    }
    return sum;
}

__device__ void load_row(const void* rows, size_t row, int hidden, float* inputs) {
    const auto* source = static_cast<const __nv_bfloat16*>(rows) + row * hidden;
    for (int i = threadIdx.x; i < hidden; i += kThreads) {
        inputs[i] = __bfloat162float(source[i]);
    }
}

__global__ void __launch_bounds__(kThreads) run_zone_row(ZoneArguments arguments) {
    extern __shared__ float shared[];
    float* inputs = shared;
    float* inner = shared + arguments.hidden;
    const int hidden = arguments.hidden;
    const int intermediate = arguments.intermediate;
    const size_t matrix = blockIdx.y * static_cast<size_t>(hidden) * intermediate;
    for (int slot = blockIdx.x; slot < arguments.zones.counters[blockIdx.y]; slot += gridDim.x) {
        const size_t row = static_cast<size_t>(arguments.zones.offsets[blockIdx.y]) + slot;
        load_row(arguments.zones.rows, row, hidden, inputs);
        __syncthreads();
        for (int j = threadIdx.x; j < intermediate; j += kThreads) {
            const float gate = column_sum(inputs, hidden, arguments.gate + matrix, intermediate, j);
            const float up = column_sum(inputs, hidden, arguments.up + matrix, intermediate, j);
            inner[j] = round_to_bfloat16(round_to_bfloat16(silu(gate)) * up);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < hidden; i += kThreads) {
            const float result = column_sum(inner, intermediate, arguments.down + matrix, hidden, i);
            arguments.results[row * hidden + i] = __float2bfloat16_rn(arguments.zones.weights[row] * result);
        }
        // The next row's inputs overwrite what no thread reads any more, its inner values what all must have read.
        __syncthreads();
    }
}

// Step by step what BackwardTile does on CPUs (layer.cpp).
__global__ void __launch_bounds__(kThreads) run_zone_row_backward(ZoneArguments arguments) {
    extern __shared__ float shared[];
    const int hidden = arguments.hidden;
    const int intermediate = arguments.intermediate;
    float* inputs = shared;  // later: results
    float* gradients = inputs + hidden;
    float* gate = gradients + hidden;  // later: gate's gradients, and up's
    float* up = gate + intermediate;
    float* inner = up + intermediate;
    const size_t matrix = blockIdx.y * static_cast<size_t>(hidden) * intermediate;
    for (int slot = blockIdx.x; slot < arguments.zones.counters[blockIdx.y]; slot += gridDim.x) {
        const size_t row = static_cast<size_t>(arguments.zones.offsets[blockIdx.y]) + slot;
        load_row(arguments.zones.rows, row, hidden, inputs);
        load_row(arguments.gradients, row, hidden, gradients);
        __syncthreads();
        for (int j = threadIdx.x; j < intermediate; j += kThreads) {
            const float gate_value = column_sum(inputs, hidden, arguments.gate + matrix, intermediate, j);
            const float up_value = column_sum(inputs, hidden, arguments.up + matrix, intermediate, j);
            const float* down_row = arguments.down + matrix + static_cast<size_t>(j) * hidden;
            const float inner_gradient = round_to_bfloat16(row_sum(gradients, hidden, down_row));
            const float activated = round_to_bfloat16(silu(gate_value));
            const float activated_gradient = round_to_bfloat16(inner_gradient * up_value);
            inner[j] = round_to_bfloat16(activated * up_value);
            up[j] = round_to_bfloat16(inner_gradient * activated);
            gate[j] = round_to_bfloat16(activated_gradient * silu_slope(gate_value));
        }
        __syncthreads();
        // The products of all gradients are summed after this.
        for (int i = threadIdx.x; i < hidden; i += kThreads) {
            inputs[i] = column_sum(inner, intermediate, arguments.down + matrix, hidden, i);
            const size_t matrix_row = matrix + static_cast<size_t>(i) * intermediate;
            const float gate_part = round_to_bfloat16(row_sum(gate, intermediate, arguments.gate + matrix_row));
            const float up_part = round_to_bfloat16(row_sum(up, intermediate, arguments.up + matrix_row));
            const float gradient = round_to_bfloat16(gate_part + up_part);
            arguments.results[row * hidden + i] = __float2bfloat16_rn(arguments.zones.weights[row] * gradient);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            arguments.weight_gradients[row] = row_sum(inputs, hidden, gradients);
        }
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
        allow_shared_memory(run_row, shared_bytes());
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

    void run_zones(const ZoneRows& zones, uint16_t* results) override {
        launch(run_zone_row, shared_bytes(), zones, nullptr, results, nullptr);
    }

    void run_zones_backward(const ZoneRows& zones, const uint16_t* gradients, uint16_t* row_gradients,
                            float* weight_gradients) override {
        launch(run_zone_row_backward, 2 * shared_bytes() + static_cast<size_t>(shape_.intermediate) * sizeof(float),
               zones, gradients, row_gradients, weight_gradients);
    }

  private:
    template <class Kernel>
    static void allow_shared_memory(Kernel kernel, size_t bytes) {
        tools::check_cuda(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
            "cudaFuncSetAttribute");
    }

    void launch(void (*kernel)(ZoneArguments), size_t shared_bytes, const ZoneRows& zones, const uint16_t* gradients,
                uint16_t* results, float* weight_gradients) {
        allow_shared_memory(kernel, shared_bytes);
        const ZoneArguments arguments{zones,
                                      reinterpret_cast<const __nv_bfloat16*>(gradients),
                                      reinterpret_cast<__nv_bfloat16*>(results),
                                      weight_gradients,
                                      gate_.data(),
                                      up_.data(),
                                      down_.data(),
                                      shape_.hidden,
                                      shape_.intermediate};
        const dim3 grid(64, static_cast<unsigned>(num_local_));
        kernel<<<grid, kThreads, shared_bytes, device_.stream()>>>(arguments);
        tools::check_cuda(cudaGetLastError(), "the launch of the experts");
    }

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
