// SPDX-License-Identifier: Apache-2.0
#include "interrupt.h"

#include <unistd.h>

#include <atomic>

#include "error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

std::atomic<bool> all_waits_end{false};
thread_local bool t_runs_handlers = false;
PyObject* interruption = nullptr;  // with the GIL; of the main thread, which alone runs handlers

// Raises it in the main thread where no failed call has.
int raise_interruption(void*) {
    const nb::object exception = take_interruption();
    if (!exception.is_valid()) return 0;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    return -1;
}

// crossdockInterruptCheck_t. Only the main thread takes the GIL, which others may hold while they wait for its rank.
int check_signals() {
    if (all_waits_end.load(std::memory_order_relaxed)) return 1;
    if (gettid() != getpid() || Py_IsInitialized() == 0) return 0;
    const PyGILState_STATE state = PyGILState_Ensure();
    t_runs_handlers = true;
    const bool raised = PyErr_CheckSignals() != 0;
    t_runs_handlers = false;
    if (raised) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyErr_NormalizeException(&type, &value, &traceback);
        if (traceback != nullptr) PyException_SetTraceback(value, traceback);
        Py_XDECREF(type);
        Py_XDECREF(traceback);
        Py_XSETREF(interruption, value);
        Py_AddPendingCall(&raise_interruption, nullptr);
    }
    PyGILState_Release(state);
    return raised ? 1 : 0;
}

}  // namespace

nb::object take_interruption() {
    if (gettid() != getpid()) return {};
    PyObject* const taken = interruption;
    interruption = nullptr;
    return nb::steal(taken);
}

void expect_no_handler() {
    if (t_runs_handlers) {
        invalid_usage("a signal handler has run while the library waits, and calls it: raise an exception instead");
    }
}

void expect_waits_go_on() {
    if (!all_waits_end.load(std::memory_order_relaxed)) return;
    throw ApiError(ncclRemoteError, "interrupted: the program of another rank has raised an exception, or Ctrl-C");
}

void bind_interrupts(nb::module_& module) {
    check(crossdockSetInterruptCheck(&check_signals));
    module.def(
        "end_all_waits", [](bool on) { all_waits_end.store(on, std::memory_order_relaxed); }, "on"_a,
        "While it is on, no thread of this process waits for other ranks: RemoteError.");
}

}  // namespace crossdock::python
