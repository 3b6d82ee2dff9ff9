// SPDX-License-Identifier: Apache-2.0
#include "tensor.h"

#include "collected.h"
#include "error.h"
#include "torch_view.h"
#include "window.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

ncclDataType_t datatype_of_argument(nb::handle dtype) {
    if (PyLong_Check(dtype.ptr())) {
        const long number = PyLong_AsLong(dtype.ptr());
        const auto type = static_cast<ncclDataType_t>(number);
        if (number < 0 || number > ncclFloat4x2) invalid_argument("dtype is " + shown(dtype) + ", allowed: 0..12");
        return type;
    }
    nb::object called = find_attribute(dtype, "name");
    if (!called.is_valid()) called = find_attribute(dtype, "__name__");
    const std::string name = shown(called.is_valid() ? called : nb::borrow(dtype));
    const std::optional<ncclDataType_t> type = datatype_of_name(name);
    if (!type) invalid_argument("dtype is " + name + ", which the library does not have");
    return *type;
}

}  // namespace

Tensor::Tensor(nb::handle buffer, nb::handle dtype, nb::handle shape, nb::handle window, uint64_t window_offset)
    : array_(array_from(buffer, "buffer", Access::kRead)),
      window_(nb::borrow(window)),
      window_offset_(window_offset),
      is_torch_(is_torch_tensor(buffer)) {
    if (!array_.is_set()) invalid_argument("buffer is None");
    const size_t num_bytes = array_.num_bytes();
    if (!dtype.is_none()) {
        const ncclDataType_t type = datatype_of_argument(dtype);
        if (shape.is_none() && bytes_of_datatype(type) != bytes_of_datatype(array_.datatype())) {
            invalid_argument(std::string("dtype is ") + name_of_datatype(type) + ", and buffer has elements of " +
                             std::to_string(bytes_of_datatype(array_.datatype())) + " bytes: give the shape, too");
        }
        array_.set_datatype(type);
    }
    if (!shape.is_none()) {
        const nb::tuple extents = items_of(shape, "shape");
        expect_dimensions("shape", nb::len(extents));
        size_t sizes[kMaxDimensions];
        size_t bytes = bytes_of_datatype(array_.datatype());
        for (size_t dimension = 0; dimension < nb::len(extents); ++dimension) {
            sizes[dimension] = as<size_t>(extents[dimension], "an extent of shape", "0 and more");
            if (__builtin_mul_overflow(bytes, sizes[dimension], &bytes)) {
                invalid_argument("shape is " + shown(shape) + ", which has more bytes than can be addressed");
            }
        }
        if (bytes > num_bytes) {
            invalid_argument("shape is " + shown(shape) + ", which takes " + std::to_string(bytes) +
                             " bytes; buffer has " + std::to_string(num_bytes));
        }
        array_.set_shape(sizes, nb::len(extents));
    }
    if (!window.is_none()) window_handle_of(window, "window");
}

void Tensor::describe(const char* name, Array& array) const {
    if (is_torch_ && torch_address(array_.owner()) != array_.data()) {
        invalid_usage(std::string(name) + ": the torch tensor's memory has moved since its Tensor was made");
    }
    array.set_memory(array_.data(), array_.datatype(), array_.place(), array_.device(), array_.is_writable());
    size_t sizes[kMaxDimensions];
    for (size_t dimension = 0; dimension < array_.num_dimensions(); ++dimension)
        sizes[dimension] = array_.size(dimension);
    array.set_shape(sizes, array_.num_dimensions());
    if (!window_.is_none()) array.set_window(window_handle_of(window_, name), window_offset_);
}

nb::tuple Tensor::sizes() const {
    nb::list sizes;
    for (size_t dimension = 0; dimension < array_.num_dimensions(); ++dimension) sizes.append(array_.size(dimension));
    return nb::tuple(sizes);
}

int Tensor::visit(visitproc visit, void* arg) const {
    Py_VISIT(window_.ptr());
    return array_.visit(visit, arg);
}

void Tensor::clear() {
    array_ = Array();
    window_.reset();
}

void bind_tensor(nb::module_& module) {
    nb::class_<Tensor>(module, "Tensor", nb::type_slots(collected<Tensor>()),
                       R"(An array, described once for many calls.

All calls that take an array also take a Tensor. Calls with Tensors are faster. A Tensor keeps the array alive. Nothing
is copied. A Tensor can also say what an array cannot:

- dtype: another type of the same size: a name, a dtype of NumPy or torch, or NCCL's number.
- shape: another shape of the same bytes.
- window: the registered window that the memory is in: a Window, or a number that is an ncclWindow_t.
- window_offset: bytes from the window's beginning to the array.

It raises InvalidArgument if dtype or shape does not fit the array's bytes.)")
        .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, uint64_t>(), "buffer"_a.none(), nb::kw_only(),
             "dtype"_a.none() = nb::none(), "shape"_a.none() = nb::none(), "window"_a.none() = nb::none(),
             "window_offset"_a = 0)
        .def_prop_ro("buffer", &Tensor::buffer, "The array.")
        .def_prop_ro("data", &Tensor::data, "The address of its first byte.")
        .def_prop_ro("datatype", &Tensor::datatype, "The type's name, e.g. \"bfloat16\".")
        .def_prop_ro("sizes", &Tensor::sizes, nb::for_getter(nb::sig("def sizes(self) -> tuple[int, ...]")),
                     "The extents.")
        .def_prop_ro(
            "ndim", [](const Tensor& tensor) { return nb::len(tensor.sizes()); }, "How many extents.");
}

}  // namespace crossdock::python
