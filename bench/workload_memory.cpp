// SPDX-License-Identifier: Apache-2.0
#include "bench/workload_memory.h"

#include <stdexcept>

#include "bench/gpu.h"
#include "bench/stopwatch.h"
#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

// Rank 0's bytes on every rank.
template <class Value>
Value broadcast(const tools::RankContext& context, const Value& own) {
    std::vector<Value> all(static_cast<size_t>(context.num_ranks));
    check(crossdockCommAllGather(context.host, &own, all.data(), sizeof own));
    return all[0];
}

}  // namespace

LibraryComm::LibraryComm(const EpLibrary& library, const tools::RankContext& context, Backend backend)
    : library_(library),
      origin_(is_cuda(backend)                                ? Origin::kNccl
              : library.comm_init_all == crossdockCommInitAll ? Origin::kHost
                                                              : Origin::kLibrary) {
    if (origin_ == Origin::kNccl) {
        start_up_.communicator = time_us([&] { comm_ = tools::make_nccl_communicator(context); }) * 1e-3;
        GpuWindow window;
        start_up_.first_window = time_us([&] { window = make_gpu_window(comm_, 4096); }) * 1e-3;
        free_gpu_window(comm_, window);
    } else if (origin_ == Origin::kHost) {
        comm_ = context.host;
    } else if (!library.has_cpu_backends()) {
        throw std::runtime_error("--library: " + library.name +
                                 " has no communicators for CPUs; it runs with --backend cuda");
    } else if (!has_processes(backend)) {
        std::vector<ncclComm_t> comms(static_cast<size_t>(context.num_ranks));
        if (context.rank == 0) {
            library.check(library.comm_init_all(comms.data(), context.num_ranks), "crossdockCommInitAll");
        }
        // All ranks share this process's memory, so the first one's array can be read where it lies.
        const ncclComm_t* first = broadcast<const ncclComm_t*>(context, comms.data());
        comm_ = first[context.rank];
        check(crossdockCommBarrier(context.host));
    } else {
        ncclUniqueId id{};
        if (context.rank == 0) {
            library.check(library.get_unique_id(&id), "crossdockGetUniqueId");
        }
        id = broadcast(context, id);
        library.check(library.comm_init_rank(&comm_, context.num_ranks, id, context.rank), "crossdockCommInitRank");
    }
}

LibraryComm::~LibraryComm() {
    switch (origin_) {
        case Origin::kHost:
            break;
        case Origin::kLibrary:
            library_.comm_destroy(comm_);
            break;
        case Origin::kNccl:
            tools::destroy_nccl_communicator(comm_);
            break;
    }
}

TensorMemory::TensorMemory(const EpLibrary& library, ncclComm_t comm, Backend backend, tools::Device& device,
                           size_t bytes, bool in_window)
    : library_(library), comm_(comm), backend_(backend), device_(device) {
    if (!in_window) {
        data_ = device.allocate(bytes);
    } else if (is_cuda(backend)) {
        const GpuWindow window = expect_gpu_window(comm, bytes);
        data_ = window.memory;
        window_ = window.window;
    } else {
        library.check(library.mem_alloc(&data_, bytes), "crossdockMemAlloc");
        library.check(library.window_register(comm, data_, bytes, &window_, 0), "crossdockCommWindowRegister");
    }
}

TensorMemory::~TensorMemory() {
    if (window_ == nullptr) {
        device_.free(data_);
    } else if (is_cuda(backend_)) {
        free_gpu_window(comm_, {data_, window_});
    } else {
        library_.window_deregister(comm_, window_);
        library_.mem_free(data_);
    }
}

Tensor TensorMemory::tensor(ncclDataType_t dtype, std::initializer_list<size_t> extents) const {
    Tensor tensor(data_, dtype, extents);
    tensor.get()->win_hdl = window_;
    return tensor;
}

}  // namespace crossdock::bench
