// SPDX-License-Identifier: Apache-2.0
//
// Arrays that describe themselves: the buffer protocol, the two array interfaces, DLPack.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstring>

#include "array.h"
#include "error.h"

namespace nb = nanobind;

namespace crossdock::python {
namespace {

[[noreturn]] void unknown_type(const char* name, const std::string& type) {
    invalid_argument(std::string(name) + " is of type " + type + ", which the library does not have");
}

ncclDataType_t datatype_of_format(const char* name, const char* format, Py_ssize_t item_bytes) {
    const char* letters = format;
    if (*letters == '@' || *letters == '=' || *letters == '<') ++letters;  // this machine's byte order, all three
    if (letters[0] != 0 && letters[1] == 0) {
        const bool is_signed = std::strchr("bhilq", letters[0]) != nullptr;
        if (is_signed || std::strchr("BHILQ", letters[0]) != nullptr) {
            if (item_bytes == 1) return is_signed ? ncclInt8 : ncclUint8;
            if (item_bytes == 4) return is_signed ? ncclInt32 : ncclUint32;
            if (item_bytes == 8) return is_signed ? ncclInt64 : ncclUint64;
        }
        if (letters[0] == 'e') return ncclFloat16;
        if (letters[0] == 'f') return ncclFloat32;
        if (letters[0] == 'd') return ncclFloat64;
    }
    unknown_type(name, std::string("'") + format + "' (format of its buffer)");
}

ncclDataType_t datatype_of_typestr(const char* name, const std::string& typestr) {
    if (typestr.size() == 3 && (typestr[0] == '<' || typestr[0] == '|')) {
        const std::string letters = typestr.substr(1);
        if (letters == "i1") return ncclInt8;
        if (letters == "u1") return ncclUint8;
        if (letters == "i4") return ncclInt32;
        if (letters == "u4") return ncclUint32;
        if (letters == "i8") return ncclInt64;
        if (letters == "u8") return ncclUint64;
        if (letters == "f2") return ncclFloat16;
        if (letters == "f4") return ncclFloat32;
        if (letters == "f8") return ncclFloat64;
    }
    unknown_type(name, "'" + typestr + "' (its typestr)");
}

// The dictionary of an array interface; the two are alike.
void describe_interface(nb::handle interface, nb::handle object, const char* name, Place place, Array& array) {
    if (!PyDict_Check(interface.ptr())) invalid_argument(std::string(name) + " has an array interface that is no dict");
    const nb::dict fields = nb::borrow<nb::dict>(interface);
    for (const char* needed : {"typestr", "shape", "data"}) {
        if (!fields.contains(needed)) invalid_argument(std::string(name) + " has an array interface without " + needed);
    }
    const std::string typestr = shown(fields["typestr"]);
    // Types that the interface has no letters for (bfloat16 and the like) have a name in the array's dtype.
    const nb::object dtype = find_attribute(object, "dtype");
    std::optional<ncclDataType_t> type;
    if (dtype.is_valid()) {
        const nb::object dtype_name = find_attribute(dtype, "name");
        type = datatype_of_name(dtype_name.is_valid() ? shown(dtype_name) : shown(dtype));
    }
    const ncclDataType_t datatype = type ? *type : datatype_of_typestr(name, typestr);

    const std::string what = std::string(name) + ": its array interface's ";
    const nb::tuple shape = items_of(fields["shape"], what + "shape");
    expect_dimensions(name, nb::len(shape));
    size_t sizes[kMaxDimensions];
    int64_t strides[kMaxDimensions];
    for (size_t dimension = 0; dimension < nb::len(shape); ++dimension) {
        sizes[dimension] = as<size_t>(shape[dimension], what + "extent", "0 and more");
    }
    if (fields.contains("strides") && !fields["strides"].is_none()) {
        const nb::tuple given = items_of(fields["strides"], what + "strides");
        if (nb::len(given) != nb::len(shape)) invalid_argument(std::string(name) + " has strides for other dimensions");
        for (size_t dimension = 0; dimension < nb::len(given); ++dimension) {
            strides[dimension] = as<int64_t>(given[dimension], what + "stride", "numbers of bytes");
        }
        expect_dense(name, sizes, strides, nb::len(shape), bytes_of_datatype(datatype));
    }
    const nb::tuple data = items_of(fields["data"], what + "data");
    if (nb::len(data) != 2) invalid_argument(what + "data is " + shown(data) + ", expected (address, is read-only)");
    const auto address = as<size_t>(data[0], what + "address", "an address");
    const bool is_read_only = as<bool>(data[1], what + "read-only flag", "True, False");
    // The interface has no device's number: -1, the current one.
    array.set_memory(reinterpret_cast<void*>(address), datatype, place, -1, !is_read_only);
    array.set_shape(sizes, nb::len(shape));
    array.keep(object);
}

}  // namespace

bool describe_cuda_interface(nb::handle object, const char* name, Array& array) {
    const nb::object interface = find_attribute(object, "__cuda_array_interface__");
    if (!interface.is_valid()) return false;
    describe_interface(interface, object, name, Place::kCuda, array);
    return true;
}

bool describe_array_interface(nb::handle object, const char* name, Array& array) {
    const nb::object interface = find_attribute(object, "__array_interface__");
    if (!interface.is_valid()) return false;
    describe_interface(interface, object, name, Place::kHost, array);
    return true;
}

bool describe_buffer(nb::handle object, const char* name, Access access, Array& array) {
    if (!PyObject_CheckBuffer(object.ptr())) return false;
    Py_buffer* buffer = array.buffer();
    if (PyObject_GetBuffer(object.ptr(), buffer, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
        // A type that buffers cannot name, as those of ml_dtypes: the array interface comes next.
        forget_python_error();
        return false;
    }
    array.keep_buffer();
    const auto num_dimensions = static_cast<size_t>(buffer->ndim);
    expect_dimensions(name, num_dimensions);
    const ncclDataType_t type =
        datatype_of_format(name, buffer->format != nullptr ? buffer->format : "B", buffer->itemsize);
    size_t sizes[kMaxDimensions];
    int64_t strides[kMaxDimensions];
    for (size_t dimension = 0; dimension < num_dimensions; ++dimension) {
        sizes[dimension] = static_cast<size_t>(buffer->shape[dimension]);
        strides[dimension] = buffer->strides[dimension];
    }
    expect_dense(name, sizes, strides, num_dimensions, static_cast<size_t>(buffer->itemsize));
    if (access == Access::kWrite && buffer->readonly != 0) {
        invalid_argument(std::string(name) + " is read-only, and the call writes it");
    }
    array.set_memory(buffer->buf, type, Place::kHost, -1, buffer->readonly == 0);
    array.set_shape(sizes, num_dimensions);
    array.keep(object);
    return true;
}

bool describe_dlpack(nb::handle object, const char* name, Array& array) {
    const nb::object exporter = find_attribute(object, "__dlpack__");
    if (!exporter.is_valid()) return false;
    // As an array that may be written, if it is one, which versions say. Exporters that know none refuse the argument.
    nb::ndarray<> writable;
    nb::ndarray<nb::ro> view;
    bool is_writable = false, is_there = false;
    std::string refusal;
    for (const bool is_versioned : {true, false}) {
        try {
            const nb::object capsule =
                is_versioned ? exporter(nb::arg("max_version") = nb::make_tuple(1, 0)) : exporter();
            is_writable = nb::try_cast(capsule, writable);
            if (is_writable) view = nb::ndarray<nb::ro>(writable);
            is_there = is_writable || nb::try_cast(capsule, view);
        } catch (nb::python_error& error) {
            if (!is_about_call(error.type())) throw;
            refusal = std::string(": ") + Py_TYPE(error.value().ptr())->tp_name + ": " + shown(error.value());
        }
        if (is_there) break;
    }
    if (!is_there) invalid_argument(std::string(name) + " has __dlpack__, but its memory cannot be reached" + refusal);
    const bool is_host = view.device_type() == nb::device::cpu::value;
    if (!is_host && view.device_type() != nb::device::cuda::value) {
        invalid_argument(std::string(name) + " is on DLPack's device type " + std::to_string(view.device_type()) +
                         ", allowed: 1 (CPU), 2 (CUDA)");
    }
    std::string type_name = view.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)    ? "float"
                            : view.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int)    ? "int"
                            : view.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt)   ? "uint"
                            : view.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) ? "bfloat"
                                                                                                        : "code";
    type_name += std::to_string(view.dtype().bits);
    const std::optional<ncclDataType_t> type = datatype_of_name(type_name);
    if (!type || view.dtype().lanes != 1) unknown_type(name, type_name);

    expect_dimensions(name, view.ndim());
    size_t sizes[kMaxDimensions];
    int64_t strides[kMaxDimensions];
    for (size_t dimension = 0; dimension < view.ndim(); ++dimension) {
        sizes[dimension] = view.shape(dimension);
        strides[dimension] = view.stride(dimension) * static_cast<int64_t>(bytes_of_datatype(*type));
    }
    expect_dense(name, sizes, strides, view.ndim(), bytes_of_datatype(*type));
    // data_handle, because data() of what may only be read is const, and a descriptor has one pointer for both.
    void* data = static_cast<std::byte*>(view.data_handle()) + view.byte_offset();
    array.set_memory(data, *type, is_host ? Place::kHost : Place::kCuda, is_host ? -1 : view.device_id(), is_writable);
    array.set_shape(sizes, view.ndim());
    // The exporting object keeps the memory, the view its right to it.
    array.keep(nb::make_tuple(nb::borrow(object), nb::cast(view, nb::rv_policy::reference)));
    return true;
}

}  // namespace crossdock::python
