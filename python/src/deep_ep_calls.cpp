// SPDX-License-Identifier: Apache-2.0
#include "deep_ep_calls.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "collected.h"
#include "configs.h"
#include "handle.h"
#include "routing.h"
#include "stream.h"
#include "strided.h"
#include "turn.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

// Python's half, looked up once.
struct Types {
    nb::object handle;
    nb::object is_inference, version;  // names of attributes

    static const Types& get() {
        static const Types* types = nullptr;  // no guarded initialisation: imports may let other threads run
        if (types == nullptr) types = new Types;
        return *types;
    }

  private:
    Types()
        : handle(nb::module_::import_("crossdock.deep_ep.low_latency").attr("LowLatencyHandle")),
          is_inference(nb::steal(PyUnicode_InternFromString("is_inference"))),
          version(nb::steal(PyUnicode_InternFromString("_version"))) {}
};

void expect_python(bool worked) {
    if (!worked) nb::raise_python_error();
}

// How many changes torch has counted of a tensor's memory; -1: it does not count them (torch.inference_mode).
int64_t version_of(nb::handle tensor) {
    const Types& types = Types::get();
    const auto uncounted = nb::steal(PyObject_CallMethodNoArgs(tensor.ptr(), types.is_inference.ptr()));
    expect_python(uncounted.is_valid());
    if (uncounted.ptr() == Py_True) return -1;
    const auto version = nb::steal(PyObject_GetAttr(tensor.ptr(), types.version.ptr()));
    expect_python(version.is_valid());
    return nb::cast<int64_t>(version);
}

// A tuple of a subclass without attributes of its own.
template <class... Items>
nb::object tuple_of_type(nb::handle type, const Items&... items) {
    auto* as_type = reinterpret_cast<PyTypeObject*>(type.ptr());
    PyObject* made = as_type->tp_alloc(as_type, sizeof...(items));
    expect_python(made != nullptr);
    Py_ssize_t place = 0;
    (PyTuple_SET_ITEM(made, place++, nb::handle(items).inc_ref().ptr()), ...);
    return nb::steal(made);
}

// Update and dispatch; FP8 where scales is not None.
void route_and_dispatch(Handle& handle, nb::handle topk_idx, nb::handle tokens, nb::handle rows, nb::handle counters,
                        nb::handle scales, bool transposed_scales, bool send_only, bool round_scales,
                        nb::handle stream) {
    handle.expect_open();
    CallArrays routing(handle.is_of_cpus(), 1);
    const ncclEpTensor_t* ids = routing.add_known(topk_idx, "topk_idx", Access::kRead);
    CallArrays arrays(handle.is_of_cpus(), 4);
    auto sent = make_struct<ncclEpDispatchInputs_t>();
    sent.tokens = arrays.add_known(tokens, "tokens", Access::kRead);
    auto received = make_struct<ncclEpDispatchOutputs_t>();
    received.tokens = arrays.add_known(rows, "rows", Access::kWrite);
    received.scales = transposed_scales ? arrays.add_transposed(scales, "scales", Access::kWrite)
                                        : arrays.add_known(scales, "scales", Access::kWrite);
    auto info = make_struct<ncclEpLayoutInfo_t>();
    info.expert_counters = arrays.add_known(counters, "counters", Access::kWrite);
    auto settings = make_struct<ncclEpDispatchConfig_t>();
    settings.send_only = send_only ? 1 : 0;
    settings.round_scales = round_scales ? 1 : 0;
    if (received.scales != nullptr && transposed_scales) {
        // Version 1's way to ask for FP8: a config that ends before the recipe, and scales by column, described by row.
        settings.size = NCCL_EP_DISPATCH_CONFIG_V1_SIZE;
    } else if (received.scales != nullptr) {
        settings.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
    }
    const cudaStream_t where = stream_from(stream, handle.is_of_cpus(), arrays.device());
    handle.run_dispatch(arrays, send_only, where, [&](ncclEpHandle_t own) {
        check(ncclEpUpdateHandle(own, ids, nullptr, where));
        check(ncclEpDispatch(own, &sent, &received, &info, &settings, where));
    });
    handle.keep_routing(routing.take());
}

void combine_weighted(Handle& handle, nb::handle rows, nb::handle topk_weights, nb::handle tokens, bool send_only,
                      nb::handle stream) {
    handle.expect_open();
    CallArrays arrays(handle.is_of_cpus(), 3);
    auto sent = make_struct<ncclEpCombineInputs_t>();
    sent.tokens = arrays.add_known(rows, "rows", Access::kRead);
    auto received = make_struct<ncclEpCombineOutputs_t>();
    received.tokens = arrays.add_known(tokens, "tokens", Access::kWrite);
    received.topk_weights = arrays.add_known(topk_weights, "topk_weights", Access::kRead);
    auto settings = make_struct<ncclEpCombineConfig_t>();
    settings.send_only = send_only ? 1 : 0;
    const cudaStream_t where = stream_from(stream, handle.is_of_cpus(), arrays.device());
    handle.run_combine(arrays, send_only, where,
                       [&](ncclEpHandle_t own) { check(ncclEpCombine(own, &sent, &received, &settings, where)); });
}

// The receive half of a split operation, on the stream of the first one.
class Receive {
  public:
    Receive(nb::object lease, cudaStream_t stream) : lease_(std::move(lease)), stream_(stream) {}

    void run() const {
        auto& lease = nb::cast<LowLatencyLease&>(lease_);
        auto& handle = nb::cast<Handle&>(lease.taken);
        handle.complete_on(stream_);
        lease.is_pending = false;
        if (!handle.is_of_cpus()) handle.forget_arrays();
    }
    int visit(visitproc visit, void* arg) const {
        Py_VISIT(lease_.ptr());
        return 0;
    }
    void clear() { lease_.reset(); }

  private:
    nb::object lease_;
    cudaStream_t stream_;
};

// Ends a call of a handle, whose arrays stay as long as the library reads them: the receive half, if there is one.
nb::object end_call(const nb::object& object, LowLatencyLease& lease, Handle& handle, bool is_split) {
    lease.is_pending = is_split;
    if (is_split) return nb::cast(Receive(object, handle.latest_stream()));
    if (!handle.is_of_cpus()) handle.forget_arrays();
    return nb::none();
}

nb::object dispatch_along(nb::handle object, nb::handle x, nb::handle topk_idx, bool is_split, const Turn& turn) {
    auto& form = nb::cast<LowLatencyForm&>(object);
    if (form.is_cpu) expect_room_for_routing(topk_idx, form.num_experts, form.max_tokens);
    const Types& types = Types::get();
    nb::object made = nb::inst_alloc(nb::type<LowLatencyLease>());
    auto& lease = *new (nb::inst_ptr<LowLatencyLease>(made)) LowLatencyLease;
    nb::inst_mark_ready(made);
    lease.form = nb::borrow(object);
    lease.topk_idx = lease.bound = nb::borrow(topk_idx);
    lease.version = version_of(topk_idx);
    lease.combine_buffer = lease.sources = nb::none();
    const bool is_captured = (!form.is_cpu || turn.has_streams()) && is_capturing();
    lease.take(form.pool, form.free, form.num_topk, is_captured);
    const auto make = [&](const nb::object& maker) { return nb::cast<PairMaker&>(maker).make(is_captured); };
    const nb::object counts = form.counts.make(is_captured);
    const nb::object rows = make(form.rows);
    const nb::object scales = form.scales.is_none() ? nb::none() : make(form.scales);
    auto& handle = nb::cast<Handle&>(lease.taken);
    route_and_dispatch(handle, topk_idx, x, rows, counts, scales, form.transposed_scales, is_split, form.round_scales,
                       turn.stream());
    const nb::object receive = end_call(made, lease, handle, is_split);
    const nb::object received = scales.is_none() ? rows : nb::object(nb::make_tuple(rows, scales));
    PyObject* numbers = form.numbers.ptr();
    const nb::object sent =
        tuple_of_type(types.handle, made, made, nb::handle(PyTuple_GET_ITEM(numbers, 0)),
                      nb::handle(PyTuple_GET_ITEM(numbers, 1)), nb::handle(PyTuple_GET_ITEM(numbers, 2)));
    const nb::object event = turn.end({x, topk_idx, rows, counts, scales}, is_captured);
    return nb::make_tuple(received, counts, sent, event, receive);
}

nb::object dispatch(const Forms& forms, nb::handle x, nb::handle topk_idx, nb::handle max_tokens,
                    nb::handle num_experts, nb::handle use_fp8, nb::handle round_scale, bool is_split,
                    nb::handle stream) {
    const nb::handle none = Py_None;
    const nb::handle found =
        forms.look_up({x, topk_idx, none, none, max_tokens, num_experts, use_fp8, round_scale, nb::handle(Py_False)});
    if (!found.is_valid()) return nb::none();
    const nb::object kept = nb::borrow(found);  // other threads may forget all forms meanwhile
    Turn turn(stream);
    return turn.begin() ? dispatch_along(kept, x, topk_idx, is_split, turn) : nb::none();
}

bool is_same_memory(nb::handle one, nb::handle other) {
    if (one.is(other)) return true;
    Strided a, b;
    return strided_from(one, a) && strided_from(other, b) && a.data == b.data && a.type == b.type &&
           a.num_dimensions == b.num_dimensions && std::equal(a.shape, std::end(a.shape), b.shape) &&
           std::equal(a.strides, std::end(a.strides), b.strides);
}

bool is_dense(nb::handle tensor) {
    Strided found;
    return strided_from(tensor, found) && found.is_dense();
}

// (sums, the receive half), of arguments that are right. ids: what the combine goes by.
std::pair<nb::object, nb::object> combine_along(const nb::object& object, LowLatencyLease& lease,
                                                const LowLatencyForm& form, nb::handle x, nb::handle ids,
                                                nb::handle topk_weights, nb::handle out, bool is_split,
                                                nb::handle stream) {
    auto& handle = nb::cast<Handle&>(lease.taken);
    const nb::object sums = out.is_none() ? form.sums.make() : nb::borrow(out);
    if (!lease.bound.is(ids)) {
        handle.rebind(ids);
        lease.bound = nb::borrow(ids);
    }
    combine_weighted(handle, x, topk_weights, sums, is_split, stream);
    return {sums, end_call(object, lease, handle, is_split)};
}

nb::object combine(nb::handle pools, nb::handle x, nb::handle topk_idx, nb::handle topk_weights, nb::handle sent,
                   nb::handle out, bool is_split, nb::handle stream) {
    const Types& types = Types::get();
    if (reinterpret_cast<PyObject*>(Py_TYPE(sent.ptr())) != types.handle.ptr()) return nb::none();
    const nb::object made = nb::borrow(PyTuple_GET_ITEM(sent.ptr(), 0));
    auto& lease = nb::cast<LowLatencyLease&>(made);
    const nb::object form_object = lease.form;
    const auto& form = nb::cast<const LowLatencyForm&>(form_object);
    const int is_own = PySequence_Contains(pools.ptr(), form.pool.ptr());
    expect_python(is_own >= 0);
    const nb::handle none = Py_None;
    const bool is_known = is_own == 1 && form.combines.look_up({x, topk_idx, topk_weights, out, none}).is_valid();
    if (!is_known || lease.is_pending || !lease.is_as_dispatched(topk_idx) || !is_dense(topk_weights) ||
        !nb::cast<const Handle&>(lease.taken).is_usable()) {
        return nb::none();
    }
    Turn turn(stream);
    if (!turn.begin()) return nb::none();
    const auto [sums, receive] =
        combine_along(made, lease, form, x, lease.topk_idx, topk_weights, out, is_split, turn.stream());
    const nb::object event = turn.end({x, topk_idx, topk_weights, sums}, turn.has_streams() && is_capturing());
    return nb::make_tuple(sums, event, receive);
}

}  // namespace

bool LowLatencyLease::is_as_dispatched(nb::handle ids) const {
    return is_same_memory(ids, topk_idx) && version_of(ids) == version;
}

int LowLatencyForm::visit(visitproc visit, void* arg) const {
    for (const nb::object* held : {&pool, &free, &numbers, &rows, &scales}) Py_VISIT(held->ptr());
    const int found = counts.visit(visit, arg);
    return found != 0 ? found : combines.visit(visit, arg);
}

void LowLatencyForm::clear() {
    combines.clear();
    counts.clear();
    for (nb::object* held : {&pool, &free, &numbers, &rows, &scales}) held->reset();
}

int LowLatencyLease::visit(visitproc visit, void* arg) const {
    for (const nb::object* held : {&form, &taken, &free, &topk_idx, &bound, &combine_buffer, &sources}) {
        Py_VISIT(held->ptr());
    }
    return 0;
}

void LowLatencyLease::clear() {
    if (!is_pending) give_back();
    for (nb::object* held : {&form, &taken, &free, &topk_idx, &bound, &combine_buffer, &sources}) held->reset();
}

void bind_deep_ep_calls(nb::module_& module) {
    nb::class_<LowLatencyForm>(module, "LowLatencyForm", nb::type_slots(collected<LowLatencyForm>()),
                               "What follows from the form of a low-latency dispatch's arguments.")
        .def(
            "__init__",
            [](LowLatencyForm* self, nb::object pool, int num_topk, nb::tuple numbers, nb::handle x, nb::object rows,
               nb::object scales, bool transposed_scales, bool round_scales) {
                const nb::object free = pool.attr("free")(num_topk), device = x.attr("device"), shape = x.attr("shape");
                const bool is_cpu = nb::cast<bool>(pool.attr("is_cpu"));
                const auto max_tokens = nb::cast<int64_t>(numbers[0]), num_experts = nb::cast<int64_t>(numbers[2]);
                const PieceMaker counts(device, nb::cast<int64_t>(nb::cast<const PairMaker&>(rows).sizes()[0]));
                const nb::tuple sizes = nb::make_tuple(shape[0], shape[1]);  // torch.Size is no plain tuple
                const TensorForm sums = TensorForm::of(x.attr("dtype"), device, sizes, nb::none());
                new (self)
                    LowLatencyForm{pool, num_topk,          free,         numbers,    rows,        scales, counts,
                                   sums, transposed_scales, round_scales, max_tokens, num_experts, is_cpu, {}};
            },
            "pool"_a, "num_topk"_a, "numbers"_a, "x"_a, "rows"_a, "scales"_a.none(), "transposed_scales"_a,
            "round_scales"_a,
            nb::sig("def __init__(self, pool: object, num_topk: int, numbers: tuple[int, int, int], x: object, rows: "
                    "object, scales: object, transposed_scales: bool, round_scales: bool) -> None"),
            "numbers: (M, H, E); x: tokens of this form; rows, scales: PairMakers.")
        .def_ro("pool", &LowLatencyForm::pool, nb::for_getter(nb::sig("def pool(self) -> typing.Any")))
        .def_prop_ro(
            "shape", [](const LowLatencyForm& form) { return nb::cast<const PairMaker&>(form.rows).sizes(); },
            nb::for_getter(nb::sig("def shape(self) -> tuple[int, int, int]")), "Of the received rows.")
        .def_ro("max_tokens", &LowLatencyForm::max_tokens)
        .def_prop_ro(
            "combines", [](LowLatencyForm& form) { return &form.combines; }, nb::rv_policy::reference_internal)
        .def(
            "dispatch",
            [](nb::handle self, nb::handle x, nb::handle topk_idx, bool is_split) {
                return dispatch_along(self, x, topk_idx, is_split, Turn(nb::none()));
            },
            "x"_a, "topk_idx"_a, "is_split"_a,
            nb::sig("def dispatch(self, x: object, topk_idx: object, is_split: bool) -> tuple[typing.Any, typing.Any, "
                    "typing.Any, typing.Any, typing.Any]"),
            "What low_latency_dispatch returns; the last item is the receive half if is_split, on the same stream.");

    nb::class_<LowLatencyLease>(module, "LowLatencyLease", nb::type_slots(collected<LowLatencyLease>()),
                                "A handle that serves one dispatch and the combines that follow it.")
        .def_ro("form", &LowLatencyLease::form, nb::for_getter(nb::sig("def form(self) -> typing.Any")))
        .def_ro("taken", &LowLatencyLease::taken, nb::for_getter(nb::sig("def taken(self) -> Handle")))
        .def_ro("topk_idx", &LowLatencyLease::topk_idx, nb::for_getter(nb::sig("def topk_idx(self) -> typing.Any")))
        .def_rw("combine_buffer", &LowLatencyLease::combine_buffer, nb::arg().none(),
                nb::for_getter(nb::sig("def combine_buffer(self) -> typing.Any")),
                nb::for_setter(nb::sig("def combine_buffer(self, value: typing.Any) -> None")))
        .def_rw("sources", &LowLatencyLease::sources, nb::arg().none(),
                nb::for_getter(nb::sig("def sources(self) -> typing.Any")),
                nb::for_setter(nb::sig("def sources(self, value: typing.Any) -> None")))
        .def_ro("is_pending", &LowLatencyLease::is_pending)
        .def("is_as_dispatched", &LowLatencyLease::is_as_dispatched, "topk_idx"_a,
             nb::sig("def is_as_dispatched(self, topk_idx: object) -> bool"),
             "Whether it is the tensor of the dispatch, and torch knows of no change since.")
        .def(
            "combine",
            [](nb::handle self, nb::handle x, nb::handle topk_idx, nb::handle topk_weights, nb::handle out,
               bool is_split) {
                auto& lease = nb::cast<LowLatencyLease&>(self);
                const nb::object form = lease.form;
                const auto [sums, receive] =
                    combine_along(nb::borrow(self), lease, nb::cast<const LowLatencyForm&>(form), x, topk_idx,
                                  topk_weights, out, is_split, nb::none());
                return nb::make_tuple(sums, receive);
            },
            "x"_a, "topk_idx"_a, "topk_weights"_a, "out"_a.none(), "is_split"_a,
            nb::sig("def combine(self, x: object, topk_idx: object, topk_weights: object, out: object, is_split: "
                    "bool) -> tuple[typing.Any, typing.Any]"),
            "By topk_idx: as dispatched, or -1 where a choice is left out. (sums, the receive half if is_split).");

    nb::class_<Receive>(module, "Receive", nb::type_slots(collected<Receive>()), "The receive half of an operation.")
        .def("__call__", &Receive::run);

    module.def(
        "route_and_dispatch", &route_and_dispatch, "handle"_a, "topk_idx"_a, "tokens"_a, "rows"_a, "counters"_a,
        "scales"_a.none(), "transposed_scales"_a, "send_only"_a, "round_scales"_a, "stream"_a.none() = nb::none(),
        nb::sig("def route_and_dispatch(handle: Handle, topk_idx: object, tokens: object, rows: object, counters: "
                "object, scales: object, transposed_scales: bool, send_only: bool, round_scales: bool, stream: object "
                "= None) -> None"),
        "Low latency, expert-major: update and dispatch in one call, to FP8 where scales is not None; counters: "
        "LayoutInfo's expert_counters. transposed_scales: scales [L, R*M, H / 128] lie in memory as a dense [L, H / "
        "128, R*M] does, for groups of api_version 1.");
    module.def("forget_arrays", &Handle::forget_arrays, "handle"_a,
               nb::sig("def forget_arrays(handle: Handle) -> None"),
               "Lets go of the arrays of earlier calls, which on GPUs are kept until the next call. For callers who "
               "order what they do with that memory by streams, as torch does.");
    module.def(
        "low_latency_dispatch", &dispatch, "forms"_a, "x"_a.none(), "topk_idx"_a.none(), "max_tokens"_a.none(),
        "num_experts"_a.none(), "use_fp8"_a.none(), "round_scale"_a.none(), "is_split"_a,
        "stream"_a.none() = nb::none(),
        nb::sig("def low_latency_dispatch(forms: Forms, x: object, topk_idx: object, max_tokens: object, "
                "num_experts: object, use_fp8: object, round_scale: object, is_split: bool, stream: object = "
                "None) -> typing.Any"),
        "Buffer.low_latency_dispatch of arguments whose forms are known, asynchronous on a SideStream; None: take "
        "the general path.");
    module.def("low_latency_combine", &combine, "pools"_a, "x"_a.none(), "topk_idx"_a.none(), "topk_weights"_a.none(),
               "handle"_a.none(), "out"_a.none(), "is_split"_a, "stream"_a.none() = nb::none(),
               nb::sig("def low_latency_combine(pools: list[typing.Any], x: object, topk_idx: object, topk_weights: "
                       "object, handle: object, out: object, is_split: bool, stream: object = None) -> typing.Any"),
               "Buffer.low_latency_combine of arguments whose forms are known, the handle that of a dispatch by one of "
               "these pools, asynchronous on a SideStream; None: take the general path.");
}

}  // namespace crossdock::python
