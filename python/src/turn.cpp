// SPDX-License-Identifier: Apache-2.0
#include "turn.h"

#include <optional>

#include "collected.h"
#include "driver.h"
#include "stream.h"
#include "torch_maker.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

// Python's classes, looked up once.
struct Types {
    nb::object overlap, handle;
    nb::str event{"event"}, extra_tensors{"extra_tensors"}, kept{"kept"};  // its attributes

    static const Types& get() {
        static const Types* types = nullptr;  // no guarded initialisation: imports may let other threads run
        if (types == nullptr) types = new Types;
        return *types;
    }

  private:
    Types() {
        const nb::object events = nb::module_::import_("crossdock.deep_ep.utils.event");
        overlap = events.attr("EventOverlap");
        handle = events.attr("EventHandle");
    }
};

// An EventHandle of what the side stream of a call that has begun has by now.
nb::object event_after(const SideStream& side) {
    const Types& types = Types::get();
    nb::object made = nb::inst_alloc(types.handle);
    auto& event = *new (nb::inst_ptr<StreamEvent>(made)) StreamEvent;
    nb::inst_mark_ready(made);
    const bool is_right = side.device < 0 || event.record_here(side.device, side.address);
    return is_right ? made : types.handle(side.stream);
}

nb::tuple tensors_of(std::initializer_list<nb::handle> objects) {
    Py_ssize_t num = 0;
    for (nb::handle object : objects) num += object.is_none() ? 0 : 1;
    PyObject* made = PyTuple_New(num);
    if (made == nullptr) nb::raise_python_error();
    Py_ssize_t place = 0;
    for (nb::handle object : objects) {
        if (!object.is_none()) PyTuple_SET_ITEM(made, place++, object.inc_ref().ptr());
    }
    return nb::steal<nb::tuple>(made);
}

void* pointer_of(size_t address) { return reinterpret_cast<void*>(address); }
cudaStream_t stream_of(size_t address) { return static_cast<cudaStream_t>(pointer_of(address)); }

}  // namespace

int SideStream::visit(visitproc visit, void* arg) const {
    Py_VISIT(stream.ptr());
    return 0;
}

void SideStream::clear() { stream.reset(); }

StreamEvent::~StreamEvent() {
    if (event_ != nullptr) give_back_event(device_, event_);
}

bool StreamEvent::record(int device, cudaStream_t stream) {
    return event_ == nullptr && has_events() && is_current(device) && record_here(device, stream);
}

bool StreamEvent::record_here(int device, cudaStream_t stream) {
    event_ = record_event(device, stream);
    device_ = device;
    return event_ != nullptr;
}

bool StreamEvent::wait(cudaStream_t stream) const { return event_ == nullptr || wait_for_event(stream, event_); }

nb::object StreamEvent::wait_current() const {
    const std::optional<int> device = event_ == nullptr ? std::nullopt : current_device();
    if (!device) return nb::none();
    const cudaStream_t stream = current_stream_of_torch(*device);
    if (!wait_for_event(stream, event_)) return nb::none();
    return nb::int_(reinterpret_cast<size_t>(stream));
}

Kept::Kept(nb::object tensors, cudaStream_t current, nb::object other)
    : tensors_(std::move(tensors)), other_(std::move(other)), current_(current) {}

int Kept::visit(visitproc visit, void* arg) const {
    Py_VISIT(tensors_.ptr());
    Py_VISIT(other_.ptr());
    return 0;
}

void Kept::clear() {
    const nb::object tensors = std::move(tensors_), other = std::move(other_);
    if (has_waited_ || !tensors.is_valid()) return;
    const nb::error_scope scope;  // this may run while an exception is on its way
    for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(tensors.ptr()); ++place) {
        PyObject* recorded =
            PyObject_CallMethod(PyTuple_GET_ITEM(tensors.ptr(), place), "record_stream", "O", other.ptr());
        if (recorded == nullptr) PyErr_WriteUnraisable(other.ptr());
        Py_XDECREF(recorded);
    }
}

nb::object no_event() {
    auto* type = reinterpret_cast<PyTypeObject*>(Types::get().overlap.ptr());
    PyObject* made = type->tp_alloc(type, 0);
    if (made == nullptr) nb::raise_python_error();
    return nb::steal(made);
}

Turn::Turn(nb::handle stream) : stream_(stream) {
    if (!stream.is_none() && nb::isinstance<SideStream>(stream)) {
        side_ = &nb::cast<const SideStream&>(stream);
        stream_ = side_->number;
    }
}

bool Turn::begin() {
    if (!has_streams()) return true;
    if (!has_events() || !is_current(side_->device)) return false;
    current_ = current_stream_of_torch(side_->device);
    return order_streams(side_->device, side_->address, current_);
}

nb::object Turn::end(std::initializer_list<nb::handle> tensors, bool is_captured) const {
    nb::object overlap = no_event();
    if (side_ == nullptr) return overlap;
    const nb::tuple touched = tensors_of(tensors);
    const Types& types = Types::get();
    nb::setattr(overlap, types.event, event_after(*side_));
    nb::setattr(overlap, types.extra_tensors, touched);
    if (side_->device >= 0 && !is_captured) {
        nb::object kept = nb::inst_alloc(nb::type<Kept>());
        new (nb::inst_ptr<Kept>(kept)) Kept(touched, current_, side_->stream);
        nb::inst_mark_ready(kept);
        nb::setattr(overlap, types.kept, kept);
    }
    return overlap;
}

void bind_turns(nb::module_& module) {
    nb::class_<SideStream>(module, "SideStream", nb::type_slots(collected<SideStream>()),
                           "The stream of a buffer's asynchronous calls.")
        .def(
            "__init__",
            [](SideStream* self, int device, size_t address, nb::object stream) {
                new (self) SideStream{device, stream_of(address), std::move(stream), nb::int_(address)};
            },
            "device"_a, "address"_a, "stream"_a.none(),
            nb::sig("def __init__(self, device: int, address: int, stream: object) -> None"),
            "device: -1 for the host. stream: torch's.")
        .def_ro("stream", &SideStream::stream, nb::for_getter(nb::sig("def stream(self) -> typing.Any")));

    nb::class_<StreamEvent>(module, "StreamEvent", "What a stream had at a time.")
        .def(nb::init<>())
        .def_prop_ro("is_recorded", &StreamEvent::is_recorded)
        .def(
            "record",
            [](StreamEvent& event, int device, size_t stream) { return event.record(device, stream_of(stream)); },
            "device"_a, "stream"_a,
            "Once, of a device's stream, by its address. Returns False if it cannot: use torch.")
        .def(
            "wait", [](const StreamEvent& event, size_t stream) { return event.wait(stream_of(stream)); }, "stream"_a,
            "Makes the stream wait, if anything was recorded. Returns False if this thread has no CUDA context yet.")
        .def("wait_current", &StreamEvent::wait_current, nb::sig("def wait_current(self) -> int | None"),
             "Makes the current stream wait: its address. None: nothing was recorded, or use torch.");

    nb::class_<Kept>(module, "Kept", nb::type_slots(collected<Kept>()),
                     R"(Tensors of torch that another stream than their own uses.

They are kept until this object goes. If the stream of their call has not waited for the other one by then,
record_stream makes torch wait for that stream before it reuses the memory.)")
        .def(
            "__init__",
            [](Kept* self, nb::tuple tensors, size_t current, nb::object other) {
                new (self) Kept(tensors, stream_of(current), std::move(other));
            },
            "tensors"_a, "current"_a, "other"_a,
            nb::sig("def __init__(self, tensors: tuple[typing.Any, ...], current: int, other: object) -> None"),
            "current: the address of the stream of their call; other: torch's stream.")
        .def(
            "note_wait", [](Kept& kept, size_t stream) { kept.note_wait(stream_of(stream)); }, "stream"_a,
            "The stream of this address has waited for the other one.");

    module.def("no_event", &no_event, nb::sig("def no_event() -> typing.Any"),
               "An EventOverlap of a call with nothing to wait for.");
}

}  // namespace crossdock::python
