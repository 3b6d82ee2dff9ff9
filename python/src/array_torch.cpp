// SPDX-License-Identifier: Apache-2.0
//
// Tensors of torch: in C where torch offers that (torch_view.h), else by their Python methods, which also say what is
// wrong with one that cannot be taken.
#include <algorithm>
#include <unordered_map>

#include "array.h"
#include "error.h"
#include "torch_view.h"

namespace nb = nanobind;

namespace crossdock::python {
namespace {

struct Names {
    PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* shape = PyUnicode_InternFromString("shape");
    PyObject* dtype = PyUnicode_InternFromString("dtype");
    PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
    PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
    PyObject* is_cuda = PyUnicode_InternFromString("is_cuda");
    PyObject* get_device = PyUnicode_InternFromString("get_device");
    PyObject* device = PyUnicode_InternFromString("device");
};

const Names& names() {
    static const Names* instance = new Names;
    return *instance;
}

// A torch.dtype is one object for the life of the process.
ncclDataType_t datatype_of_object(nb::handle dtype, const char* name) {
    static auto* known = new std::unordered_map<PyObject*, ncclDataType_t>;
    const auto found = known->find(dtype.ptr());
    if (found != known->end()) return found->second;
    const std::string text = shown(dtype);
    const std::optional<ncclDataType_t> type = datatype_of_name(text);
    if (!type) invalid_argument(std::string(name) + " is of type " + text + ", which the library does not have");
    Py_INCREF(dtype.ptr());
    known->emplace(dtype.ptr(), *type);
    return *type;
}

nb::object attribute(nb::handle object, PyObject* attribute_name) {
    PyObject* value = PyObject_GetAttr(object.ptr(), attribute_name);
    if (value == nullptr) nb::raise_python_error();
    return nb::steal(value);
}

nb::object call(nb::handle object, PyObject* method) {
    PyObject* value = PyObject_CallMethodNoArgs(object.ptr(), method);
    if (value == nullptr) nb::raise_python_error();
    return nb::steal(value);
}

}  // namespace

bool describe_known(nb::handle object, Array& array) {
    nb::dlpack::dltensor view;
    if (!view_torch(object, view)) return false;
    const std::optional<ncclDataType_t> type = datatype_of(view.dtype);
    const bool has_place = is_on_host(view) || is_on_cuda(view);
    const bool fits = view.ndim > 0 && view.ndim <= static_cast<int32_t>(kMaxDimensions) && is_contiguous(view);
    if (!type || !has_place || !fits) return false;
    size_t sizes[kMaxDimensions];
    for (int32_t dimension = 0; dimension < view.ndim; ++dimension) {
        sizes[dimension] = static_cast<size_t>(view.shape[dimension]);
    }
    if (is_on_host(view)) {
        array.set_memory(view.data, *type, Place::kHost, -1, true);
    } else {
        array.set_memory(view.data, *type, Place::kCuda, view.device.device_id, true);
    }
    array.set_shape(sizes, static_cast<size_t>(view.ndim));
    array.keep(object);
    return true;
}

bool describe_transposed(nb::handle object, Array& array) {
    nb::dlpack::dltensor view;
    if (!view_torch(object, view) || view.ndim != 3 || view.strides == nullptr) return false;
    const int64_t* shape = view.shape;
    const int64_t strides[] = {shape[1] * shape[2], 1, shape[1]};
    const std::optional<ncclDataType_t> type = datatype_of(view.dtype);
    if (!type || !(is_on_host(view) || is_on_cuda(view)) || !std::equal(strides, strides + 3, view.strides))
        return false;
    const bool is_host = is_on_host(view);
    array.set_memory(view.data, *type, is_host ? Place::kHost : Place::kCuda, is_host ? -1 : view.device.device_id,
                     true);
    const size_t sizes[] = {static_cast<size_t>(shape[0]), static_cast<size_t>(shape[1]),
                            static_cast<size_t>(shape[2])};
    array.set_shape(sizes, 3);
    array.keep(object);
    return true;
}

void* torch_address(nb::handle tensor) {
    nb::dlpack::dltensor view;
    return view_torch(tensor, view) ? view.data : PyLong_AsVoidPtr(call(tensor, names().data_ptr).ptr());
}

bool describe_torch(nb::handle object, const char* name, Array& array) {
    if (!is_torch_tensor(object)) return false;
    if (const char* fault = fault_of_memory(object)) invalid_argument(std::string(name) + " " + fault);
    if (describe_known(object, array)) return true;
    const bool is_host = attribute(object, names().is_cpu).ptr() == Py_True;
    if (!is_host && attribute(object, names().is_cuda).ptr() != Py_True) {
        invalid_argument(std::string(name) + " is on device " + shown(attribute(object, names().device)) +
                         ", allowed: cpu, cuda");
    }
    const ncclDataType_t type = datatype_of_object(attribute(object, names().dtype), name);
    if (call(object, names().is_contiguous).ptr() != Py_True) {
        invalid_argument(std::string(name) + " is not contiguous: pass its contiguous()");
    }
    const nb::object shape = attribute(object, names().shape);
    const Py_ssize_t num_dimensions = PyTuple_GET_SIZE(shape.ptr());
    expect_dimensions(name, static_cast<size_t>(num_dimensions));
    size_t sizes[kMaxDimensions];
    for (Py_ssize_t dimension = 0; dimension < num_dimensions; ++dimension) {
        sizes[dimension] = PyLong_AsSize_t(PyTuple_GET_ITEM(shape.ptr(), dimension));
    }
    if (PyErr_Occurred() != nullptr) nb::raise_python_error();
    const int device = is_host ? -1 : static_cast<int>(PyLong_AsLong(call(object, names().get_device).ptr()));
    array.set_memory(torch_address(object), type, is_host ? Place::kHost : Place::kCuda, device, true);
    array.set_shape(sizes, static_cast<size_t>(num_dimensions));
    array.keep(object);
    return true;
}

}  // namespace crossdock::python
