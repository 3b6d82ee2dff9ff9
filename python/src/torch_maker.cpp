// SPDX-License-Identifier: Apache-2.0
#include "torch_maker.h"

#include <algorithm>
#include <cstring>

#include "array.h"
#include "collected.h"
#include "driver.h"
#include "stream.h"
#include "torch_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

constexpr int64_t kPieces = 64;     // of one memory
constexpr int64_t kPieceUnit = 32;  // elements of 4 bytes: a line of a GPU's memory
constexpr int64_t kLongestPiece = 1024;

// Of a tensor of torch; -1: the host.
int device_of(nb::handle tensor) {
    return nb::cast<bool>(tensor.attr("is_cpu")) ? -1 : nb::cast<int>(tensor.attr("get_device")());
}

// NULL where this torch lacks them.
struct QuickMakers {
    PyObject* on_host = nullptr;
    PyObject* on_cuda = nullptr;  // on the current device
    PyObject* view = nullptr;
    PyObject* current_device = nullptr;

    QuickMakers() {
        const nb::object internals = nb::module_::import_("torch").attr("_C");
        const nb::object guards = nb::getattr(nb::getattr(internals, "_dynamo", nb::none()), "guards", nb::none());
        on_host = nb::getattr(guards, "_empty_strided_cpu", nb::object()).release().ptr();
        on_cuda = nb::getattr(guards, "_empty_strided_cuda", nb::object()).release().ptr();
        view = nb::getattr(guards, "_reinterpret_tensor", nb::object()).release().ptr();
        current_device = nb::getattr(internals, "_cuda_getDevice", nb::object()).release().ptr();
    }

    bool is_current(int device) const {
        return current_device != nullptr && nb::cast<int>(nb::handle(current_device)()) == device;
    }
    PyObject* maker_for(int device) const {
        if (device < 0) return on_host;
        return on_cuda != nullptr && is_current(device) ? on_cuda : nullptr;
    }

    static const QuickMakers& get() {
        static const QuickMakers* makers = nullptr;  // no guarded initialisation: imports may let other threads run
        if (makers == nullptr) makers = new QuickMakers;
        return *makers;
    }
};

}  // namespace

bool is_current(int device) { return QuickMakers::get().is_current(device); }

std::optional<int> current_device() {
    PyObject* getter = QuickMakers::get().current_device;
    if (getter == nullptr) return std::nullopt;
    return nb::cast<int>(nb::handle(getter)());
}

nb::object new_tensor(nb::handle sizes, nb::handle strides, nb::handle dtype, nb::handle like, int device) {
    PyObject* make = QuickMakers::get().maker_for(device);
    if (make == nullptr) return like.attr("new_empty_strided")(sizes, strides);
    PyObject* arguments[] = {sizes.ptr(), strides.ptr(), dtype.ptr()};
    PyObject* made = PyObject_Vectorcall(make, arguments, 3, nullptr);
    if (made == nullptr) nb::raise_python_error();
    return nb::steal(made);
}

nb::object copy_of(nb::handle tensor) {
    nb::dlpack::dltensor view, copied;
    const bool has_view = view_torch(tensor, view) && view.ndim == 2 && is_contiguous(view);
    const std::optional<ncclDataType_t> type = has_view ? datatype_of(view.dtype) : std::nullopt;
    if (!type || !(is_on_host(view) || is_on_cuda(view))) return tensor.attr("clone")();
    const int64_t columns = view.shape[1];
    const auto num_bytes = static_cast<size_t>(view.shape[0] * columns) * bytes_of_datatype(*type);
    const int device = is_on_host(view) ? -1 : view.device.device_id;
    const nb::object copy =
        new_tensor(nb::make_tuple(view.shape[0], columns), nb::make_tuple(std::max<int64_t>(columns, 1), 1),
                   tensor.attr("dtype"), tensor, device);
    if (!view_torch(copy, copied)) return tensor.attr("clone")();
    if (device < 0) {
        std::memcpy(copied.data, view.data, num_bytes);
        return copy;
    }
    // One call of the driver, past the choice of an operator. It goes by the thread's current device, as new tensors
    // do.
    const bool is_copied = copy_on_device(copied.data, view.data, num_bytes, stream_from(nb::none(), false, device));
    return is_copied ? copy : tensor.attr("clone")();
}

TensorMaker::TensorMaker(nb::object like, nb::object sizes, nb::object strides)
    : like_(std::move(like)),
      dtype_(like_.attr("dtype")),
      sizes_(std::move(sizes)),
      strides_(std::move(strides)),
      device_(device_of(like_)) {}

PieceMaker::PieceMaker(nb::object like, int64_t length)
    : like_(std::move(like)),
      dtype_(like_.attr("dtype")),
      sizes_(nb::make_tuple(length)),
      strides_(nb::make_tuple(1)),
      device_(device_of(like_)),
      step_((length + kPieceUnit - 1) / kPieceUnit * kPieceUnit) {
    whole_sizes_ = nb::make_tuple(kPieces * step_);
}

nb::object PieceMaker::make(bool is_captured) {
    PyObject* view = QuickMakers::get().view;
    if (is_captured || view == nullptr || step_ > kLongestPiece) {
        return new_tensor(sizes_, strides_, dtype_, like_, device_);
    }
    const cudaStream_t stream = device_ < 0 ? nullptr : current_stream_of_torch(device_);
    if (!whole_.is_valid() || next_ == kPieces * step_ || stream != stream_) {
        whole_ = new_tensor(whole_sizes_, strides_, dtype_, like_, device_);
        stream_ = stream;
        next_ = 0;
    }
    const nb::object whole = whole_;  // whatever other threads do meanwhile
    const nb::int_ first(next_);
    next_ += step_;
    PyObject* arguments[] = {whole.ptr(), sizes_.ptr(), strides_.ptr(), first.ptr()};
    PyObject* made = PyObject_Vectorcall(view, arguments, 4, nullptr);
    if (made == nullptr) nb::raise_python_error();
    return nb::steal(made);
}

int PieceMaker::visit(visitproc visit, void* arg) const {
    Py_VISIT(whole_.ptr());
    return 0;
}

void bind_torch_makers(nb::module_& module) {
    nb::class_<TensorMaker>(module, "TensorMaker",
                            "Makes tensors of torch that are all alike, their elements undefined.")
        .def(nb::init<nb::object, nb::object, nb::object>(), "like"_a, "sizes"_a, "strides"_a,
             nb::sig("def __init__(self, like: object, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None"),
             "like: a tensor of the same type, on the same device.")
        .def("__call__", &TensorMaker::make, nb::sig("def __call__(self) -> typing.Any"));
    nb::class_<PieceMaker>(module, "PieceMaker", nb::type_slots(collected<PieceMaker>()),
                           "Makes short tensors of torch that are all alike, out of memory for many of them, their "
                           "elements undefined.")
        .def(nb::init<nb::object, int64_t>(), "like"_a, "length"_a,
             nb::sig("def __init__(self, like: object, length: int) -> None"),
             "like: a tensor of the same type, of 4 bytes, on the same device.")
        .def("__call__", &PieceMaker::make, "is_captured"_a,
             nb::sig("def __call__(self, is_captured: bool) -> typing.Any"),
             "is_captured: the current stream is being captured.");
    module.def("copy_of", &copy_of, "tensor"_a, nb::sig("def copy_of(tensor: object) -> typing.Any"),
               "A copy of a tensor of torch, on the current stream of its device.");
}

}  // namespace crossdock::python
