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
constexpr int64_t kLine = 32;  // elements in a line of a GPU's memory

// Functions for code that torch.compile generates; NULL if this version of torch lacks them. Without them a low-latency
// dispatch takes 4.7 instead of 3.3 µs, a combine 3.3 instead of 2.6 (AMD EPYC, bench/deep_ep_host_cost.py).
struct QuickMakers {
    PyObject* on_host = nullptr;
    PyObject* on_cuda = nullptr;  // on the current device
    PyObject* view = nullptr;
    PyObject* users = nullptr;  // of a storage
    PyObject* current_device = nullptr;
    PyObject *int32 = nullptr, *boolean = nullptr;  // torch's types

    QuickMakers() {
        const nb::object internals = nb::module_::import_("torch").attr("_C");
        const nb::object dynamo = find_attribute(internals, "_dynamo");
        const nb::object guards = dynamo.is_valid() ? find_attribute(dynamo, "guards") : dynamo;
        if (guards.is_valid()) {
            on_host = find_attribute(guards, "_empty_strided_cpu").release().ptr();
            on_cuda = find_attribute(guards, "_empty_strided_cuda").release().ptr();
            view = find_attribute(guards, "_reinterpret_tensor").release().ptr();
        }
        int32 = nb::object(nb::module_::import_("torch").attr("int32")).release().ptr();
        boolean = nb::object(nb::module_::import_("torch").attr("bool")).release().ptr();
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

nb::handle torch_int32() { return QuickMakers::get().int32; }
nb::handle torch_bool() { return QuickMakers::get().boolean; }

bool is_current(int device) { return QuickMakers::get().is_current(device); }

std::optional<int> current_device() {
    PyObject* getter = QuickMakers::get().current_device;
    if (getter == nullptr) return std::nullopt;
    return nb::cast<int>(nb::handle(getter)());
}

nb::object new_tensor(nb::handle sizes, nb::handle strides, nb::handle dtype, nb::handle like, int device) {
    PyObject* make = QuickMakers::get().maker_for(device);
    if (make == nullptr) return like.attr("new_empty_strided")(sizes, strides, "dtype"_a = dtype);
    PyObject* arguments[] = {sizes.ptr(), strides.ptr(), dtype.ptr()};
    PyObject* made = PyObject_Vectorcall(make, arguments, 3, nullptr);
    if (made == nullptr) nb::raise_python_error();
    return nb::steal(made);
}

nb::object dense_strides(nb::handle sizes) {
    nb::list strides;
    int64_t stride = 1;
    for (size_t dimension = nb::len(sizes); dimension-- > 0;) {
        strides.insert(0, stride);
        stride *= std::max<int64_t>(nb::cast<int64_t>(sizes[dimension]), 1);
    }
    return nb::tuple(strides);
}

TensorForm TensorForm::of(nb::handle dtype, nb::handle device, nb::handle sizes, nb::handle strides) {
    const nb::object like = nb::module_::import_("torch").attr("empty")(0, "dtype"_a = dtype, "device"_a = device);
    const bool is_host = nb::cast<bool>(like.attr("is_cpu"));
    return {nb::borrow(dtype), like, nb::borrow(sizes), strides.is_none() ? dense_strides(sizes) : nb::borrow(strides),
            is_host ? -1 : nb::cast<int>(like.attr("get_device")())};
}

PieceMaker::PieceMaker(nb::handle device, int64_t length) : step_((length + kLine - 1) / kLine * kLine) {
    const nb::handle int32 = torch_int32();
    num_elements_ = length > kLongestPiece ? 0 : kPieces * step_;
    piece_ = TensorForm::of(int32, device, nb::make_tuple(length), nb::none());
    all_ = TensorForm::of(int32, device, nb::make_tuple(num_elements_), nb::none());
}

nb::object PieceMaker::make(bool is_captured) {
    if (is_captured || QuickMakers::get().view == nullptr || num_elements_ == 0) return piece_.make();
    const cudaStream_t stream = piece_.device < 0 ? nullptr : current_stream_of_torch(piece_.device);
    nb::object old;  // ends last: torch lets other threads run while it frees memory
    if (!whole_.is_valid() || next_ == num_elements_ || stream != stream_) {
        const nb::object made = all_.make();
        old = std::move(whole_);
        whole_ = made;
        stream_ = stream;
        next_ = 0;
    }
    const nb::object whole = whole_;  // whatever other threads do meanwhile
    const nb::int_ first(next_);
    next_ += step_;
    return view_of(whole, piece_.sizes, piece_.strides, first);
}

int PieceMaker::visit(visitproc visit, void* arg) const {
    Py_VISIT(whole_.ptr());
    return 0;
}

nb::object PairMaker::make(bool is_captured) {
    const QuickMakers& quick = QuickMakers::get();
    if (is_captured || quick.view == nullptr || quick.users == nullptr) {
        return form_.make();
    }
    const cudaStream_t stream = form_.device < 0 ? nullptr : current_stream_of_torch(form_.device);
    Memory& place = memories_[next_];
    next_ = 1 - next_;
    // Out of its place meanwhile: torch may let other threads run, which then find none there.
    Memory memory = std::exchange(place, Memory{});
    if (!is_free(memory, stream)) {
        memory = Memory{};  // first, so that its memory may serve
        memory = new_memory(stream);
    }
    nb::object made = view_of(memory.tensor, form_.sizes, form_.strides, nb::int_(0));
    std::swap(place, memory);
    return made;
}

bool PairMaker::is_free(const Memory& memory, cudaStream_t stream) const {
    return memory.tensor.is_valid() && memory.stream == stream && users_of(memory.address) == memory.idle_users;
}

PairMaker::Memory PairMaker::new_memory(cudaStream_t stream) const {
    Memory memory;
    memory.tensor = form_.make();
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
    nb::class_<PieceMaker>(module, "PieceMaker", nb::type_slots(collected<PieceMaker>()),
                           "Makes short int32 tensors of torch that are all alike, out of memory for many of them, "
                           "their elements undefined.")
        .def(nb::init<nb::handle, int64_t>(), "device"_a, "length"_a,
             nb::sig("def __init__(self, device: object, length: int) -> None"))
        .def("__call__", &PieceMaker::make, "is_captured"_a,
             nb::sig("def __call__(self, is_captured: bool) -> typing.Any"),
             "is_captured: the current stream is being captured.");
    nb::class_<PairMaker>(module, "PairMaker", nb::type_slots(collected<PairMaker>()),
                          R"(Makes long tensors of torch that are all alike, in two memories that serve in turn.

A memory serves again for the second-next tensor if no tensor lies in it any more, on the stream for which it was made;
else new memory takes its place. Their elements are undefined.)")
        .def(
            "__init__",
            [](PairMaker* self, nb::handle dtype, nb::handle device, nb::tuple sizes, nb::handle strides) {
                new (self) PairMaker(TensorForm::of(dtype, device, sizes, strides));
            },
            "dtype"_a, "device"_a, "sizes"_a, "strides"_a.none() = nb::none(),
            nb::sig("def __init__(self, dtype: object, device: object, sizes: tuple[int, ...], strides: tuple[int, "
                    "...] | None = None) -> None"))
        .def("__call__", &PairMaker::make, "is_captured"_a,
             nb::sig("def __call__(self, is_captured: bool) -> typing.Any"),
             "is_captured: the current stream is being captured.")
        .def("clear", &PairMaker::clear, "Lets go of both memories.");
}

}  // namespace crossdock::python
