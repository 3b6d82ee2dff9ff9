// SPDX-License-Identifier: Apache-2.0
// Tensor descriptors: checks and copies the caller's, makes and frees ncclEpTensorAlloc's.
#pragma once

#include <array>
#include <initializer_list>
#include <optional>

#include "device/numeric.h"
#include "fabric/communicator.h"
#include "kernels/agreement.h"
#include "nccl_ep.h"

namespace crossdock {

inline constexpr unsigned int kMaxDims = 4;

// What a call needs to know of a tensor; keeps no reference to the caller's descriptor.
struct Tensor {
    const char* name = "";
    ncclDataType_t dtype = ncclInt8;
    unsigned int ndim = 0;
    std::array<size_t, kMaxDims> sizes{};
    std::byte* data = nullptr;      // resolved, also for window-only tensors; null for an empty tensor
    std::optional<PeerMap> window;  // every rank's tensor, if it lies in a window
    WindowPlace window_place;       // its place there
    uint64_t window_bytes = 0;      // from there to the window's end, which is the same on all ranks

    uint64_t num_elements() const;
    size_t row_bytes() const;  // of the last dimension
};

// Bytes of an element; 0 for a type that no tensor of this library may have.
size_t dtype_size(ncclDataType_t dtype);
const char* dtype_name(ncclDataType_t dtype);
// The kernels' name of a type that they can sum: bfloat16, float16 or float32.
DType kernel_dtype(ncclDataType_t dtype);

// Bulk copies move multiples of this many bytes, at addresses that are multiples of it.
inline constexpr uint32_t kRowGranule = 16;
void expect_aligned(const Tensor& tensor, uint32_t bytes = kRowGranule);  // InvalidArgument if it is not
// Of forwarded scales. In plain memory they begin at any element; in windows, which peers write by bulk copies, where
// tokens may.
void expect_scales_aligned(const Tensor& scales);

// The memory of a call's tensors: inputs and outputs must not overlap.
class CallMemory {
  public:
    void reads(const Tensor& tensor) { inputs_[num_inputs_++] = Range::of(tensor); }
    void writes(const Tensor& tensor) { outputs_[num_outputs_++] = Range::of(tensor); }
    // The same for tensors that are not dense: the bytes from their first element to their last one.
    void reads(const char* name, const std::byte* data, size_t bytes) {
        inputs_[num_inputs_++] = {name, data, data + bytes};
    }
    void writes(const char* name, const std::byte* data, size_t bytes) {
        outputs_[num_outputs_++] = {name, data, data + bytes};
    }
    void expect_apart() const;  // InvalidArgument that names two tensors that share bytes

  private:
    struct Range {
        const char* name = "";
        const std::byte* begin = nullptr;
        const std::byte* end = nullptr;
        static Range of(const Tensor& tensor);
    };
    std::array<Range, 5> inputs_;
    std::array<Range, 10> outputs_;
    size_t num_inputs_ = 0;
    size_t num_outputs_ = 0;
};

// InvalidArgument if the descriptor is NULL or malformed, has neither data nor window or two different places, or if
// the memory does not begin at a multiple of an element's size.
Tensor read_tensor(Communicator& communicator, const ncclEpTensor_t* caller, const char* name);
std::optional<Tensor> read_optional_tensor(Communicator& communicator, const ncclEpTensor_t* caller, const char* name);

// The same for int32 (or, if allowed, int64) numbers that the call writes: one dimension, at least `extent` elements.
Tensor read_counter(Communicator& communicator, const ncclEpTensor_t* caller, const char* name, size_t extent,
                    bool allows_64_bits);

// read_tensor without a communicator: windows stay unresolved. For tensors that no peer reaches.
Tensor read_local_tensor(const ncclEpTensor_t* caller, const char* name);

// InvalidArgument, naming tensor, dimension, value and the expected one. kAnySize matches everything.
inline constexpr size_t kAnySize = ~size_t{0};
void expect_shape(const Tensor& tensor, std::initializer_list<size_t> sizes, const char* meaning);
[[noreturn]] void refuse_dtype(const Tensor& tensor, std::initializer_list<ncclDataType_t> allowed);
inline void expect_dtype(const Tensor& tensor, std::initializer_list<ncclDataType_t> allowed) {
    for (const ncclDataType_t dtype : allowed) {
        if (tensor.dtype == dtype) return;
    }
    refuse_dtype(tensor, allowed);
}
// A type that dispatch can carry. Rows are copied as bytes, so any one-byte type is allowed.
void expect_carried(const Tensor& tensor);
void expect_absent(const ncclEpTensor_t* caller, const char* name, const char* why);

// ncclEpTensorAlloc and ncclEpTensorDestroy.
ncclEpTensor_t* allocate_tensor(unsigned int ndim, ncclDataType_t dtype, const size_t* sizes);
void destroy_tensor(ncclEpTensor_t* tensor);

}  // namespace crossdock
