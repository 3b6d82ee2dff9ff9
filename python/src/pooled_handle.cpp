// SPDX-License-Identifier: Apache-2.0
#include "pooled_handle.h"

#include "handle.h"

namespace nb = nanobind;

namespace crossdock::python {

void PooledHandle::take(nb::handle pool, const nb::object& unused, int num_topk, bool is_captured) {
    const Py_ssize_t num = PyList_GET_SIZE(unused.ptr());
    if (num > 0 && !is_captured) {
        taken = nb::borrow(PyList_GET_ITEM(unused.ptr(), num - 1));
        free = unused;
        if (PyList_SetSlice(unused.ptr(), num - 1, num, nullptr) != 0) nb::raise_python_error();
        return;
    }
    const auto found = nb::cast<nb::tuple>(pool.attr("take")(num_topk));
    taken = found[0];
    free = found[1];
}

void PooledHandle::give_back() {
    if (!taken.is_valid() || !free.is_valid() || !nb::cast<const Handle&>(taken).is_usable()) return;
    if (PyList_Append(free.ptr(), taken.ptr()) != 0) PyErr_Clear();
}

}  // namespace crossdock::python
