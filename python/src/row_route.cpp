// SPDX-License-Identifier: Apache-2.0
#include "row_route.h"

#include <nanobind/stl/optional.h>

#include "array.h"
#include "collected.h"
#include "configs.h"
#include "handle.h"
#include "stream.h"
#include "torch_maker.h"
#include "torch_view.h"
#include "turn.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

constexpr int64_t kGranule = 16;  // bytes

// Dense rows of a tensor of torch that are as long as the library wants.
struct Rows {
    nb::handle tensor;
    int64_t num = 0, columns = 0, bytes = 0;  // bytes of a row
    ncclDataType_t type = ncclUint8;
    int device = -1;  // -1: the host

    // Returns false for anything else, and for rows of more than most_bytes.
    bool read(nb::handle object, int64_t most_bytes) {
        nb::dlpack::dltensor view;
        if (!view_torch(object, view) || view.ndim != 2 || !is_contiguous(view)) return false;
        if (fault_of_memory(object, view) != nullptr) return false;
        const std::optional<ncclDataType_t> known = datatype_of(view.dtype);
        if (!known) return false;
        tensor = object;
        device = is_on_host(view) ? -1 : view.device.device_id;
        num = view.shape[0];
        columns = view.shape[1];
        type = *known;
        bytes = columns * static_cast<int64_t>(bytes_of_datatype(type));
        return bytes > 0 && bytes % kGranule == 0 && bytes <= most_bytes;
    }
};

// New rows of the same type, length and device.
nb::object new_rows(const Rows& like, int64_t num) {
    return new_tensor(nb::make_tuple(num, like.columns), nb::make_tuple(like.columns, 1), like.tensor.attr("dtype"),
                      like.tensor, like.device);
}

// type (nullopt: that of rows) and tag: what ranks compare.
void dispatch_rows(Handle& handle, nb::handle rows, nb::handle received, nb::handle words, nb::handle received_words,
                   std::optional<ncclDataType_t> type, unsigned int tag, nb::handle stream) {
    handle.expect_open();
    handle.set_tag(tag);
    CallArrays arrays(handle.is_of_cpus(), 4);
    // The library moves them as they are: backward without words, and forward's recipe with them.
    auto inputs = make_struct<ncclEpDispatchInputs_t>();
    inputs.tokens = arrays.add_rows(rows, "rows", Access::kRead, type);
    inputs.scales = arrays.add_rows(words, "words", Access::kRead, ncclUint8);
    auto outputs = make_struct<ncclEpDispatchOutputs_t>();
    outputs.tokens = arrays.add_rows(received, "received", Access::kWrite, type);
    outputs.scales = arrays.add_rows(received_words, "received_words", Access::kWrite, ncclUint8);
    auto settings = make_struct<ncclEpDispatchConfig_t>();
    settings.pass_direction = NCCL_EP_BWD_PASS;
    if (!words.is_none()) settings.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    const cudaStream_t where = stream_from(stream, handle.is_of_cpus(), arrays.device());
    handle.run_dispatch(arrays, false, where, [&](ncclEpHandle_t own) {
        check(ncclEpDispatch(own, &inputs, &outputs, nullptr, &settings, where));
    });
}

// dispatch_rows into a new tensor, which is returned. None: tokens is not a dense tensor of torch with num_tokens rows,
// of a type and length that the library moves as they are, on the device of the handle's latest arrays.
nb::object dispatch_to_new_rows(Handle& handle, nb::handle tokens, int64_t num_tokens, int64_t num_rows,
                                int64_t most_bytes, nb::handle stream) {
    handle.expect_open();
    Rows rows;
    if (!rows.read(tokens, most_bytes) || rows.num != num_tokens || bytes_of_datatype(rows.type) > 4) return nb::none();
    if (!is_carried(rows.type) || handle.is_on_other_device(rows.device)) return nb::none();
    nb::object received = new_rows(rows, num_rows);
    dispatch_rows(handle, tokens, received, nb::none(), nb::none(), rows.type, 0, stream);
    handle.forget_arrays();
    return received;
}

// combine into a new tensor, likewise.
nb::object combine_to_new_rows(Handle& handle, nb::handle tokens, int64_t num_rows, int64_t num_tokens,
                               int64_t most_bytes, unsigned int tag, nb::handle stream) {
    handle.expect_open();
    Rows rows;
    if (!rows.read(tokens, most_bytes) || rows.num != num_rows) return nb::none();
    if (rows.type != ncclBfloat16 && rows.type != ncclFloat16 && rows.type != ncclFloat32) return nb::none();
    if (handle.is_on_other_device(rows.device)) return nb::none();
    handle.set_tag(tag);
    nb::object sums = new_rows(rows, num_tokens);
    CallArrays arrays(handle.is_of_cpus(), 2);
    auto sent = make_struct<ncclEpCombineInputs_t>();
    sent.tokens = arrays.add_known(tokens, "rows", Access::kRead);
    auto received = make_struct<ncclEpCombineOutputs_t>();
    received.tokens = arrays.add_known(sums, "sums", Access::kWrite);
    const auto settings = make_struct<ncclEpCombineConfig_t>();
    const cudaStream_t where = stream_from(stream, handle.is_of_cpus(), arrays.device());
    handle.run_combine(arrays, false, where,
                       [&](ncclEpHandle_t own) { check(ncclEpCombine(own, &sent, &received, &settings, where)); });
    handle.forget_arrays();
    return sums;
}

struct RowRoute {
    nb::object handle;  // leased: its owner gives it back
    int64_t num_tokens, num_rows, most_bytes;

    nb::object send_again(nb::handle x, nb::handle stream) const {
        return in_turn(x, stream, [&](Handle& own, nb::handle where) {
            return dispatch_to_new_rows(own, x, num_tokens, num_rows, most_bytes, where);
        });
    }
    nb::object add_up(nb::handle rows, nb::handle stream, unsigned int tag) const {
        return in_turn(rows, stream, [&](Handle& own, nb::handle where) {
            return combine_to_new_rows(own, rows, num_rows, num_tokens, most_bytes, tag, where);
        });
    }
    // What work returns, with its event if it is asynchronous; None: take the general path.
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
    module.def(
        "dispatch_rows",
        [](Handle& handle, nb::handle rows, nb::handle received, nb::handle words, nb::handle received_words,
           std::optional<int> type, unsigned int tag, nb::handle stream) {
            std::optional<ncclDataType_t> known;
            if (type) known = static_cast<ncclDataType_t>(*type);
            dispatch_rows(handle, rows, received, words, received_words, known, tag, stream);
        },
        "handle"_a, "rows"_a, "received"_a, "words"_a.none() = nb::none(), "received_words"_a.none() = nb::none(),
        "type"_a.none() = nb::none(), "tag"_a = 0, "stream"_a.none() = nb::none(),
        nb::sig("def dispatch_rows(handle: Handle, rows: object, received: object, words: object = None, "
                "received_words: object = None, type: int | None = None, tag: int = 0, stream: object = None) -> None"),
        "High throughput: rows [B, ..] of any type, and words beside them, to the places of the routing; their "
        "lengths are multiples of 16 bytes. type (an ncclDataType_t; None: that of rows) and tag: what ranks compare.");
    nb::class_<RowRoute>(module, "RowRoute", nb::type_slots(collected<RowRoute>()),
                         "Where the tokens of one dispatch went. handle: leased, its owner gives it back.")
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
        .def("add_up", &RowRoute::add_up, "rows"_a.none(), "stream"_a.none() = nb::none(), "tag"_a = 0,
             nb::sig("def add_up(self, rows: object, stream: object = None, tag: int = 0) -> typing.Any"),
             "Sums of rows [num_rows, ..] back where they came from, alike; tag: what ranks compare.");
}

}  // namespace crossdock::python
