// SPDX-License-Identifier: Apache-2.0
#include "row_route.h"

#include "collected.h"
#include "handle.h"
#include "stream.h"
#include "turn.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

struct RowRoute {
    nb::object handle;  // in the care of somebody who gives it back
    int64_t num_tokens, num_rows, most_bytes;

    nb::object send_again(nb::handle x, nb::handle stream) const {
        return in_turn(x, stream, [&](Handle& own, nb::handle where) {
            return own.send_again(x, num_tokens, num_rows, most_bytes, where);
        });
    }
    nb::object add_up(nb::handle rows, nb::handle stream) const {
        return in_turn(rows, stream, [&](Handle& own, nb::handle where) {
            return own.add_up(rows, num_rows, num_tokens, most_bytes, where);
        });
    }
    // What work returns, and its event where it is asynchronous; None: look closer.
    template <class Work>
    nb::object in_turn(nb::handle given, nb::handle stream, Work work) const {
        auto& own = nb::cast<Handle&>(handle);
        Turn turn(stream);
        if (!own.is_usable() || !turn.begin()) return nb::none();
        const nb::object made = work(own, turn.stream());
        if (made.is_none() || !turn.is_asynchronous()) return made;
        return nb::make_tuple(made, turn.end({given, made}, turn.has_streams() && is_capturing()));
    }
    int visit(visitproc visit, void* arg) const {
        Py_VISIT(handle.ptr());
        return 0;
    }
    void clear() { handle.reset(); }
};

}  // namespace

void bind_row_routes(nb::module_& module) {
    nb::class_<RowRoute>(module, "RowRoute", nb::type_slots(collected<RowRoute>()),
                         "Where the tokens of one dispatch went. handle: in the care of somebody who gives it back.")
        .def(
            "__init__",
            [](RowRoute* self, nb::object handle, int64_t num_tokens, int64_t num_rows, int64_t most_bytes) {
                new (self) RowRoute{std::move(handle), num_tokens, num_rows, most_bytes};
            },
            "handle"_a, "num_tokens"_a, "num_rows"_a, "most_bytes"_a)
        .def("send_again", &RowRoute::send_again, "x"_a.none(), "stream"_a.none() = nb::none(),
             nb::sig("def send_again(self, x: object, stream: object = None) -> typing.Any"),
             "x [num_tokens, ..] along the route: the new tensor [num_rows, ..] that came; None: x does not fit as it "
             "is. On a SideStream: the tensor, and an EventOverlap.")
        .def("add_up", &RowRoute::add_up, "rows"_a.none(), "stream"_a.none() = nb::none(),
             nb::sig("def add_up(self, rows: object, stream: object = None) -> typing.Any"),
             "Sums of rows [num_rows, ..] back where they came from, alike.");
}

}  // namespace crossdock::python
