// SPDX-License-Identifier: Apache-2.0
#include "window.h"

#include <utility>

#include "array.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

int export_bytes(PyObject* self, Py_buffer* view, int flags) {
    const Memory& memory = *nb::inst_ptr<Memory>(nb::handle(self));
    return PyBuffer_FillInfo(view, self, memory.data(), static_cast<Py_ssize_t>(memory.size()), 0, flags);
}

PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&export_bytes)}, {0, nullptr}};

}  // namespace

Memory::Memory(size_t size) : size_(size) { check(crossdockMemAlloc(&data_, size)); }

Memory::~Memory() {
    if (!fork_guard_.is_foreign()) crossdockMemFree(data_);
}

void Window::close() {
    if (window_ == nullptr) return;
    communicator_->call([this] { check(crossdockCommWindowDeregister(communicator_->get(), window_)); });
    communicator_->remove_user();
    window_ = nullptr;
    memory_.reset();
}

Window register_window(Communicator& communicator, nb::handle memory) {
    const Array array = array_from(memory, "memory", Access::kWrite);
    if (!array.is_set()) invalid_argument("memory is None");
    if (array.place() != Place::kHost) invalid_argument("memory is on a GPU, where windows are NCCL's");
    ncclWindow_t window = nullptr;
    CommunicatorState& state = *communicator.state;
    state.call([&] {
        check(crossdockCommWindowRegister(state.get(), array.data(), array.num_bytes(), &window, NCCL_WIN_DEFAULT));
    });
    state.add_user();
    return Window(communicator.state, window, nb::borrow(memory));
}

ncclWindow_t window_handle_of(nb::handle window, const char* name) {
    if (PyLong_Check(window.ptr()))
        return reinterpret_cast<ncclWindow_t>(as<size_t>(window, name, "the address of an ncclWindow_t"));
    if (!nb::isinstance<Window>(window)) {
        const nb::object handle = find_attribute(window, "handle");
        if (handle.is_valid()) return window_handle_of(handle, name);
        invalid_argument(std::string(name) + " has a window of type " + Py_TYPE(window.ptr())->tp_name +
                         ", allowed: crossdock.Window, the address of an ncclWindow_t");
    }
    const ncclWindow_t handle = nb::cast<Window&>(window).get();
    if (handle == nullptr) invalid_usage(std::string(name) + " lies in a window that was deregistered");
    return handle;
}

void bind_windows(nb::module_& module) {
    nb::class_<Memory>(module, "Memory", nb::type_slots(memory_slots),
                       R"(Zeroed bytes that can be registered as a window on every CPU backend, 4096-byte aligned.

numpy.frombuffer(memory, numpy.float32) makes an array over it, torch.frombuffer a tensor. It is freed with the last of
them.)")
        .def(nb::init<size_t>(), "size"_a)
        .def_prop_ro("size", &Memory::size, "Bytes.");

    nb::class_<Window>(module, "Window", R"(Memory that peers can write, made by Communicator.register_window.

Pass it to a Tensor. close(), or leaving its `with` block, deregisters it. This is collective, and comes before the memory
is freed. A window that is dropped without close() keeps its memory until the process ends.)")
        .def("close", &Window::close, "Deregisters it. Collective. May be called again.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Window"))
        .def(
            "__exit__",
            [](Window& self, const nb::args& exception) { close_at_exit(exception, [&] { self.close(); }); },
            nb::sig("def __exit__(self, *exception: object) -> None"));
}

}  // namespace crossdock::python
