// SPDX-License-Identifier: Apache-2.0
//
// torch.Tensor through DLPack's exchange in C (DLPack 1.3): a tensor is described in some 50 ns, without a reference to
// it, and tensors that require gradients are, too. No torch header is needed to build, and no torch library to run.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

#include "crossdock.h"

namespace crossdock::python {

bool is_torch_tensor(nanobind::handle object);

// A tensor as it lies in memory; shape and strides (in elements) are valid as long as the tensor lives. Returns false
// for other objects, subclasses, a torch without the exchange, and what DLPack cannot describe: use its Python methods.
// Its memory may have a fault.
bool view_torch(nanobind::handle object, nanobind::dlpack::dltensor& view);

// What keeps a tensor's elements from being those in its memory, as "has its negative bit set: pass its resolve_neg()";
// NULL: nothing does. To be asked once of each tensor of a caller: it takes longer than a view. view: of the tensor.
const char* fault_of_memory(nanobind::handle tensor);
const char* fault_of_memory(nanobind::handle tensor, const nanobind::dlpack::dltensor& view);

bool is_contiguous(const nanobind::dlpack::dltensor& view);
inline bool is_on_host(const nanobind::dlpack::dltensor& view) {
    return view.device.device_type == nanobind::device::cpu::value;
}
inline bool is_on_cuda(const nanobind::dlpack::dltensor& view) {
    return view.device.device_type == nanobind::device::cuda::value;
}

// The library's number of a type, if it has one.
std::optional<ncclDataType_t> datatype_of(nanobind::dlpack::dtype type);

void bind_torch_views(nanobind::module_& module);

}  // namespace crossdock::python
