// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include "driver.h"
#include "error.h"
#include "torch_maker.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

cudaStream_t stream_at(nb::handle address) {
    void* pointer = PyLong_AsVoidPtr(nb::int_(nb::borrow(address)).ptr());
    if (PyErr_Occurred() != nullptr) nb::raise_python_error();
    return static_cast<cudaStream_t>(pointer);
}

// torch's own short cut to a device's current stream, which makes no object of it; NULL where this torch has none.
PyObject* raw_stream_getter(nb::handle torch) {
    static PyObject* getter = nullptr;
    static bool was_looked_up = false;
    if (!was_looked_up) {
        was_looked_up = true;
        getter = find_attribute(torch.attr("_C"), "_cuda_getCurrentRawStream").release().ptr();
    }
    return getter;
}

}  // namespace

cudaStream_t current_stream_of_torch(int device) {
    const nb::handle torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
    if (!torch.is_valid()) return nullptr;
    PyObject* getter = raw_stream_getter(torch);
    // Arrays on a device mean that CUDA runs; without any, torch is asked first.
    if (device >= 0 && getter != nullptr) return stream_at(nb::handle(getter)(device));
    const nb::object cuda = torch.attr("cuda");
    if (!nb::cast<bool>(cuda.attr("is_initialized")())) return nullptr;
    const nb::object stream = device < 0 ? cuda.attr("current_stream")() : cuda.attr("current_stream")(device);
    return stream_at(stream.attr("cuda_stream"));
}

bool is_capturing() {
    static PyObject* getter = nullptr;
    if (getter == nullptr) {
        const nb::object internals = nb::module_::import_("torch").attr("_C");
        getter = nb::object(internals.attr("_cuda_isCurrentStreamCapturing")).release().ptr();
    }
    return nb::cast<bool>(nb::handle(getter)());
}

cudaStream_t stream_from(nb::handle stream, bool is_cpu, int device) {
    if (is_cpu) return nullptr;
    if (stream.is_none()) return current_stream_of_torch(device);
    if (PyLong_Check(stream.ptr())) return stream_at(stream);
    nb::object pair = find_attribute(stream, "__cuda_stream__");
    if (pair.is_valid()) {
        if (PyCallable_Check(pair.ptr())) pair = pair();
        return stream_at(pair[1]);
    }
    for (const char* attribute : {"cuda_stream", "ptr", "handle"}) {
        const nb::object address = find_attribute(stream, attribute);
        if (address.is_valid()) return stream_at(address);
    }
    invalid_argument(std::string("stream is of type ") + Py_TYPE(stream.ptr())->tp_name +
                     ", allowed: None, an address, a stream of torch, CuPy or cuda.core");
}

void bind_streams(nb::module_& module) {
    module.def(
        "current_stream_address", [](int device) { return reinterpret_cast<size_t>(current_stream_of_torch(device)); },
        "device"_a, "The address of torch's current stream of a CUDA device, by its number.");
    module.def(
        "order_streams",
        [](int device, size_t waiting, size_t before) {
            return has_events() && is_current(device) &&
                   order_streams(device, reinterpret_cast<cudaStream_t>(waiting),
                                 reinterpret_cast<cudaStream_t>(before));
        },
        "device"_a, "waiting"_a, "before"_a,
        "Makes stream `waiting` wait for the work of stream `before`, both by address, on a CUDA device by number. "
        "Returns "
        "False if it cannot: use torch.");
}

}  // namespace crossdock::python
