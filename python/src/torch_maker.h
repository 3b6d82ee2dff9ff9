// SPDX-License-Identifier: Apache-2.0
//
// New tensors of torch, quickly: as what torch.compile makes them, past the choice of an operator.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

namespace crossdock::python {

// sizes and strides are tuples, strides in elements; dtype is torch's; like: any tensor of that type and device, which
// is asked where this torch has no quicker way, or where another device is current. device: -1 for the host.
nanobind::object new_tensor(nanobind::handle sizes, nanobind::handle strides, nanobind::handle dtype,
                            nanobind::handle like, int device);

// Whether that CUDA device is current for this thread, as far as this torch says so quickly.
bool is_current(int device);

// That device; nothing where this torch does not say it quickly.
std::optional<int> current_device();

// A copy of a dense tensor, on the current stream of its device.
nanobind::object copy_of(nanobind::handle tensor);

// crossdock._core.TensorMaker: makes tensors that are all alike.
class TensorMaker {
  public:
    // like: a tensor of torch of the same type, on the same device.
    TensorMaker(nanobind::object like, nanobind::object sizes, nanobind::object strides);
    nanobind::object make() const { return new_tensor(sizes_, strides_, dtype_, like_, device_); }
    bool is_on_host() const { return device_ < 0; }

  private:
    nanobind::object like_, dtype_, sizes_, strides_;
    int device_;
};

void bind_torch_makers(nanobind::module_& module);

}  // namespace crossdock::python
