// SPDX-License-Identifier: Apache-2.0
// Where a library's communicator and tensors come from on each backend.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <vector>

#include "bench/library.h"
#include "bench/options.h"
#include "crossdock/tensor.hpp"
#include "tools/common/device.h"

namespace crossdock::bench {

// What it took to come to the first operation, on rank 0, ms.
struct StartUp {
    double communicator = 0;  // GPUs: ncclCommInitRank
    double first_window = 0;  // GPUs: memory and window of NCCL's that a communicator is asked for first
    double group = 0;
    double handle = 0;
    double first_operations = 0;  // HT: first update, dispatch and combine, until their end
};

// The communicator that a library's group is made on. Collective to make and to destroy.
class LibraryComm {
  public:
    LibraryComm(const EpLibrary& library, const tools::RankContext& context, Backend backend);
    ~LibraryComm();
    LibraryComm(const LibraryComm&) = delete;
    LibraryComm& operator=(const LibraryComm&) = delete;

    const EpLibrary& library() const { return library_; }
    ncclComm_t get() const { return comm_; }
    const StartUp& start_up() const { return start_up_; }

  private:
    enum class Origin { kHost, kLibrary, kNccl };

    const EpLibrary& library_;
    Origin origin_;
    ncclComm_t comm_ = nullptr;
    StartUp start_up_;
};

// Memory of one tensor: the device's, or a window's.
class TensorMemory {
  public:
    // In a window: collective.
    TensorMemory(const EpLibrary& library, ncclComm_t comm, Backend backend, tools::Device& device, size_t bytes,
                 bool in_window);
    ~TensorMemory();
    TensorMemory(const TensorMemory&) = delete;
    TensorMemory& operator=(const TensorMemory&) = delete;

    void* data() const { return data_; }
    ncclWindow_t window() const { return window_; }

    // Names this memory, by its window too where it has one.
    Tensor tensor(ncclDataType_t dtype, std::initializer_list<size_t> extents) const;

    // Elements first .. first + count - 1.
    template <class Element>
    std::vector<Element> download(size_t first, size_t count) const {
        std::vector<Element> values(count);
        device_.to_host(values.data(), static_cast<const Element*>(data_) + first, count * sizeof(Element));
        return values;
    }
    template <class Element>
    void upload(size_t first, const std::vector<Element>& values) const {
        device_.to_device(static_cast<Element*>(data_) + first, values.data(), values.size() * sizeof(Element));
    }

  private:
    const EpLibrary& library_;
    ncclComm_t comm_;
    Backend backend_;
    tools::Device& device_;
    void* data_ = nullptr;
    ncclWindow_t window_ = nullptr;
};

}  // namespace crossdock::bench
