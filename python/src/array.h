// SPDX-License-Identifier: Apache-2.0
//
// Arrays of Python as tensor descriptors of the C API, without a copy. Understood are, in this order: crossdock.Tensor,
// torch.Tensor, the buffer protocol (NumPy), __cuda_array_interface__, __array_interface__ (NumPy with ml_dtypes), and
// DLPack.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "crossdock.h"

namespace crossdock::python {

enum class Place { kHost, kCuda };
enum class Access { kRead, kWrite };

constexpr size_t kMaxDimensions = 8;

// A described array and what keeps its memory: the object, and where it has one its exported buffer, which forbids
// resizing. Made, moved and destroyed with the GIL held; reading the descriptor needs no GIL.
class Array {
  public:
    Array() = default;
    Array(Array&& other) noexcept;
    Array& operator=(Array&& other) noexcept;
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() { release(); }

    // For the C API; NULL if there is no array. Valid until this object moves.
    ncclEpTensor_t* descriptor() {
        descriptor_.sizes = sizes_.data();
        return is_set_ ? &descriptor_ : nullptr;
    }
    bool is_set() const { return is_set_; }
    Place place() const { return place_; }
    int device() const { return device_; }
    bool is_writable() const { return is_writable_; }
    size_t num_bytes() const;
    ncclDataType_t datatype() const { return descriptor_.datatype; }
    size_t num_dimensions() const { return descriptor_.ndim; }
    size_t size(size_t dimension) const { return sizes_[dimension]; }
    void* data() const { return descriptor_.data; }
    nanobind::object owner() const { return nanobind::borrow(owner_); }
    // For the collector of garbage: all that this holds.
    int visit(visitproc visit, void* arg) const;

    // For those who describe: the memory, its place, then each extent.
    void set_memory(void* data, ncclDataType_t type, Place place, int device, bool is_writable);
    void set_shape(const size_t* sizes, size_t num_dimensions);
    void set_datatype(ncclDataType_t type) { descriptor_.datatype = type; }
    // The same bytes as rows of another type, whose size must divide that of a row.
    void set_row_type(ncclDataType_t type);
    void set_window(ncclWindow_t window, uint64_t offset);
    void keep(nanobind::handle owner);
    Py_buffer* buffer() { return &buffer_; }
    void keep_buffer() { has_buffer_ = true; }

  private:
    void release();

    ncclEpTensor_t descriptor_{NCCL_EP_TENSOR_SIZE, NCCL_EP_TENSOR_MAGIC, 0, ncclUint8, nullptr, nullptr, 0, nullptr};
    std::array<size_t, kMaxDimensions> sizes_{};
    bool is_set_ = false;
    bool is_writable_ = true;
    bool has_buffer_ = false;
    Place place_ = Place::kHost;
    int device_ = -1;
    PyObject* owner_ = nullptr;
    Py_buffer buffer_{};
};

// Describes an object; None leaves the result unset. name is for messages, e.g. "inputs.tokens". InvalidArgument: not
// an array, a type that the library does not have, strides, or a read-only array that is to be written.
Array array_from(nanobind::handle object, const char* name, Access access);

// The library's number of a type by name ("float32", "torch.bfloat16", "float8_e4m3fn", "float4_e2m1fn_x2", ...), if it
// has one; its name, and its size in bytes.
std::optional<ncclDataType_t> datatype_of_name(const std::string& name);
const char* name_of_datatype(ncclDataType_t type);
size_t bytes_of_datatype(ncclDataType_t type);
// Whether a dispatch moves rows of this type as such.
bool is_carried(ncclDataType_t type);

// "[2, 3] of float32", for messages.
std::string shown_array(const ncclEpTensor_t& array);

// The memory of a torch tensor now; used to notice one that has been moved since it was described.
void* torch_address(nanobind::handle tensor);

// Parts of array_from, each in its file. Return false for other kinds of objects.
bool describe_torch(nanobind::handle object, const char* name, Array& array);
bool describe_cuda_interface(nanobind::handle object, const char* name, Array& array);
bool describe_buffer(nanobind::handle object, const char* name, Access access, Array& array);
bool describe_array_interface(nanobind::handle object, const char* name, Array& array);
bool describe_dlpack(nanobind::handle object, const char* name, Array& array);

// A tensor of torch that has been looked at (fault_of_memory), at once. Returns false if it cannot be described so.
bool describe_known(nanobind::handle object, Array& array);

// A tensor of torch [A, B, C] whose memory is that of a dense [A, C, B], as [A, B, C]. Returns
// false if it is not, or if that cannot be seen at once.
bool describe_transposed(nanobind::handle object, Array& array);

// InvalidArgument unless strides (in bytes, or NULL) are those of a dense row-major array.
void expect_dense(const char* name, const size_t* sizes, const int64_t* strides, size_t num_dimensions,
                  size_t item_bytes);
void expect_dimensions(const char* name, size_t num_dimensions);

}  // namespace crossdock::python
