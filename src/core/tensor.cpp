// SPDX-License-Identifier: Apache-2.0
#include "core/tensor.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "core/data_types.h"
#include "core/error.h"
#include "core/process.h"

namespace crossdock {
namespace {

constexpr unsigned int kAllocatedMagic = 0xBEEFBEEFu;

// Descriptors made by the library, found by their own address or by that of their extents, which a copy of a descriptor
// keeps.
class AllocatedTensors {
  public:
    void add(ncclEpTensor_t* tensor) {
        std::unique_lock lock(mutex_);
        extents_of_[tensor] = tensor->sizes;
        tensor_of_[tensor->sizes] = tensor;
    }
    bool owns_extents(const size_t* sizes) const {
        std::shared_lock lock(mutex_);
        return tensor_of_.count(sizes) != 0;
    }
    // Removes a descriptor made here and returns its extents, which the caller then owns. If several threads remove one
    // descriptor, one gets them and the others get the error.
    const size_t* remove(const ncclEpTensor_t* tensor) {
        std::unique_lock lock(mutex_);
        const auto found = extents_of_.find(tensor);
        require(found != extents_of_.end(), ncclInvalidArgument,
                "tensor {} was not made by ncclEpTensorAlloc, or is already destroyed",
                static_cast<const void*>(tensor));
        const size_t* extents = found->second;
        require(tensor->sizes == extents, ncclInvalidArgument,
                "tensor->sizes is not the array that ncclEpTensorAlloc made; nothing was freed");
        tensor_of_.erase(extents);
        extents_of_.erase(found);
        return extents;
    }

  private:
    mutable ForkSafeMutex mutex_;
    std::unordered_map<const ncclEpTensor_t*, const size_t*> extents_of_;
    std::unordered_map<const size_t*, const ncclEpTensor_t*> tensor_of_;
};

AllocatedTensors& allocated_tensors() {
    static AllocatedTensors* const tensors =
        new AllocatedTensors;  // outlives all static objects that may hold a descriptor
    return *tensors;
}
const MadeAtLoad allocated_tensors_made_at_load(allocated_tensors);

// Checks the descriptor and copies it; the caller's extents are read once.
Tensor read_descriptor(const ncclEpTensor_t* caller, const char* name, ncclEpTensor_t& copy) {
    require(caller != nullptr, ncclInvalidArgument, "{} is NULL", name);
    std::memcpy(&copy, caller, sizeof(unsigned int) * 2);
    require(copy.size >= sizeof(ncclEpTensor_t), ncclInvalidArgument,
            "{}->size is {}, the struct has at least {} bytes: use NCCL_EP_TENSOR_INIT", name, copy.size,
            sizeof(ncclEpTensor_t));
    std::memcpy(&copy, caller, sizeof(copy));
    const bool is_allocated = copy.magic == kAllocatedMagic;
    require(is_allocated || copy.magic == NCCL_EP_TENSOR_MAGIC, ncclInvalidArgument,
            "{}->magic is {:#x}, expected {:#x}: use NCCL_EP_TENSOR_INIT", name, copy.magic, NCCL_EP_TENSOR_MAGIC);
    require(
        !is_allocated || allocated_tensors().owns_extents(copy.sizes), ncclInvalidArgument,
        "{}->sizes is not the array that ncclEpTensorAlloc made: write extents into that array instead of replacing it",
        name);
    require(copy.ndim == 0 || copy.sizes != nullptr, ncclInvalidArgument, "{}->sizes is NULL with ndim {}", name,
            copy.ndim);
    require(copy.ndim <= kMaxDims, ncclInvalidArgument, "{}->ndim is {}, allowed: 0..{}", name, copy.ndim, kMaxDims);

    Tensor tensor;
    tensor.name = name;
    std::memcpy(&tensor.dtype, &copy.datatype, sizeof(tensor.dtype));
    tensor.ndim = copy.ndim;
    uint64_t bytes = dtype_size(tensor.dtype) == 0 ? 1 : dtype_size(tensor.dtype);
    for (unsigned int dim = 0; dim < copy.ndim; ++dim) {
        tensor.sizes[dim] = copy.sizes[dim];
        require(!__builtin_mul_overflow(bytes, tensor.sizes[dim], &bytes), ncclInvalidArgument,
                "{}: extent {} of dimension {} makes it larger than 2^64 bytes", name, tensor.sizes[dim], dim);
    }
    require(tensor.num_elements() == 0 || copy.data != nullptr || copy.win_hdl != nullptr, ncclInvalidArgument,
            "{} has {} elements but neither data nor win_hdl", name, tensor.num_elements());
    tensor.data = static_cast<std::byte*>(copy.data);
    return tensor;
}

void expect_elements_aligned(const Tensor& tensor) {
    const size_t element = dtype_size(tensor.dtype);
    if (element > 1 && tensor.num_elements() > 0) expect_aligned(tensor, static_cast<uint32_t>(element));
}

}  // namespace

uint64_t Tensor::num_elements() const {
    uint64_t elements = 1;
    for (unsigned int dim = 0; dim < ndim; ++dim) elements *= sizes[dim];
    return elements;
}

size_t Tensor::row_bytes() const { return ndim == 0 ? 0 : sizes[ndim - 1] * dtype_size(dtype); }

size_t dtype_size(ncclDataType_t dtype) {
    const DataType* const type = find_data_type(dtype);
    return type == nullptr ? 0 : type->bytes;
}

const char* dtype_name(ncclDataType_t dtype) {
    const DataType* const type = find_data_type(dtype);
    return type == nullptr ? "an unknown type" : type->name;
}

DType kernel_dtype(ncclDataType_t dtype) {
    return dtype == ncclFloat32 ? DType::kF32 : dtype == ncclFloat16 ? DType::kF16 : DType::kBf16;
}

CallMemory::Range CallMemory::Range::of(const Tensor& tensor) {
    return {tensor.name, tensor.data, tensor.data + tensor.num_elements() * dtype_size(tensor.dtype)};
}

void CallMemory::expect_apart() const {
    for (size_t out = 0; out < num_outputs_; ++out) {
        const Range& output = outputs_[out];
        for (size_t in = 0; in < num_inputs_; ++in) {
            const Range& input = inputs_[in];
            const bool is_apart = input.begin == input.end || output.begin == output.end || input.end <= output.begin ||
                                  output.end <= input.begin;
            require(is_apart, ncclInvalidArgument,
                    "{} overlaps {}: bytes [{}, {}) and [{}, {}), expected memory of its own", output.name, input.name,
                    static_cast<const void*>(output.begin), static_cast<const void*>(output.end),
                    static_cast<const void*>(input.begin), static_cast<const void*>(input.end));
        }
    }
}

Tensor read_local_tensor(const ncclEpTensor_t* caller, const char* name) {
    ncclEpTensor_t copy;
    Tensor tensor = read_descriptor(caller, name, copy);
    expect_elements_aligned(tensor);
    return tensor;
}

Tensor read_tensor(Communicator& communicator, const ncclEpTensor_t* caller, const char* name) {
    ncclEpTensor_t copy;
    Tensor tensor = read_descriptor(caller, name, copy);
    if (copy.win_hdl == nullptr) {
        expect_elements_aligned(tensor);
        return tensor;
    }
    const WindowView window = communicator.window(copy.win_hdl);
    const uint64_t bytes = tensor.num_elements() * dtype_size(tensor.dtype);
    require(copy.win_offset <= window.bytes && bytes <= window.bytes - copy.win_offset, ncclInvalidArgument,
            "{}: {} bytes at win_offset {} do not fit into its window of {} bytes", name, bytes, copy.win_offset,
            window.bytes);
    std::byte* in_window = window.local + copy.win_offset;
    require(tensor.data == nullptr || tensor.data == in_window, ncclInvalidArgument,
            "{}: data is {}, but win_hdl and win_offset name {}: set one of them, or both alike", name,
            static_cast<void*>(tensor.data), static_cast<void*>(in_window));
    tensor.data = in_window;
    if (!communicator.shares_host_memory()) {
        PeerMap peers = window.peers;
        peers.offset += copy.win_offset;
        tensor.window = peers;
        tensor.window_place = {window.number, copy.win_offset};
        tensor.window_bytes = window.bytes - copy.win_offset;
    }
    expect_elements_aligned(tensor);
    return tensor;
}

Tensor read_counter(Communicator& communicator, const ncclEpTensor_t* caller, const char* name, size_t extent,
                    bool allows_64_bits) {
    const Tensor tensor = read_tensor(communicator, caller, name);
    if (allows_64_bits) {
        expect_dtype(tensor, {ncclInt32, ncclInt64});
    } else {
        expect_dtype(tensor, {ncclInt32});
    }
    require(tensor.ndim == 1 && tensor.sizes[0] >= extent, ncclInvalidArgument,
            "{} has {} dimensions and {} elements, expected 1 dimension and at least {}", name, tensor.ndim,
            tensor.num_elements(), extent);
    return tensor;
}

std::optional<Tensor> read_optional_tensor(Communicator& communicator, const ncclEpTensor_t* caller, const char* name) {
    if (caller == nullptr) return std::nullopt;
    return read_tensor(communicator, caller, name);
}

void expect_shape(const Tensor& tensor, std::initializer_list<size_t> sizes, const char* meaning) {
    require(tensor.ndim == sizes.size(), ncclInvalidArgument, "{} has {} dimensions, expected {}: {}", tensor.name,
            tensor.ndim, sizes.size(), meaning);
    unsigned int dim = 0;
    for (const size_t size : sizes) {
        require(size == kAnySize || tensor.sizes[dim] == size, ncclInvalidArgument,
                "{}: dimension {} is {}, expected {}: {}", tensor.name, dim, tensor.sizes[dim], size, meaning);
        ++dim;
    }
}

void refuse_dtype(const Tensor& tensor, std::initializer_list<ncclDataType_t> allowed) {
    std::string names;
    for (const ncclDataType_t dtype : allowed) names += (names.empty() ? "" : ", ") + std::string(dtype_name(dtype));
    fail(ncclInvalidArgument, "{} is of type {} ({}), allowed: {}", tensor.name, dtype_name(tensor.dtype),
         static_cast<int>(tensor.dtype), names);
}

void expect_aligned(const Tensor& tensor, uint32_t bytes) {
    if (reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0) return;
    const std::string offset = tensor.window ? fmt::format(" (win_offset {})", tensor.window_place.offset) : "";
    fail(ncclInvalidArgument, "{} is at address {}{}, expected a multiple of {}", tensor.name,
         static_cast<void*>(tensor.data), offset, bytes);
}

void expect_scales_aligned(const Tensor& scales) {
    if (scales.window) expect_aligned(scales);
}

void expect_carried(const Tensor& tensor) {
    expect_dtype(tensor, {ncclFloat32, ncclFloat16, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclFloat4x2,
                          ncclUint8, ncclInt8});
}

void expect_absent(const ncclEpTensor_t* caller, const char* name, const char* why) {
    require(caller == nullptr, ncclInvalidArgument, "{} is not NULL, expected NULL {}", name, why);
}

ncclEpTensor_t* allocate_tensor(unsigned int ndim, ncclDataType_t dtype, const size_t* sizes) {
    require(sizes != nullptr, ncclInvalidArgument, "sizes is NULL");
    require(ndim > 0 && ndim <= kMaxDims, ncclInvalidArgument, "ndim is {}, allowed: 1..{}", ndim, kMaxDims);
    auto tensor = std::make_unique<ncclEpTensor_t>();
    auto extents = std::make_unique<size_t[]>(ndim);
    std::memcpy(extents.get(), sizes, ndim * sizeof(size_t));
    tensor->size = sizeof(ncclEpTensor_t);
    tensor->magic = kAllocatedMagic;
    tensor->ndim = ndim;
    tensor->datatype = dtype;
    tensor->sizes = extents.get();
    allocated_tensors().add(tensor.get());
    extents.release();
    return tensor.release();
}

void destroy_tensor(ncclEpTensor_t* tensor) {
    if (tensor == nullptr) return;
    delete[] allocated_tensors().remove(tensor);
    delete tensor;
}

}  // namespace crossdock
