// SPDX-License-Identifier: Apache-2.0
#include "a2sgd.h"

#include <nanobind/stl/string.h>

#include "error.h"
#include "interrupt.h"
#include "stream.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

crossdockA2sgdSums_t sums_from(const std::string& sums) {
    if (sums == "fp32") return CROSSDOCK_A2SGD_SUMS_FP32;
    if (sums == "fp64") return CROSSDOCK_A2SGD_SUMS_FP64;
    invalid_argument("sums is '" + sums + "', allowed: 'fp32', 'fp64'");
}

// Entries of the array; it must lie where the ranks compute.
size_t expect_gradient(const Array& array, const std::string& name, bool is_cpu) {
    if ((array.place() == Place::kHost) != is_cpu)
        invalid_argument(
            name + " lies in " + (is_cpu ? "a GPU's" : "host") + " memory, allowed: " +
            (is_cpu ? "host memory, where this communicator's ranks compute" : "memory of the communicator's GPU"));
    return array.num_bytes() / bytes_of_datatype(array.datatype());
}

}  // namespace

A2sgd::Pieces A2sgd::read(nb::handle objects) const {
    const nb::tuple items = items_of(objects, "pieces");
    if (items.size() == 0) invalid_argument("pieces is empty, allowed: one array or more");
    Pieces pieces;
    pieces.arrays.reserve(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
        const std::string name = i < names_.size() ? names_[i] : "pieces[" + std::to_string(i) + "]";
        pieces.arrays.push_back(array_from(items[i], name.c_str(), Access::kWrite));
        const Array& array = pieces.arrays.back();
        if (!array.is_set()) invalid_argument(name + " is None, allowed: an array");
        const size_t count = expect_gradient(array, name, communicator_->is_cpu());
        pieces.described.push_back(
            {array.data(), count, array.datatype(), i < names_.size() ? names_[i].c_str() : nullptr});
    }
    return pieces;
}

A2sgd::A2sgd(nb::handle comm, nb::handle pieces, nb::handle names, const std::string& sums, bool skip_nonfinite,
             double timeout_s, int lsa_team_size)
    : communicator_(communicator_from(comm)) {
    if (!names.is_none()) {
        for (nb::handle name : items_of(names, "names")) names_.push_back(as<std::string>(name, "names", "strings"));
    }
    if (!(timeout_s >= 0 && timeout_s < 1e6)) {
        invalid_argument("timeout_s is " + std::to_string(timeout_s) + ", allowed: 0 (100 s) to 1000000");
    }
    crossdockA2sgdConfig_t config = CROSSDOCK_A2SGD_CONFIG_INIT;
    config.sums = sums_from(sums);
    config.skip_nonfinite = skip_nonfinite ? 1 : 0;
    config.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
    config.lsa_team_size = lsa_team_size;
    pieces_ = read(pieces);
    if (!names.is_none() && names_.size() != pieces_.arrays.size()) {
        invalid_argument("names has " + std::to_string(names_.size()) +
                         " items, expected as many as pieces: " + std::to_string(pieces_.arrays.size()));
    }
    communicator_->call([&] {
        check(crossdockA2sgdCreate(&a2sgd_, communicator_->get(), pieces_.described.data(), pieces_.described.size(),
                                   &config));
    });
    communicator_->add_user();
}

A2sgd::~A2sgd() {
    if (a2sgd_ == nullptr) return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyErr_WarnEx(PyExc_ResourceWarning,
                     "a crossdock.A2sgd was not closed: its memory stays until the process ends; use `with`", 1) != 0) {
        PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
    new std::shared_ptr<CommunicatorState>(communicator_);
}

void A2sgd::expect_open() const {
    if (a2sgd_ == nullptr) invalid_usage("the A2sgd is closed");
}

void A2sgd::set_pieces(nb::handle objects) {
    expect_open();
    Pieces pieces = read(objects);
    communicator_->call(
        [&] { check(crossdockA2sgdSetPieces(a2sgd_, pieces.described.data(), pieces.described.size())); });
    pieces_ = std::move(pieces);
}

void A2sgd::begin(nb::handle stream) {
    expect_open();
    cudaStream_t where = stream_from(stream, communicator_->is_cpu(), pieces_.arrays.front().device());
    expect_waits_go_on();
    communicator_->call([&] { check(crossdockA2sgdBegin(a2sgd_, where)); });
}

void A2sgd::end(nb::handle stream) {
    expect_open();
    cudaStream_t where = stream_from(stream, communicator_->is_cpu(), pieces_.arrays.front().device());
    communicator_->call([&] { check(crossdockA2sgdEnd(a2sgd_, where)); });
}

crossdockA2sgdReport_t A2sgd::report() {
    expect_open();
    crossdockA2sgdReport_t report = CROSSDOCK_A2SGD_REPORT_INIT;
    communicator_->call([&] { check(crossdockA2sgdReport(a2sgd_, &report)); });
    return report;
}

void A2sgd::close() {
    if (a2sgd_ == nullptr) return;
    communicator_->call([&] { check(crossdockA2sgdDestroy(a2sgd_)); });
    a2sgd_ = nullptr;
    communicator_->remove_user();
}

void bind_a2sgd(nb::module_& module) {
    using Report = crossdockA2sgdReport_t;
    nb::class_<Report>(module, "A2sgdReport", "What the last step saw: crossdockA2sgdReport_t.")
        .def_ro("step", &Report::step, "Its number, from 1; 0: none has ended yet.")
        .def_ro("count", &Report::count, "Entries of the gradient.")
        .def_ro("num_nonnegative", &Report::num_nonnegative, "How many of this rank's are not negative.")
        .def_ro("a", &Report::a, "Mean of those.")
        .def_ro("b", &Report::b, "Mean magnitude of the others.")
        .def_ro("mean_a", &Report::mean_a, "A: the ranks' mean of a.")
        .def_ro("mean_b", &Report::mean_b, "B: the ranks' mean of b.")
        .def_ro("num_nonfinite_ranks", &Report::num_nonfinite_ranks, "Whose gradients held a NaN or an infinity.")
        .def_ro("nonfinite_rank", &Report::nonfinite_rank, "The first of them; -1: none.")
        .def_ro("nonfinite_piece", &Report::nonfinite_piece, "Its first such piece; -1: none.")
        .def_prop_ro(
            "nonfinite_name",
            [](const Report& report) -> nb::object {
                return report.nonfinite_name == nullptr ? nb::none() : nb::object(nb::str(report.nonfinite_name));
            },
            nb::sig("def nonfinite_name(self) -> str | None"), "That piece's name on this rank.")
        .def_prop_ro(
            "skipped", [](const Report& report) { return report.skipped != 0; },
            "The gradients were left as they were.");

    nb::class_<A2sgd>(module, "A2sgd",
                      R"(Two-level gradient averaging: a step replaces the gradient by one whose means by
sign are those of all ranks. 64 bits per rank and step travel.

pieces: writable float32, float16 or bfloat16 arrays, together one gradient. Made and closed by all ranks together; use
it as a context manager.)")
        .def(
            "__init__",
            [](A2sgd* self, nb::handle comm, nb::handle pieces, nb::handle names, const std::string& sums,
               bool skip_nonfinite, double timeout_s, int lsa_team_size) {
                new (self) A2sgd(comm, pieces, names, sums, skip_nonfinite, timeout_s, lsa_team_size);
            },
            "comm"_a, "pieces"_a, nb::kw_only(), "names"_a.none() = nb::none(), "sums"_a = "fp32",
            "skip_nonfinite"_a = false, "timeout_s"_a = 0.0, "lsa_team_size"_a = 0,
            nb::sig("def __init__(self, comm: object, pieces: collections.abc.Sequence[object], *, names: "
                    "collections.abc.Sequence[str] | None = None, sums: str = 'fp32', skip_nonfinite: bool = False, "
                    "timeout_s: float = 0.0, lsa_team_size: int = 0) -> None"))
        .def("set_pieces", &A2sgd::set_pieces, "pieces"_a,
             nb::sig("def set_pieces(self, pieces: collections.abc.Sequence[object]) -> None"),
             "Other memory for the same gradient, from the next begin on.")
        .def("begin", &A2sgd::begin, "stream"_a.none() = nb::none(),
             nb::sig("def begin(self, stream: object = None) -> None"),
             "Reads the gradient once and sends its two means. Until end the gradient stays as it is.")
        .def("end", &A2sgd::end, "stream"_a.none() = nb::none(),
             nb::sig("def end(self, stream: object = None) -> None"),
             "Waits for the means of all ranks, and moves the entries.")
        .def("report", &A2sgd::report, nb::sig("def report(self) -> A2sgdReport"),
             "What the last step saw; waits for the steps that were issued.")
        .def_prop_ro("rank", [](const A2sgd& self) { return self.communicator().rank(); })
        .def_prop_ro("num_ranks", [](const A2sgd& self) { return self.communicator().num_ranks(); })
        .def("close", &A2sgd::close, "Destroys it. Collective. May be called again.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> A2sgd"))
        .def(
            "__exit__", [](A2sgd& self, const nb::args& exception) { close_at_exit(exception, [&] { self.close(); }); },
            nb::sig("def __exit__(self, *exception: object) -> None"));
}

}  // namespace crossdock::python
