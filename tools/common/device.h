// SPDX-License-Identifier: Apache-2.0
// Where a rank's tensors lie and its operations run: the memory of a CPU or of a GPU.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "nccl_ep.h"
#include "tools/common/ranks.h"

namespace crossdock::tools {

class Device {
  public:
    virtual ~Device() = default;

    // Zeroed. Throws when there is none left.
    virtual void* allocate(size_t bytes) = 0;
    virtual void free(void* memory) = 0;

    // Done when they return, also with respect to work on stream() before them.
    virtual void to_device(void* target, const void* source, size_t bytes) = 0;
    virtual void to_host(void* target, const void* source, size_t bytes) = 0;

    virtual cudaStream_t stream() = 0;
    virtual void synchronize() = 0;
};

std::unique_ptr<Device> make_cpu_device();

// A GPU, the index-th of those that are here or, when they are fewer, counted again from the first, and a stream of its
// own. Throws with a message in a build without CUDA, and where there is no GPU.
std::unique_ptr<Device> make_cuda_device(int index);

// GPUs here; 0 in a build without CUDA and on a machine without a driver.
int num_cuda_devices();

// Why there are none: a message.
std::string why_no_cuda();

// An NCCL communicator over the ranks of `context`, on the current GPU; NCCL is opened at run time (libnccl.so.2, or
// what CROSSDOCK_NCCL_LIBRARY names). Collective.
ncclComm_t make_nccl_communicator(const RankContext& context);
void destroy_nccl_communicator(ncclComm_t comm);

// Memory of a Device with an owner.
template <class Element>
class DeviceArray {
  public:
    DeviceArray(Device& device, size_t size)
        : device_(&device), size_(size), data_(static_cast<Element*>(device.allocate(size * sizeof(Element)))) {}
    DeviceArray(Device& device, const std::vector<Element>& values) : DeviceArray(device, values.size()) {
        upload(values);
    }
    ~DeviceArray() { device_->free(data_); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;

    size_t size() const { return size_; }
    Element* data() { return data_; }

    // The first values.size() elements.
    void upload(const std::vector<Element>& values) {
        device_->to_device(data_, values.data(), values.size() * sizeof(Element));
    }
    std::vector<Element> download() { return download(0, size_); }
    std::vector<Element> download(size_t first, size_t count) {
        std::vector<Element> values(count);
        device_->to_host(values.data(), data_ + first, count * sizeof(Element));
        return values;
    }

  private:
    Device* device_;
    size_t size_;
    Element* data_;
};

}  // namespace crossdock::tools
