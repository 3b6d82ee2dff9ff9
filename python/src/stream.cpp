// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include "error.h"

namespace nb = nanobind;

namespace crossdock::python {
namespace {

cudaStream_t stream_at(nb::handle address) {
    void* pointer = PyLong_AsVoidPtr(nb::int_(nb::borrow(address)).ptr());
    if (PyErr_Occurred() != nullptr) nb::raise_python_error();
    return static_cast<cudaStream_t>(pointer);
}

cudaStream_t current_stream_of_torch(int device) {
    PyObject* torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
    if (torch == nullptr) return nullptr;
    const nb::object cuda = nb::borrow(torch).attr("cuda");
    if (!nb::cast<bool>(cuda.attr("is_initialized")())) return nullptr;
    const nb::object stream = device < 0 ? cuda.attr("current_stream")() : cuda.attr("current_stream")(device);
    return stream_at(stream.attr("cuda_stream"));
}

}  // namespace

cudaStream_t stream_from(nb::handle stream, bool is_cpu, int device) {
    if (is_cpu) return nullptr;
    if (stream.is_none()) return current_stream_of_torch(device);
    if (PyLong_Check(stream.ptr())) return stream_at(stream);
    if (nb::hasattr(stream, "__cuda_stream__")) {
        nb::object pair = stream.attr("__cuda_stream__");
        if (PyCallable_Check(pair.ptr())) pair = pair();
        return stream_at(pair[1]);
    }
    for (const char* attribute : {"cuda_stream", "ptr", "handle"}) {
        if (nb::hasattr(stream, attribute)) return stream_at(stream.attr(attribute));
    }
    invalid_argument(std::string("stream is of type ") + Py_TYPE(stream.ptr())->tp_name +
                     ", allowed: None, an address, a stream of torch, CuPy or cuda.core");
}

}  // namespace crossdock::python
