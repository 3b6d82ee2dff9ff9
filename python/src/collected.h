// SPDX-License-Identifier: Apache-2.0
//
// The slots of a bound class whose objects hold others of Python, for the collector of garbage.
#pragma once

#include <nanobind/nanobind.h>

namespace crossdock::python {

template <class Object>
int traverse_object(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    return nanobind::inst_ready(self) ? nanobind::inst_ptr<Object>(self)->visit(visit, arg) : 0;
}

template <class Object>
int clear_object(PyObject* self) {
    if (nanobind::inst_ready(self)) nanobind::inst_ptr<Object>(self)->clear();
    return 0;
}

// Object has int visit(visitproc, void*) const and void clear().
template <class Object>
PyType_Slot* collected() {
    static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse_object<Object>)},
                                  {Py_tp_clear, reinterpret_cast<void*>(&clear_object<Object>)},
                                  {0, nullptr}};
    return slots;
}

}  // namespace crossdock::python
