// SPDX-License-Identifier: Apache-2.0
#include "torch_maker.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "array.h"
#include "collected.h"
#include "driver.h"
#include "error.h"
#include "stream.h"
#include "torch_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

constexpr int64_t kPieces = 64;  // of one memory
constexpr int64_t kLongestPiece = 1024;
constexpr int64_t kLineBytes = 128;  // of a GPU's memory
constexpr int64_t kMostBytesOfCopies = 1 << 20;

// Elements, rounded up.
int64_t whole_lines(int64_t length, int64_t element_bytes) {
    const int64_t line = kLineBytes / element_bytes;
    return (length + line - 1) / line * line;
}

// Of a tensor of torch; -1: the host.
int device_of(nb::handle tensor) {
    return nb::cast<bool>(tensor.attr("is_cpu")) ? -1 : nb::cast<int>(tensor.attr("get_device")());
}

// Functions for code that torch.compile generates; NULL if this version of torch lacks them. Without them a low-latency
// dispatch takes 4.7 instead of 3.3 µs, a combine 3.3 instead of 2.6 (AMD EPYC, bench/deep_ep_host_cost.py).
struct QuickMakers {
    PyObject* on_host = nullptr;
    PyObject* on_cuda = nullptr;  // on the current device
    PyObject* view = nullptr;
    PyObject* users = nullptr;  // of a storage
    PyObject* current_device = nullptr;

    QuickMakers() {
        const nb::object internals = nb::module_::import_("torch").attr("_C");
        const nb::object dynamo = find_attribute(internals, "_dynamo");
        const nb::object guards = dynamo.is_valid() ? find_attribute(dynamo, "guards") : dynamo;
        if (guards.is_valid()) {
            on_host = find_attribute(guards, "_empty_strided_cpu").release().ptr();
            on_cuda = find_attribute(guards, "_empty_strided_cuda").release().ptr();
            view = find_attribute(guards, "_reinterpret_tensor").release().ptr();
        }
        users = find_attribute(internals, "_storage_Use_Count").release().ptr();
        current_device = find_attribute(internals, "_cuda_getDevice").release().ptr();
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

// A tensor of its own in the memory of another one, from an element on.
nb::object view_of(nb::handle whole, nb::handle sizes, nb::handle strides, nb::handle first) {
    PyObject* arguments[] = {whole.ptr(), sizes.ptr(), strides.ptr(), first.ptr()};
    PyObject* made = PyObject_Vectorcall(QuickMakers::get().view, arguments, 4, nullptr);
    if (made == nullptr) nb::raise_python_error();
    return nb::steal(made);
}

Py_ssize_t users_of(nb::handle address) { return nb::cast<Py_ssize_t>(nb::handle(QuickMakers::get().users)(address)); }

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

TensorMaker::TensorMaker(nb::object like, nb::object sizes, nb::object strides)
    : like_(std::move(like)),
      dtype_(like_.attr("dtype")),
      sizes_(std::move(sizes)),
      strides_(std::move(strides)),
      device_(device_of(like_)) {}

PieceMaker::PieceMaker(nb::object like, nb::object sizes, nb::object strides, int64_t step, int64_t num_pieces)
    : like_(std::move(like)),
      device_(device_of(like_)),
      step_(step),
      num_pieces_(num_pieces),
      dtype_(like_.attr("dtype")),
      sizes_(std::move(sizes)),
      strides_(std::move(strides)),
      whole_sizes_(nb::make_tuple(num_pieces * step)),
      whole_strides_(nb::make_tuple(1)) {}

PieceMaker::PieceMaker(nb::object like, int64_t length)
    : PieceMaker(std::move(like), nb::make_tuple(length), nb::make_tuple(1), whole_lines(length, 4),
                 length > kLongestPiece ? 0 : kPieces) {}

nb::object PieceMaker::make(bool is_captured) {
    if (is_captured || QuickMakers::get().view == nullptr || num_pieces_ == 0) return make_alone();
    const cudaStream_t stream = device_ < 0 ? nullptr : current_stream_of_torch(device_);
    nb::object old;  // ends last: torch lets other threads run while it frees memory
    if (!whole_.is_valid() || next_ == num_pieces_ * step_ || stream != stream_) {
        const nb::object made = new_tensor(whole_sizes_, whole_strides_, dtype_, like_, device_);
        if (!fill(made, stream)) return make_alone();
        old = std::move(whole_);
        whole_ = made;
        stream_ = stream;
        next_ = 0;
    }
    const nb::object whole = whole_;  // whatever other threads do meanwhile
    const nb::int_ first(next_);
    next_ += step_;
    return view_of(whole, sizes_, strides_, first);
}

int PieceMaker::visit(visitproc visit, void* arg) const {
    Py_VISIT(whole_.ptr());
    return 0;
}

struct CopyMaker::Form {
    int64_t rows = 0;
    int64_t columns = 0;
    int64_t step = 1;
    int64_t num_copies = 0;

    static Form of(nb::handle tensor) {
        nb::dlpack::dltensor view;
        if (!view_torch(tensor, view) || view.ndim != 2 || !is_contiguous(view)) return {};
        const std::optional<ncclDataType_t> type = datatype_of(view.dtype);
        if (!type) return {};
        const auto element_bytes = static_cast<int64_t>(bytes_of_datatype(*type));
        Form form{view.shape[0], view.shape[1], whole_lines(view.shape[0] * view.shape[1], element_bytes), kPieces};
        while (form.num_copies > 0 && form.num_copies * form.step * element_bytes > kMostBytesOfCopies)
            form.num_copies /= 2;
        if (form.step == 0 || form.num_copies == 1) form.num_copies = 0;
        return form;
    }
};

CopyMaker::CopyMaker(nb::object tensor) : CopyMaker(tensor, Form::of(tensor)) {}

CopyMaker::CopyMaker(nb::object tensor, const Form& form)
    : PieceMaker(std::move(tensor), nb::make_tuple(form.rows, form.columns),
                 nb::make_tuple(std::max<int64_t>(form.columns, 1), 1), form.step, form.num_copies) {}

// A driver's copies go by the current device.
nb::object CopyMaker::make_copy() { return make(device_ >= 0 && (!is_current(device_) || is_capturing())); }

// By doubling what is there, in calls of the driver: torch takes longer to choose an operator.
bool CopyMaker::fill(nb::handle whole, cudaStream_t current) const {
    nb::dlpack::dltensor from, to;
    if (!view_torch(like_, from) || !view_torch(whole, to)) return false;
    const size_t step_bytes = static_cast<size_t>(step_) * from.dtype.bits / 8;
    const auto num_bytes = static_cast<size_t>(from.shape[0] * from.shape[1]) * from.dtype.bits / 8;
    auto* const first = static_cast<std::byte*>(to.data);
    const auto copy = [&](std::byte* target, const void* source, size_t bytes) {
        if (device_ >= 0) return copy_on_device(target, source, bytes, current);
        std::memcpy(target, source, bytes);
        return true;
    };
    bool is_filled = copy(first, from.data, num_bytes);
    for (int64_t there = 1; is_filled && there < num_pieces_; there *= 2) {
        const size_t bytes = static_cast<size_t>(there) * step_bytes;
        is_filled = copy(first + bytes, first, bytes);
    }
    return is_filled;
}

PairMaker::PairMaker(nb::object like, nb::object sizes, nb::object strides)
    : like_(std::move(like)),
      dtype_(like_.attr("dtype")),
      sizes_(std::move(sizes)),
      strides_(std::move(strides)),
      device_(device_of(like_)) {}

nb::object PairMaker::make(bool is_captured) {
    const QuickMakers& quick = QuickMakers::get();
    if (is_captured || quick.view == nullptr || quick.users == nullptr) {
        return new_tensor(sizes_, strides_, dtype_, like_, device_);
    }
    const cudaStream_t stream = device_ < 0 ? nullptr : current_stream_of_torch(device_);
    Memory& place = memories_[next_];
    next_ = 1 - next_;
    // Out of its place meanwhile: torch may let other threads run, which then find none there.
    Memory memory = std::exchange(place, Memory{});
    if (!is_free(memory, stream)) {
        memory = Memory{};  // first, so that its memory may serve
        memory = new_memory(stream);
    }
    nb::object made = view_of(memory.tensor, sizes_, strides_, nb::int_(0));
    std::swap(place, memory);
    return made;
}

bool PairMaker::is_free(const Memory& memory, cudaStream_t stream) const {
    return memory.tensor.is_valid() && memory.stream == stream && users_of(memory.address) == memory.idle_users;
}

PairMaker::Memory PairMaker::new_memory(cudaStream_t stream) const {
    Memory memory;
    memory.tensor = new_tensor(sizes_, strides_, dtype_, like_, device_);
    // Python's object of the storage is one of its users, so it stays, too.
    memory.storage = memory.tensor.attr("untyped_storage")();
    memory.address = memory.storage.attr("_cdata");
    memory.idle_users = users_of(memory.address);
    memory.stream = stream;
    return memory;
}

int PairMaker::visit(visitproc visit, void* arg) const {
    for (const Memory& memory : memories_) {
        Py_VISIT(memory.tensor.ptr());
        Py_VISIT(memory.storage.ptr());
    }
    return 0;
}

void PairMaker::clear() {
    // Out of their places first: torch may let other threads run while it frees memory.
    for (Memory& memory : memories_) (void)std::exchange(memory, Memory{});
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
    nb::class_<PairMaker>(module, "PairMaker", nb::type_slots(collected<PairMaker>()),
                          R"(Makes long tensors of torch that are all alike, in two memories that serve in turn.

A memory serves again for the second-next tensor if no tensor lies in it any more, on the stream for which it was made;
else new memory takes its place. Their elements are undefined.)")
        .def(nb::init<nb::object, nb::object, nb::object>(), "like"_a, "sizes"_a, "strides"_a,
             nb::sig("def __init__(self, like: object, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None"),
             "like: a tensor of the same type, on the same device.")
        .def("__call__", &PairMaker::make, "is_captured"_a,
             nb::sig("def __call__(self, is_captured: bool) -> typing.Any"),
             "is_captured: the current stream is being captured.")
        .def("clear", &PairMaker::clear, "Lets go of both memories.");
    nb::class_<CopyMaker>(module, "CopyMaker", nb::type_slots(collected<CopyMaker>()),
                          "Makes copies of one tensor of torch, on the current stream of its device; of a short one "
                          "many at a time.")
        .def(nb::init<nb::object>(), "tensor"_a, nb::sig("def __init__(self, tensor: object) -> None"),
             "tensor: not written any more.")
        .def("__call__", &CopyMaker::make_copy, nb::sig("def __call__(self) -> typing.Any"));
}

}  // namespace crossdock::python
