// SPDX-License-Identifier: Apache-2.0
// Low latency as bare as it gets, for one rank: rows, counts and flags move through memory as in a dispatch and a
// combine, but nothing is checked, no peer is waited for, and every shape is known. What a launch and the ways through
// L2 take, no library can avoid.
#include <algorithm>
#include <stdexcept>

#include "bench/gpu.h"
#include "device/numeric.h"
#include "device/platform.h"
#include "device/ptx.cuh"
#include "tools/common/nccl_library.h"

namespace crossdock::bench {
namespace {

using namespace ptx;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

struct BareArguments {
    int num_tokens;
    int topk;
    int copies;  // rows received per token
    int num_experts;
    int stages;  // rows that fit into shared memory
    uint32_t row_bytes;
    const std::byte* tokens;   // [tokens][row_bytes]
    const int32_t* topk_idx;   // [tokens][topk]
    const int64_t* rows;       // [tokens][copies] where each is delivered
    std::byte* slots;          // [tokens][row_bytes], where rows are copied on arrival
    std::byte* received;       // [rows][row_bytes], in expert-major [experts][tokens][row_bytes]
    std::byte* cells;          // [tokens][copies][row_bytes]
    std::byte* sums;           // [tokens][row_bytes]
    uint64_t* row_flags;       // [tokens]
    uint64_t* cell_flags;      // [tokens][copies]
    uint64_t* count;           // rows, with the epoch
    const uint64_t* epoch;     // of the launch before those of this enqueue
    uint64_t launches_before;  // in this enqueue
};

struct Shared {
    uint64_t barriers[kWarps];
    int slot;
    int rows;
    static constexpr int kBytes = 256;
};
static_assert(sizeof(Shared) <= Shared::kBytes);

__device__ void wait_loaded(uint64_t* barrier, uint32_t parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

__device__ void start_load(std::byte* stage, const std::byte* source, uint32_t bytes, uint64_t* barrier) {
    mbarrier_arrive_expect_bytes(barrier, bytes);
    bulk_load(stage, source, bytes, barrier);
}

__device__ void wait_word(const uint64_t* word, uint64_t value) {
    while (load_acquire_system(word) != value) {
    }
}

// A block per token: its row goes to the slot that the earlier tokens leave it.
__global__ void __launch_bounds__(kThreads) bare_dispatch(const __grid_constant__ BareArguments a) {
    if constexpr (!kHasBulkCopies) return;  // refused by the host
    extern __shared__ __align__(128) std::byte memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    std::byte* stage = memory + Shared::kBytes;
    const int token = static_cast<int>(blockIdx.x);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
        mbarrier_init(shared.barriers, 1);
        fence_mbarrier_init();
        start_load(stage, a.tokens + static_cast<size_t>(token) * a.row_bytes, a.row_bytes, shared.barriers);
        shared.slot = shared.rows = 0;
    }
    const uint64_t epoch = *a.epoch + a.launches_before;
    __syncthreads();
    for (int other = thread; other < a.num_tokens; other += kThreads) {
        bool is_sent = false;
        for (int k = 0; k < a.topk; ++k) {
            const int id = a.topk_idx[other * a.topk + k];
            is_sent |= id >= 0 && id < a.num_experts;
        }
        if (is_sent) atomicAdd(&shared.rows, 1);
        if (is_sent && other < token) atomicAdd(&shared.slot, 1);
    }
    __syncthreads();
    const int slot = shared.slot;
    std::byte* row = (a.copies > 1 ? a.slots : a.received) + static_cast<size_t>(slot) * a.row_bytes;
    if (thread == 0) {
        if (token == 0) store_relaxed_system(a.count, epoch << 32 | static_cast<uint32_t>(shared.rows));
        wait_loaded(shared.barriers, 0);
        bulk_store(row, stage, a.row_bytes);
        bulk_commit_group();
        bulk_wait_group<0>();
        fence_proxy_async_global();
        store_release_system(a.row_flags + slot, epoch);
    }
    if (thread != 32) return;
    wait_word(a.count, epoch << 32 | static_cast<uint32_t>(shared.rows));
    wait_word(a.row_flags + slot, epoch);
    if (a.copies == 1) return;
    fence_proxy_async_global();
    wait_loaded(shared.barriers, 0);  // and so may be filled again
    std::byte* stage_in = stage + a.row_bytes;
    mbarrier_init(shared.barriers + 1, 1);
    fence_mbarrier_init();
    start_load(stage_in, row, a.row_bytes, shared.barriers + 1);
    wait_loaded(shared.barriers + 1, 0);
    for (int k = 0; k < a.copies; ++k) {
        bulk_store(a.received + a.rows[slot * a.copies + k] * a.row_bytes, stage_in, a.row_bytes);
    }
    bulk_commit_group();
    bulk_wait_group<0>();
}

// A block per token: its rows go into its cells, and are summed from there.
__global__ void __launch_bounds__(kThreads) bare_combine(const __grid_constant__ BareArguments a) {
    if constexpr (!kHasBulkCopies) return;
    extern __shared__ __align__(128) std::byte memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const bool is_leader = threadIdx.x % 32 == 0;
    const size_t first = static_cast<size_t>(blockIdx.x) * a.copies;
    const uint64_t epoch = *a.epoch + a.launches_before;
    if (is_leader && warp < a.stages) {
        uint64_t* barrier = shared.barriers + warp;
        std::byte* stage = memory + Shared::kBytes + static_cast<size_t>(warp) * a.row_bytes;
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        uint32_t parity = 0;
        for (int k = warp; k < a.copies; k += a.stages, parity ^= 1) {
            start_load(stage, a.received + a.rows[first + k] * a.row_bytes, a.row_bytes, barrier);
            wait_loaded(barrier, parity);
            bulk_store(a.cells + (first + k) * a.row_bytes, stage, a.row_bytes);
            bulk_commit_group();
            bulk_wait_group<0>();
            fence_proxy_async_global();
            store_release_system(a.cell_flags + first + k, epoch);
        }
    }
    for (int k = static_cast<int>(threadIdx.x); k < a.copies; k += kThreads) {
        wait_word(a.cell_flags + first + k, epoch);
    }
    __syncthreads();
    const std::byte* cells = a.cells + first * a.row_bytes;
    std::byte* sums = a.sums + static_cast<size_t>(blockIdx.x) * a.row_bytes;
    for (uint32_t at = threadIdx.x * 8; at < a.row_bytes; at += kThreads * 8) {
        float sum[4] = {};
        for (int k = 0; k < a.copies; ++k) {
            const uint64_t packed = *reinterpret_cast<const volatile uint64_t*>(cells + k * a.row_bytes + at);
            for (uint32_t i = 0; i < 4; ++i) sum[i] += element_of<DType::kBf16>(packed, i);
        }
        uint64_t packed = 0;
        for (uint32_t i = 0; i < 4; ++i) packed |= packed_element<DType::kBf16>(sum[i], i);
        *reinterpret_cast<uint64_t*>(sums + at) = packed;
    }
}

__global__ void advance_epoch(uint64_t* epoch, uint64_t launches) { *epoch += launches; }

class BareKernels : public BareLl {
  public:
    BareKernels(tools::Device& device, const BareShape& shape) : device_(device) {
        const size_t tokens = static_cast<size_t>(shape.max_tokens);
        const size_t copies = static_cast<size_t>(shape.copies);
        arguments_.topk = shape.topk;
        arguments_.copies = shape.copies;
        arguments_.num_experts = shape.num_experts;
        arguments_.row_bytes = shape.row_bytes;
        arguments_.tokens = allocate(tokens * shape.row_bytes);
        arguments_.slots = allocate(tokens * shape.row_bytes);
        arguments_.sums = allocate(tokens * shape.row_bytes);
        const size_t num_rows = copies > 1 ? tokens * static_cast<size_t>(shape.num_experts) : tokens;
        arguments_.received = allocate(num_rows * shape.row_bytes);
        arguments_.cells = allocate(tokens * copies * shape.row_bytes);
        arguments_.row_flags = reinterpret_cast<uint64_t*>(allocate(tokens * 8));
        arguments_.cell_flags = reinterpret_cast<uint64_t*>(allocate(tokens * copies * 8));
        arguments_.count = reinterpret_cast<uint64_t*>(allocate(8));
        epoch_ = reinterpret_cast<uint64_t*>(allocate(8));
        arguments_.epoch = epoch_;
        arguments_.topk_idx = upload(shape.topk_idx);
        arguments_.rows = upload(rows_of(shape));
        int index = 0;
        int shared_bytes = 0;
        tools::check_cuda(cudaGetDevice(&index), "cudaGetDevice");
        tools::check_cuda(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
                          "cudaDeviceGetAttribute");
        const int fitting = (shared_bytes - Shared::kBytes) / static_cast<int>(shape.row_bytes);
        if (fitting < 2) throw std::runtime_error("the bare kernel needs two rows in shared memory");
        arguments_.stages = std::min({shape.copies, fitting, kWarps});
        cudaFuncAttributes attributes{};
        tools::check_cuda(cudaFuncGetAttributes(&attributes, bare_dispatch), "cudaFuncGetAttributes");
        if (10 * attributes.ptxVersion < kFirstWithBulkCopies)
            throw std::runtime_error(
                "one rank's lower bound needs code for compute capability 9.0 or newer: take --ranks 2");
        for (const auto kernel : {bare_dispatch, bare_combine}) {
            tools::check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                              "cudaFuncSetAttribute");
        }
        tools::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    ~BareKernels() override {
        for (std::byte* memory : memories_) cudaFree(memory);
    }

    void enqueue(Operation operation, int num_tokens, int count) override {
        arguments_.num_tokens = num_tokens;
        arguments_.launches_before = 0;
        const size_t row = arguments_.row_bytes;
        const auto blocks = static_cast<unsigned>(num_tokens);
        for (int i = 0; i < count; ++i) {
            ++arguments_.launches_before;
            if (operation != Operation::kCombine) {
                bare_dispatch<<<blocks, kThreads, Shared::kBytes + 2 * row, device_.stream()>>>(arguments_);
            }
            if (operation != Operation::kDispatch) {
                bare_combine<<<blocks, kThreads, Shared::kBytes + static_cast<size_t>(arguments_.stages) * row,
                               device_.stream()>>>(arguments_);
            }
        }
        advance_epoch<<<1, 1, 0, device_.stream()>>>(epoch_, arguments_.launches_before);
        tools::check_cuda(cudaGetLastError(), "the launch of the bare kernels");
    }

  private:
    // As a dispatch numbers them: an expert's rows in the order of their tokens.
    static std::vector<int64_t> rows_of(const BareShape& shape) {
        std::vector<int64_t> rows;
        std::vector<int64_t> of_expert(static_cast<size_t>(shape.num_experts));
        for (int token = 0; token < shape.max_tokens && shape.copies == 1; ++token) rows.push_back(token);
        for (size_t i = 0; i < shape.topk_idx.size() && shape.copies > 1; ++i) {
            const int32_t expert = shape.topk_idx[i];
            rows.push_back(int64_t{expert} * shape.max_tokens + of_expert.at(static_cast<size_t>(expert))++);
        }
        return rows;
    }
    template <typename Value>
    const Value* upload(const std::vector<Value>& values) {
        std::byte* memory = allocate(values.size() * sizeof(Value));
        tools::check_cuda(cudaMemcpy(memory, values.data(), values.size() * sizeof(Value), cudaMemcpyHostToDevice),
                          "cudaMemcpy");
        return reinterpret_cast<const Value*>(memory);
    }
    std::byte* allocate(size_t bytes) {
        void* memory = nullptr;
        tools::check_cuda(cudaMalloc(&memory, std::max<size_t>(bytes, 16)), "cudaMalloc");
        memories_.push_back(static_cast<std::byte*>(memory));
        tools::check_cuda(cudaMemset(memory, 0, std::max<size_t>(bytes, 16)), "cudaMemset");
        return memories_.back();
    }

    tools::Device& device_;
    BareArguments arguments_{};
    uint64_t* epoch_ = nullptr;
    std::vector<std::byte*> memories_;
};

}  // namespace

std::unique_ptr<BareLl> make_bare_ll(tools::Device& device, const BareShape& shape) {
    return std::make_unique<BareKernels>(device, shape);
}

}  // namespace crossdock::bench
