// SPDX-License-Identifier: Apache-2.0
#include "strided.h"

#include "array.h"
#include "error.h"
#include "torch_view.h"

namespace nb = nanobind;

namespace crossdock::python {
namespace {

bool from_view(const nb::dlpack::dltensor& view, Strided& strided) {
    if (view.ndim < 1 || view.ndim > Strided::kMostDimensions || !(is_on_host(view) || is_on_cuda(view))) return false;
    strided.data = view.data;
    strided.type = datatype_of(view.dtype);
    strided.item_bytes = int64_t{view.dtype.bits} * view.dtype.lanes / 8;
    strided.device = is_on_host(view) ? -1 : view.device.device_id;
    strided.num_dimensions = view.ndim;
    int64_t dense = 1;
    for (int32_t dimension = view.ndim; dimension-- > 0;) {
        strided.shape[dimension] = view.shape[dimension];
        strided.strides[dimension] = view.strides == nullptr ? dense : view.strides[dimension];
        dense *= view.shape[dimension];
    }
    return true;
}

// By Python's attributes, where torch has no quicker way.
bool from_attributes(nb::handle tensor, Strided& strided) {
    const bool is_host = nb::cast<bool>(tensor.attr("is_cpu"));
    if (!is_host && !nb::cast<bool>(tensor.attr("is_cuda"))) return false;
    const nb::tuple shape = nb::cast<nb::tuple>(tensor.attr("shape"));
    const nb::tuple strides = nb::cast<nb::tuple>(tensor.attr("stride")());
    if (nb::len(shape) < 1 || nb::len(shape) > Strided::kMostDimensions) return false;
    strided.data = torch_address(tensor);
    strided.type = datatype_of_name(shown(tensor.attr("dtype")));
    strided.item_bytes = nb::cast<int64_t>(tensor.attr("element_size")());
    strided.device = is_host ? -1 : nb::cast<int>(tensor.attr("get_device")());
    strided.num_dimensions = static_cast<int32_t>(nb::len(shape));
    for (int32_t dimension = 0; dimension < strided.num_dimensions; ++dimension) {
        strided.shape[dimension] = nb::cast<int64_t>(shape[dimension]);
        strided.strides[dimension] = nb::cast<int64_t>(strides[dimension]);
    }
    return true;
}

}  // namespace

bool Strided::is_dense() const {
    int64_t expected = 1;
    for (int32_t dimension = num_dimensions; dimension-- > 0;) {
        if (size() > 0 && shape[dimension] > 1 && strides[dimension] != expected) return false;
        expected *= shape[dimension];
    }
    return true;
}

int64_t Strided::size() const {
    int64_t size = 1;
    for (int32_t dimension = 0; dimension < num_dimensions; ++dimension) size *= shape[dimension];
    return size;
}

std::string shown_tensor(nb::handle object) {
    if (!is_torch_tensor(object)) return std::string("of type ") + Py_TYPE(object.ptr())->tp_name;
    const nb::object shape = nb::steal(PySequence_List(nb::object(object.attr("shape")).ptr()));
    const std::string text =
        shown(shape) + " of " + shown(object.attr("dtype")) + " on " + shown(object.attr("device"));
    if (nb::cast<bool>(object.attr("is_contiguous")())) return text;
    return text + " with strides " + shown(object.attr("stride")());
}

bool strided_from(nb::handle tensor, Strided& strided) {
    nb::dlpack::dltensor view;
    const bool is_described = view_torch(tensor, view) ? from_view(view, strided)
                                                       : is_torch_tensor(tensor) && from_attributes(tensor, strided);
    return is_described && (strided.data != nullptr || strided.size() == 0);
}

}  // namespace crossdock::python
