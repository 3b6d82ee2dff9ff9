// SPDX-License-Identifier: Apache-2.0
//
// crossdock.Tensor: an array described once, for calls that are repeated with it, or described otherwise than it says
// of itself (another type or shape of the same bytes, a window).
#pragma once

#include <nanobind/nanobind.h>

#include "array.h"

namespace crossdock::python {

class Tensor {
  public:
    Tensor(nanobind::handle buffer, nanobind::handle dtype, nanobind::handle shape, nanobind::handle window,
           uint64_t window_offset);

    // Fills array as array_from does, without the owner. InvalidUsage: the memory has moved since (a torch tensor that
    // was resized), or the window was deregistered.
    void describe(const char* name, Array& array) const;

    nanobind::object buffer() const { return array_.owner(); }
    size_t data() const { return reinterpret_cast<size_t>(array_.data()); }
    const char* datatype() const { return name_of_datatype(array_.datatype()); }
    nanobind::tuple sizes() const;

    // For the collector of garbage: an array may hold what describes it.
    int visit(visitproc visit, void* arg) const;
    void clear();

  private:
    Array array_;
    nanobind::object window_;
    uint64_t window_offset_;
    bool is_torch_;
};

void bind_tensor(nanobind::module_& module);

}  // namespace crossdock::python
