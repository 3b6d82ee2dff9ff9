// SPDX-License-Identifier: Apache-2.0
// Tensor descriptors: the caller's checked and copied, ncclEpTensorAlloc's made and freed.
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

// What a call needs of a tensor; holds nothing of the caller's descriptor.
struct Tensor {
    const char* name = "";
    ncclDataType_t dtype = ncclInt8;
    unsigned int ndim = 0;
    std::array<size_t, kMaxDims> sizes{};
    std::byte* data = nullptr;      // resolved, window-only tensors too; null for an empty tensor
    std::optional<PeerMap> window;  // every rank's tensor, for window-backed ones
    WindowPlace window_place;       // and where there
    uint64_t window_bytes = 0;      // from there to the window's end, which lies alike on all ranks

    uint64_t num_elements() const;
    size_t row_bytes() const;  // of the last dimension
};

// Bytes of an element; 0 for a type that no tensor of this library may have.
size_t dtype_size(ncclDataType_t dtype);
const char* dtype_name(ncclDataType_t dtype);
// As kernels that sum call it: of bfloat16, float16 and float32.
DType kernel_dtype(ncclDataType_t dtype);

// Bulk copies move multiples of this many bytes, at addresses that are multiples of it.
inline constexpr uint32_t kRowGranule = 16;
bool is_aligned(const Tensor& tensor, uint32_t bytes = kRowGranule);
void expect_aligned(const Tensor& tensor, uint32_t bytes = kRowGranule);  // InvalidArgument where it is not

// The memory of a call's tensors: nothing that the call reads may lie where it writes.
class CallMemory {
  public:
    void reads(const Tensor& tensor) { inputs_[num_inputs_++] = Range::of(tensor); }
    void writes(const Tensor& tensor) { outputs_[num_outputs_++] = Range::of(tensor); }
    void expect_apart() const;  // InvalidArgument that names two tensors that share bytes

  private:
    struct Range {
        const char* name = "";
        const std::byte* begin = nullptr;
        const std::byte* end = nullptr;
        static Range of(const Tensor& tensor);
    };
    std::array<Range, 4> inputs_;
    std::array<Range, 8> outputs_;
    size_t num_inputs_ = 0;
    size_t num_outputs_ = 0;
};

// InvalidArgument where the descriptor is NULL or malformed, names neither data nor window, or names two different
// places, or where the memory does not begin at a multiple of an element's size.
Tensor read_tensor(Communicator& communicator, const ncclEpTensor_t* caller, const char* name);
std::optional<Tensor> read_optional_tensor(Communicator& communicator, const ncclEpTensor_t* caller, const char* name);

// The same for int32 numbers that the call writes, or int64 where allowed: one dimension, at least that many elements.
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
// A type that dispatch can carry: rows move byte by byte, so that of one byte any.
void expect_carried(const Tensor& tensor);
void expect_absent(const ncclEpTensor_t* caller, const char* name, const char* why);

// ncclEpTensorAlloc and ncclEpTensorDestroy.
ncclEpTensor_t* allocate_tensor(unsigned int ndim, ncclDataType_t dtype, const size_t* sizes);
void destroy_tensor(ncclEpTensor_t* tensor);

}  // namespace crossdock
