// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu.h"

#include <fmt/format.h>

#include <map>

#include "bench/stopwatch.h"
#include "tools/common/nccl_library.h"

namespace crossdock::bench {
namespace {

using tools::check_cuda;
using tools::check_nccl;
using tools::nccl_library;

class EventStopwatch : public GpuStopwatch {
  public:
    explicit EventStopwatch(tools::Device& device) : device_(device) {
        check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
        check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
    }
    ~EventStopwatch() override {
        forget_graphs();
        cudaEventDestroy(begin_);
        cudaEventDestroy(end_);
    }

    double time_once(const std::function<void()>& enqueue) override {
        check_cuda(cudaEventRecord(begin_, device_.stream()), "cudaEventRecord");
        enqueue();
        return finish();
    }

    double time_call(const std::function<void()>& enqueue) override {
        device_.synchronize();
        return time_us(enqueue);
    }

    void make_graph(size_t number, const std::function<void()>& enqueue) override {
        cudaGraph_t graph = nullptr;
        // Other ranks may be threads that allocate meanwhile: only this thread's calls are restricted.
        check_cuda(cudaStreamBeginCapture(device_.stream(), cudaStreamCaptureModeThreadLocal),
                   "cudaStreamBeginCapture");
        enqueue();
        check_cuda(cudaStreamEndCapture(device_.stream(), &graph), "cudaStreamEndCapture");
        cudaGraphExec_t executable = nullptr;
        check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
        cudaGraphDestroy(graph);
        graphs_[number] = executable;
        check_cuda(cudaGraphUpload(executable, device_.stream()), "cudaGraphUpload");
        device_.synchronize();
    }

    double time_replays(size_t number, int num_replays) override {
        check_cuda(cudaGraphLaunch(graphs_.at(number), device_.stream()), "cudaGraphLaunch");
        check_cuda(cudaEventRecord(begin_, device_.stream()), "cudaEventRecord");
        for (int replay = 0; replay < num_replays; ++replay) {
            check_cuda(cudaGraphLaunch(graphs_.at(number), device_.stream()), "cudaGraphLaunch");
        }
        return finish() / num_replays;
    }

    void forget_graphs() override {
        for (const auto& [number, graph] : graphs_) {
            cudaGraphExecDestroy(graph);
        }
        graphs_.clear();
    }

  private:
    double finish() {
        check_cuda(cudaEventRecord(end_, device_.stream()), "cudaEventRecord");
        device_.synchronize();
        float milliseconds = 0;
        check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
        return milliseconds * 1e3;
    }

    tools::Device& device_;
    cudaEvent_t begin_ = nullptr;
    cudaEvent_t end_ = nullptr;
    std::map<size_t, cudaGraphExec_t> graphs_;
};

}  // namespace

GpuWindow make_gpu_window(ncclComm_t comm, size_t bytes) {
    // NCCL registers whole allocations, in its own granularity.
    GpuWindow window;
    check_nccl(nccl_library().mem_alloc(&window.memory, bytes), "ncclMemAlloc");
    check_nccl(nccl_library().window_register(comm, window.memory, bytes, &window.window, NCCL_WIN_DEFAULT),
               "ncclCommWindowRegister");
    return window;
}

GpuWindow expect_gpu_window(ncclComm_t comm, size_t bytes) {
    const GpuWindow window = make_gpu_window(comm, bytes);
    if (window.window != nullptr) return window;
    free_gpu_window(comm, window);
    throw std::runtime_error("ncclCommWindowRegister gave no window: NCCL has no symmetric memory for these ranks");
}

void free_gpu_window(ncclComm_t comm, const GpuWindow& window) {
    if (window.window != nullptr) nccl_library().window_deregister(comm, window.window);
    nccl_library().mem_free(window.memory);
}

std::unique_ptr<GpuStopwatch> make_gpu_stopwatch(tools::Device& device) {
    return std::make_unique<EventStopwatch>(device);
}

size_t used_gpu_memory() {
    size_t free_bytes = 0;
    size_t all_bytes = 0;
    check_cuda(cudaMemGetInfo(&free_bytes, &all_bytes), "cudaMemGetInfo");
    return all_bytes - free_bytes;
}

std::string describe_gpu() {
    cudaDeviceProp properties;
    int device = 0;
    int driver = 0;
    int runtime = 0;
    int nccl = 0;
    cudaGetDevice(&device);
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    nccl_library().get_version(&nccl);
    return fmt::format("{}, {} SMs, {} here; CUDA {}.{} (driver {}.{}), NCCL {}.{}.{}", properties.name,
                       properties.multiProcessorCount, tools::num_cuda_devices(), runtime / 1000, runtime % 1000 / 10,
                       driver / 1000, driver % 1000 / 10, nccl / 10000, nccl % 10000 / 100, nccl % 100);
}

}  // namespace crossdock::bench
