// SPDX-License-Identifier: Apache-2.0
#include "group_masks.h"

#include <nanobind/stl/string.h>

#include "arguments.h"
#include "configs.h"
#include "stream.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

nb::object mask_query(Group& self, nb::handle out, nb::handle stream) {
    GroupState& state = *self.state();
    const CommunicatorState& communicator = state.communicator();
    const auto num_ranks = static_cast<size_t>(communicator.num_ranks());
    if (out.is_none()) {
        if (!communicator.is_cpu())
            invalid_argument("out is None: on GPUs the mask is written to an int32 array there");
        std::vector<int> mask(num_ranks);
        state.call([&] { check(ncclEpMaskQuery(state.get(), mask.data(), nullptr)); });
        nb::list active;
        for (int value : mask) active.append(nb::bool_(value != 0));
        return active;
    }
    CallArrays arrays(communicator.is_cpu());
    const ncclEpTensor_t* tensor = arrays.add(out, "out", Access::kWrite);
    if (tensor->datatype != ncclInt32 || tensor->ndim != 1 || tensor->sizes[0] < num_ranks) {
        invalid_argument(std::string("out is ") + shown_array(*tensor) +
                         ", expected int32 with one dimension of at least " + std::to_string(num_ranks));
    }
    const cudaStream_t where = stream_from(stream, communicator.is_cpu(), arrays.device());
    state.call([&] { check(ncclEpMaskQuery(state.get(), static_cast<int*>(tensor->data), where)); });
    return nb::borrow(out);
}

void mask_update(Group& self, const nb::sequence& mask, nb::handle stream) {
    GroupState& state = *self.state();
    const auto num_ranks = static_cast<size_t>(state.communicator().num_ranks());
    if (nb::len(mask) != num_ranks) {
        invalid_argument("mask has " + std::to_string(nb::len(mask)) + " entries, expected one per rank, " +
                         std::to_string(num_ranks));
    }
    std::vector<int> values;
    for (nb::handle value : mask) {
        const int is_active = PyObject_IsTrue(value.ptr());
        if (is_active < 0) nb::raise_python_error();
        values.push_back(is_active);
    }
    const cudaStream_t where = stream_from(stream, state.communicator().is_cpu(), -1);
    state.call([&] { check(ncclEpMaskUpdate(state.get(), values.data(), where)); });
}

void mask_clean(Group& self, nb::handle stream) {
    GroupState& state = *self.state();
    const cudaStream_t where = stream_from(stream, state.communicator().is_cpu(), -1);
    state.call_with_communicator([&] { check(ncclEpMaskClean(state.get(), where)); });
}

bool async_error(Group& self) {
    GroupState& state = *self.state();
    int error = 0;
    state.call([&] { check(ncclEpGetAsyncError(state.get(), &error)); });
    return error != 0;
}

nb::object diagnosis(Group& self) {
    GroupState& state = *self.state();
    crossdockDiagnosis_t found = CROSSDOCK_DIAGNOSIS_INIT;
    state.call([&] { check(crossdockGroupDiagnosis(state.get(), &found)); });
    if (found.valid == 0) return nb::none();
    return nb::cast(found);
}

}  // namespace

void bind_masks(nb::class_<Group>& group) {
    group
        .def("mask_query", &mask_query, "out"_a.none() = nb::none(), nb::kw_only(), "stream"_a.none() = nb::none(),
             nb::sig("def mask_query(self, out: object = None, *, stream: object = None) -> typing.Any"),
             "Which ranks are active in this rank's view: a list of bools (CPUs), or written to out [R] int32 as 1 and "
             "0. InvalidUsage: the group has no masks.")
        .def("mask_update", &mask_update, "mask"_a, nb::kw_only(), "stream"_a.none() = nb::none(),
             nb::sig("def mask_update(self, mask: typing.Sequence[typing.Any], *, stream: object = None) -> None"),
             "Sets this rank's view: one truth value per rank.")
        .def("mask_clean", &mask_clean, nb::kw_only(), "stream"_a.none() = nb::none(),
             "Readmits all ranks that take part: collective over the surviving ones.")
        .def("get_async_error", &async_error, "Whether a timeout has masked a rank since error_clear.")
        .def(
            "error_clear",
            [](Group& self) { self.state()->call([&] { check(ncclEpErrorClear(self.state()->get())); }); },
            "Forgets the asynchronous error.")
        .def("diagnosis", &diagnosis, nb::sig("def diagnosis(self) -> Diagnosis | None"),
             "The last wait of this rank that expired, or None.");
}

void bind_diagnosis(nb::module_& module) {
    using Diagnosis = crossdockDiagnosis_t;
    nb::class_<Diagnosis>(module, "Diagnosis",
                          "Which rank timed out waiting for which, in which step: crossdockDiagnosis_t.")
        .def_ro("rank", &Diagnosis::rank, "The rank that waited.")
        .def_ro("peer", &Diagnosis::peer, "The rank it waited for.")
        .def_ro("operation", &Diagnosis::operation, "\"dispatch\", \"combine\", ...")
        .def_ro("step", &Diagnosis::step, "What it waited for, e.g. \"row\", \"counts\", \"credit\".")
        .def_ro("handle", &Diagnosis::handle, "Number of the handle in its group, from 1.")
        .def_ro("epoch", &Diagnosis::epoch, "The operation's number in the group.")
        .def_ro("expected", &Diagnosis::expected, "The expected value.")
        .def_ro("seen", &Diagnosis::seen, "The last one seen.")
        .def_ro("elapsed_us", &Diagnosis::elapsed_us, "Since the operation's start on this rank.")
        .def("__repr__", [](const Diagnosis& self) {
            return nb::str("<rank {} timed out after {:g} ms waiting for rank {} in {}, step {}>")
                .format(self.rank, static_cast<double>(self.elapsed_us) / 1000, self.peer, self.operation, self.step);
        });
}

}  // namespace crossdock::python
