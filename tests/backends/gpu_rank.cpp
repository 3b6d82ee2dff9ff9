// SPDX-License-Identifier: Apache-2.0
#include "gpu_rank.h"

#include <algorithm>
#include <cstdlib>

#include "nccl_library.h"

namespace crossdock::testing {
namespace {

constexpr size_t kPoolBytes = size_t{384} << 20;
constexpr size_t kAlignment = 256;
constexpr size_t kMostStreams = 16;  // of a process
constexpr size_t kMostStreamsBesidePlugin = 4;

}  // namespace

void check_cuda(cudaError_t result, const char* call) {
    if (result != cudaSuccess) throw std::runtime_error(fmt::format("{}: {}", call, cudaGetErrorString(result)));
}

#define CHECK_CUDA(call) check_cuda(call, #call)

DevicePool::DevicePool(size_t bytes) : bytes_(bytes) {
    void* memory = nullptr;
    CHECK_CUDA(cudaMalloc(&memory, bytes));
    memory_ = static_cast<std::byte*>(memory);
}

DevicePool::~DevicePool() { cudaFree(memory_); }

void* DevicePool::allocate(size_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const auto reusable = free_.find(bytes);
    void* memory = nullptr;
    if (reusable != free_.end()) {
        memory = reusable->second;
        free_.erase(reusable);
    } else {
        if (used_ + bytes > bytes_) throw std::runtime_error("the test's pool of device memory is used up");
        memory = memory_ + used_;
        used_ += bytes;
    }
    sizes_[memory] = bytes;
    return memory;
}

void DevicePool::free(void* memory) {
    const auto found = sizes_.find(memory);
    if (found == sizes_.end()) throw std::logic_error("this memory is not the pool's");
    free_.emplace(found->second, memory);
    sizes_.erase(found);
}

GpuRank::GpuRank(ncclComm_t comm, int rank, int num_ranks, bool is_process, HostExchange& exchange, MakeComm make_comm)
    : RankContext(comm, rank, num_ranks),
      is_process_(is_process),
      exchange_(exchange),
      make_comm_(std::move(make_comm)),
      pool_(kPoolBytes) {}

GpuRank::~GpuRank() {
    for (const cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
    for (const cudaStream_t stream : streams_) cudaStreamDestroy(stream);
}

// Both copies first wait for the stream: a copy from or to pageable memory that waits for a kernel keeps every other
// thread out of the driver, and the kernel may wait for what such a thread has yet to launch.
void GpuRank::copy_to_device(void* target, const void* source, size_t bytes, cudaStream_t stream) {
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaMemcpyAsync(target, source, bytes, cudaMemcpyHostToDevice, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
}

void GpuRank::copy_to_host(void* target, const void* source, size_t bytes, cudaStream_t stream) {
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToHost, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
}

cudaStream_t GpuRank::make_stream() {
    // Ranks of one process share its hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, at most 32), which the streams of
    // the library, of NCCL and of its network plugin use, too. With more streams than queues a rank's kernel could
    // stand behind one that waits for it.
    const size_t of_process = std::getenv("NCCL_RMA_PLUGIN") == nullptr ? kMostStreams : kMostStreamsBesidePlugin;
    const size_t most_streams =
        is_process_ ? kMostStreams : std::max<size_t>(of_process / static_cast<size_t>(num_ranks()), 1);
    if (streams_.size() >= most_streams) return streams_[next_stream_++ % streams_.size()];
    cudaStream_t stream = nullptr;
    // Non-blocking: the legacy default stream would order the ranks of one context.
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    streams_.push_back(stream);
    return stream;
}

void GpuRank::synchronize(cudaStream_t stream) { CHECK_CUDA(cudaStreamSynchronize(stream)); }

void GpuRank::synchronize_all() {
    for (const cudaStream_t stream : streams_) CHECK_CUDA(cudaStreamSynchronize(stream));
}

cudaGraph_t GpuRank::capture_graph(cudaStream_t stream, const std::function<void()>& work) {
    synchronize_all();
    barrier();
    cudaGraph_t graph = nullptr;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
        work();
    } catch (...) {
        if (cudaStreamEndCapture(stream, &graph) == cudaSuccess) cudaGraphDestroy(graph);
        throw;
    }
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    return graph;
}

std::vector<unsigned> GpuRank::captured_blocks(cudaStream_t stream, const std::function<void()>& work) {
    const cudaGraph_t graph = capture_graph(stream, work);
    size_t num_nodes = 0;
    CHECK_CUDA(cudaGraphGetNodes(graph, nullptr, &num_nodes));
    std::vector<cudaGraphNode_t> nodes(num_nodes);
    CHECK_CUDA(cudaGraphGetNodes(graph, nodes.data(), &num_nodes));
    std::vector<unsigned> blocks;
    for (const cudaGraphNode_t node : nodes) {
        cudaGraphNodeType type{};
        CHECK_CUDA(cudaGraphNodeGetType(node, &type));
        if (type != cudaGraphNodeTypeKernel) continue;
        cudaKernelNodeParams kernel{};
        CHECK_CUDA(cudaGraphKernelNodeGetParams(node, &kernel));
        blocks.push_back(kernel.gridDim.x);
    }
    CHECK_CUDA(cudaGraphDestroy(graph));
    return blocks;
}

Graph GpuRank::capture(cudaStream_t stream, const std::function<void()>& work) {
    const cudaGraph_t graph = capture_graph(stream, work);
    cudaGraphExec_t ready = nullptr;
    CHECK_CUDA(cudaGraphInstantiate(&ready, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaGraphUpload(ready, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    graphs_.push_back(ready);
    barrier();
    return ready;
}

void GpuRank::launch(Graph graph, cudaStream_t stream) {
    CHECK_CUDA(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream));
}

Window GpuRank::make_window(size_t bytes) {
    synchronize_all();
    barrier();
    Window window;
    window.bytes = bytes;
    void* memory = nullptr;
    if (nccl_library().mem_alloc(&memory, bytes) != ncclSuccess) throw std::runtime_error("ncclMemAlloc failed");
    window.memory = static_cast<std::byte*>(memory);
    const std::vector<std::byte> zeros(bytes);
    copy_to_device(memory, zeros.data(), bytes, make_stream());
    const ncclResult_t result = nccl_library().window_register(comm(), memory, bytes, &window.handle, NCCL_WIN_DEFAULT);
    // Where ranks reach each other neither by memory nor by a network, NCCL makes no window, and says nothing.
    const bool may_lack = std::getenv("NCCL_LSA_TEAM_SIZE") != nullptr;
    if (result != ncclSuccess || (window.handle == nullptr && !may_lack)) {
        throw std::runtime_error(fmt::format("ncclCommWindowRegister of {} bytes gave {} and {} window: {}", bytes,
                                             static_cast<int>(result), window.handle == nullptr ? "no" : "a",
                                             nccl_library().get_last_error(comm())));
    }
    barrier();
    return window;
}

void GpuRank::destroy_window(const Window& window) {
    synchronize_all();
    barrier();
    if (window.handle != nullptr) nccl_library().window_deregister(comm(), window.handle);
    barrier();
    nccl_library().mem_free(window.memory);
    barrier();
}

}  // namespace crossdock::testing
