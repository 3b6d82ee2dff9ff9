// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/data_types.h"
#include "error.h"
#include "tensor.h"

namespace nb = nanobind;

namespace crossdock::python {
std::optional<ncclDataType_t> datatype_of_name(const std::string& name) {
    constexpr const char* kTorch = "torch.";
    const char* plain = name.rfind(kTorch, 0) == 0 ? name.c_str() + std::strlen(kTorch) : name.c_str();
    for (const DataType& type : kDataTypes) {
        if (std::strcmp(type.python_name, plain) == 0) return type.value;
    }
    return std::nullopt;
}

const char* name_of_datatype(ncclDataType_t type) {
    const DataType* const known = find_data_type(type);
    return known == nullptr ? "an unknown type" : known->python_name;
}

std::string shown_array(const ncclEpTensor_t& array) {
    std::string text;
    for (unsigned int i = 0; i < array.ndim; ++i)
        text.append(i == 0 ? "[" : ", ").append(std::to_string(array.sizes[i]));
    return text + "] of " + name_of_datatype(array.datatype);
}

size_t bytes_of_datatype(ncclDataType_t type) {
    const DataType* const known = find_data_type(type);
    return known == nullptr ? 1 : known->bytes;
}

bool is_carried(ncclDataType_t type) {
    constexpr ncclDataType_t kCarried[] = {ncclBfloat16,   ncclFloat16, ncclFloat32, ncclFloat8e4m3,
                                           ncclFloat8e5m2, ncclUint8,   ncclInt8};
    return std::find(std::begin(kCarried), std::end(kCarried), type) != std::end(kCarried);
}

Array::Array(Array&& other) noexcept { *this = std::move(other); }

Array& Array::operator=(Array&& other) noexcept {
    if (this == &other) return *this;
    release();
    descriptor_ = other.descriptor_;
    sizes_ = other.sizes_;
    is_set_ = std::exchange(other.is_set_, false);
    is_writable_ = other.is_writable_;
    has_buffer_ = std::exchange(other.has_buffer_, false);
    place_ = other.place_;
    device_ = other.device_;
    owner_ = std::exchange(other.owner_, nullptr);
    buffer_ = other.buffer_;
    return *this;
}

void Array::release() {
    if (has_buffer_) PyBuffer_Release(&buffer_);
    has_buffer_ = false;
    Py_CLEAR(owner_);
    is_set_ = false;
}

int Array::visit(visitproc visit, void* arg) const {
    Py_VISIT(owner_);
    if (has_buffer_) Py_VISIT(buffer_.obj);
    return 0;
}

size_t Array::num_bytes() const {
    size_t bytes = bytes_of_datatype(descriptor_.datatype);
    for (size_t dimension = 0; dimension < descriptor_.ndim; ++dimension) bytes *= sizes_[dimension];
    return bytes;
}

void Array::set_memory(void* data, ncclDataType_t type, Place place, int device, bool is_writable) {
    is_set_ = true;
    descriptor_.data = data;
    descriptor_.datatype = type;
    place_ = place;
    device_ = device;
    is_writable_ = is_writable;
}

void Array::set_shape(const size_t* sizes, size_t num_dimensions) {
    descriptor_.ndim = static_cast<unsigned int>(num_dimensions);
    for (size_t dimension = 0; dimension < num_dimensions; ++dimension) sizes_[dimension] = sizes[dimension];
}

void Array::set_row_type(ncclDataType_t type) {
    size_t& columns = sizes_[descriptor_.ndim - 1];
    columns = columns * bytes_of_datatype(descriptor_.datatype) / bytes_of_datatype(type);
    descriptor_.datatype = type;
}

void Array::set_window(ncclWindow_t window, uint64_t offset) {
    descriptor_.win_hdl = window;
    descriptor_.win_offset = offset;
}

void Array::keep(nb::handle owner) {
    Py_XINCREF(owner.ptr());
    Py_XSETREF(owner_, owner.ptr());
}

void expect_dimensions(const char* name, size_t num_dimensions) {
    if (num_dimensions == 0 || num_dimensions > kMaxDimensions) {
        invalid_argument(std::string(name) + " has " + std::to_string(num_dimensions) + " dimensions, allowed: 1.." +
                         std::to_string(kMaxDimensions));
    }
}

void expect_dense(const char* name, const size_t* sizes, const int64_t* strides, size_t num_dimensions,
                  size_t item_bytes) {
    if (strides == nullptr) return;
    for (size_t dimension = 0; dimension < num_dimensions; ++dimension) {
        if (sizes[dimension] == 0) return;
    }
    auto expected = static_cast<int64_t>(item_bytes);
    for (size_t dimension = num_dimensions; dimension-- > 0;) {
        if (sizes[dimension] > 1 && strides[dimension] != expected) {
            invalid_argument(std::string(name) + " is not contiguous: dimension " + std::to_string(dimension) +
                             " has a stride of " + std::to_string(strides[dimension]) + " bytes, expected " +
                             std::to_string(expected) + "; pass a contiguous array");
        }
        expected *= static_cast<int64_t>(sizes[dimension]);
    }
}

Array array_from(nb::handle object, const char* name, Access access) {
    Array array;
    if (!object.is_valid() || object.is_none()) return array;
    if (nb::isinstance<Tensor>(object)) {
        nb::cast<Tensor&>(object).describe(name, array);
        array.keep(object);
    } else if (!describe_torch(object, name, array) && !describe_buffer(object, name, access, array) &&
               !describe_cuda_interface(object, name, array) && !describe_array_interface(object, name, array) &&
               !describe_dlpack(object, name, array)) {
        invalid_argument(std::string(name) + " is of type " + Py_TYPE(object.ptr())->tp_name +
                         ", allowed: arrays of NumPy and torch, crossdock.Tensor, and what has a buffer, DLPack or "
                         "__cuda_array_interface__");
    }
    if (access == Access::kWrite && !array.is_writable()) {
        invalid_argument(std::string(name) + " is read-only, and the call writes it");
    }
    return array;
}

}  // namespace crossdock::python
