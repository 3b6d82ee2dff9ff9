// SPDX-License-Identifier: Apache-2.0
#include "handle.h"

#include "configs.h"
#include "stream.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

bool is_cpu(const GroupState& group) { return group.communicator().is_cpu(); }

}  // namespace

void Handle::expect_open() const {
    if (handle_ == nullptr) invalid_usage("the handle is closed");
}

// On CPUs whole operations are over when they return. Elsewhere, and in the halves of a split one, the arrays must
// stay; those of the call before may go, as work on one handle is ordered.
void Handle::keep(std::vector<Array>& where, CallArrays& arrays, bool is_split, cudaStream_t stream) {
    device_ = arrays.device();
    stream_ = stream;
    if (is_split || !is_cpu(*group_)) where = arrays.take();
    is_pending_ = is_pending_ || is_split;
}

void Handle::update(nb::handle topk_idx, nb::handle layout_info, nb::handle stream) {
    expect_open();
    CallArrays arrays(is_cpu(*group_));
    const ncclEpTensor_t* routing = arrays.add(topk_idx, "topk_idx", Access::kRead);
    const ncclEpLayoutInfo_t* info = arrays.layout_info(layout_info);
    const cudaStream_t where = stream_from(stream, is_cpu(*group_), arrays.device());
    group_->call([&] { check(ncclEpUpdateHandle(handle_, routing, info, where)); });
    keep_routing(arrays.take());
}

void Handle::dispatch(nb::handle inputs, nb::handle outputs, nb::handle layout_info, nb::handle config,
                      nb::handle stream, const nb::kwargs& fields) {
    expect_open();
    CallArrays arrays(is_cpu(*group_));
    const ncclEpDispatchInputs_t sent = arrays.dispatch_inputs(inputs);
    const ncclEpDispatchOutputs_t received = arrays.dispatch_outputs(outputs);
    const ncclEpLayoutInfo_t* info = arrays.layout_info(layout_info);
    const bool is_default = config.is_none() && fields.size() == 0;
    const auto settings =
        is_default ? make_struct<ncclEpDispatchConfig_t>() : config_from<ncclEpDispatchConfig_t>(config, fields);
    const cudaStream_t where = stream_from(stream, is_cpu(*group_), arrays.device());
    group_->call([&] { check(ncclEpDispatch(handle_, &sent, &received, info, &settings, where)); });
    keep(dispatched_, arrays, settings.send_only != 0, where);
}

void Handle::combine(nb::handle inputs, nb::handle outputs, nb::handle config, nb::handle stream,
                     const nb::kwargs& fields) {
    expect_open();
    CallArrays arrays(is_cpu(*group_));
    const bool reads_weights = group_->is_low_latency();
    const ncclEpCombineInputs_t sent = arrays.combine_inputs(inputs);
    const ncclEpCombineOutputs_t received = arrays.combine_outputs(outputs, reads_weights);
    const bool is_default = config.is_none() && fields.size() == 0;
    const auto settings =
        is_default ? make_struct<ncclEpCombineConfig_t>() : config_from<ncclEpCombineConfig_t>(config, fields);
    const cudaStream_t where = stream_from(stream, is_cpu(*group_), arrays.device());
    group_->call([&] { check(ncclEpCombine(handle_, &sent, &received, &settings, where)); });
    keep(combined_, arrays, settings.send_only != 0, where);
}

void Handle::route_and_dispatch(nb::handle topk_idx, nb::handle tokens, nb::handle rows, nb::handle counters,
                                nb::handle scales, bool transposed_scales, bool send_only, bool round_scales,
                                nb::handle stream) {
    expect_open();
    CallArrays routing(is_cpu(*group_), 1);
    const ncclEpTensor_t* ids = routing.add(topk_idx, "topk_idx", Access::kRead);
    CallArrays arrays(is_cpu(*group_), 4);
    auto sent = make_struct<ncclEpDispatchInputs_t>();
    sent.tokens = arrays.add(tokens, "tokens", Access::kRead);
    auto received = make_struct<ncclEpDispatchOutputs_t>();
    received.tokens = arrays.add(rows, "rows", Access::kWrite);
    received.scales = transposed_scales ? arrays.add_transposed(scales, "scales", Access::kWrite)
                                        : arrays.add(scales, "scales", Access::kWrite);
    auto info = make_struct<ncclEpLayoutInfo_t>();
    info.expert_counters = arrays.add(counters, "counters", Access::kWrite);
    auto settings = make_struct<ncclEpDispatchConfig_t>();
    settings.send_only = send_only ? 1 : 0;
    settings.round_scales = round_scales ? 1 : 0;
    if (received.scales != nullptr && transposed_scales) {
        // Version 1's way to ask for FP8: a config that ends before the recipe, and scales by column, described by row.
        settings.size = NCCL_EP_DISPATCH_CONFIG_V1_SIZE;
    } else if (received.scales != nullptr) {
        settings.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
    }
    const cudaStream_t where = stream_from(stream, is_cpu(*group_), arrays.device());
    group_->call([&] {
        check(ncclEpUpdateHandle(handle_, ids, nullptr, where));
        check(ncclEpDispatch(handle_, &sent, &received, &info, &settings, where));
    });
    keep_routing(routing.take());
    keep(dispatched_, arrays, send_only, where);
}

void Handle::combine_weighted(nb::handle rows, nb::handle topk_weights, nb::handle tokens, bool send_only,
                              nb::handle stream) {
    expect_open();
    CallArrays arrays(is_cpu(*group_), 3);
    auto sent = make_struct<ncclEpCombineInputs_t>();
    sent.tokens = arrays.add(rows, "rows", Access::kRead);
    auto received = make_struct<ncclEpCombineOutputs_t>();
    received.tokens = arrays.add(tokens, "tokens", Access::kWrite);
    received.topk_weights = arrays.add(topk_weights, "topk_weights", Access::kRead);
    auto settings = make_struct<ncclEpCombineConfig_t>();
    settings.send_only = send_only ? 1 : 0;
    const cudaStream_t where = stream_from(stream, is_cpu(*group_), arrays.device());
    group_->call([&] { check(ncclEpCombine(handle_, &sent, &received, &settings, where)); });
    keep(combined_, arrays, send_only, where);
}

void Handle::dispatch_rows(nb::handle rows, nb::handle received, nb::handle words, nb::handle received_words,
                           nb::handle stream) {
    expect_open();
    CallArrays arrays(is_cpu(*group_), 4);
    // Types that the library moves as they are: backward without words, and forward's recipe with them.
    const ncclDataType_t type = words.is_none() ? ncclBfloat16 : ncclFloat8e4m3;
    auto inputs = make_struct<ncclEpDispatchInputs_t>();
    inputs.tokens = arrays.add_rows(rows, "rows", Access::kRead, type);
    inputs.scales = arrays.add_rows(words, "words", Access::kRead, ncclUint8);
    auto outputs = make_struct<ncclEpDispatchOutputs_t>();
    outputs.tokens = arrays.add_rows(received, "received", Access::kWrite, type);
    outputs.scales = arrays.add_rows(received_words, "received_words", Access::kWrite, ncclUint8);
    auto settings = make_struct<ncclEpDispatchConfig_t>();
    settings.pass_direction = NCCL_EP_BWD_PASS;
    if (!words.is_none()) settings.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    const cudaStream_t where = stream_from(stream, is_cpu(*group_), arrays.device());
    group_->call([&] { check(ncclEpDispatch(handle_, &inputs, &outputs, nullptr, &settings, where)); });
    keep(dispatched_, arrays, false, where);
}

void Handle::complete(nb::handle stream) {
    expect_open();
    complete_on(stream_from(stream, is_cpu(*group_), device_));
}

void Handle::complete_on(cudaStream_t stream) {
    expect_open();
    group_->call([&] { check(ncclEpComplete(handle_, nullptr, stream)); });
    is_pending_ = false;
    if (is_cpu(*group_)) {
        dispatched_.clear();
        combined_.clear();
    }
}

void Handle::set_sums(crossdockSums_t sums) {
    expect_open();
    group_->call([&] { check(crossdockHandleSetSums(handle_, sums)); });
}

void Handle::rebind(nb::handle topk_idx) {
    expect_open();
    CallArrays arrays(is_cpu(*group_), 1);
    const ncclEpTensor_t* routing = arrays.add(topk_idx, "topk_idx", Access::kRead);
    group_->call([&] { check(crossdockHandleRebind(handle_, routing)); });
    keep_routing(arrays.take());
}

void Handle::dropped_tokens(nb::handle count, nb::handle stream) {
    expect_open();
    CallArrays arrays(is_cpu(*group_));
    const ncclEpTensor_t* tensor = arrays.add(count, "count", Access::kWrite);
    if (tensor == nullptr || (tensor->datatype != ncclInt64 && tensor->datatype != ncclUint64) || tensor->ndim != 1 ||
        tensor->sizes[0] < 1) {
        invalid_argument(tensor == nullptr ? "count is None, expected an array of one int64 or uint64"
                                           : "count is " + shown_array(*tensor) + ", expected one int64 or uint64");
    }
    const cudaStream_t where = stream_from(stream, is_cpu(*group_), arrays.device());
    group_->call([&] { check(crossdockHandleDroppedTokens(handle_, static_cast<uint64_t*>(tensor->data), where)); });
}

void Handle::sources(nb::handle tokens, nb::handle ranges, nb::handle stream) {
    expect_open();
    CallArrays arrays(is_cpu(*group_));
    const ncclEpTensor_t* of_tokens = arrays.add(tokens, "tokens", Access::kWrite);
    const ncclEpTensor_t* of_ranges = arrays.add(ranges, "ranges", Access::kWrite);
    const cudaStream_t where = stream_from(stream, is_cpu(*group_), arrays.device());
    group_->call([&] { check(crossdockHandleSources(handle_, of_tokens, of_ranges, where)); });
}

void Handle::forget_arrays() {
    if (is_pending_) return;
    dispatched_.clear();
    combined_.clear();
}

std::vector<Array> Handle::take_arrays() {
    std::vector<Array> all;
    for (std::vector<Array>* some : {&memory_, &routing_, &dispatched_, &combined_}) {
        for (Array& array : *some) all.push_back(std::move(array));
        some->clear();
    }
    return all;
}

void Handle::close() { group_->destroy(std::exchange(handle_, nullptr), take_arrays()); }

Handle::~Handle() {
    // A collector of garbage cannot wait for other ranks.
    if (is_pending_) {
        group_->destroy_later(handle_, take_arrays());
    } else {
        close();
    }
}

Handle* create_handle(Group& group, ncclEpLayout_t layout, nb::handle topk_idx, nb::handle layout_info,
                      nb::handle config, nb::handle stream, const nb::kwargs& fields) {
    GroupState& state = *group.state();
    const auto settings = config_from<ncclEpHandleConfig_t>(config, fields);
    CallArrays arrays(is_cpu(state));
    const ncclEpTensor_t* routing = arrays.add(topk_idx, "topk_idx", Access::kRead);
    const ncclEpLayoutInfo_t* info = arrays.layout_info(layout_info);
    const cudaStream_t where = stream_from(stream, is_cpu(state), arrays.device());
    ncclEpHandle_t handle = nullptr;
    state.call_with_communicator(
        [&] { check(ncclEpCreateHandle(&handle, state.get(), layout, routing, info, &settings, where)); });
    auto* created = new Handle(group.state(), handle);
    created->keep_routing(arrays.take());
    return created;
}

Handle* init_handle(Group& group, ncclEpLayout_t layout, int num_topk, nb::handle config, nb::handle handle_mem,
                    const nb::kwargs& fields) {
    GroupState& state = *group.state();
    const auto settings = config_from<ncclEpHandleConfig_t>(config, fields);
    CallArrays arrays(is_cpu(state));
    const ncclEpTensor_t* memory = arrays.add(handle_mem, "handle_mem", Access::kWrite);
    ncclEpHandle_t handle = nullptr;
    state.call_with_communicator(
        [&] { check(ncclEpInitHandle(&handle, state.get(), layout, &settings, num_topk, memory)); });
    auto* created = new Handle(group.state(), handle);
    created->keep_memory(arrays.take());
    return created;
}

void bind_handle(nb::module_& module) {
    nb::class_<Handle>(module, "Handle", R"(The routing of one layer or micro-batch, and the operations that follow it.

Made by Group.create_handle or Group.init_handle. Arrays are those of NumPy or torch, dense and row-major, on the group's
device; nothing is copied. On GPUs calls only enqueue, on torch's current stream unless stream says another; on CPUs they
have finished when they return, and they release the GIL while they wait for other ranks.
Letters: R ranks, E experts, L = E / R, K choices per token, M = max_dispatch_tokens_per_rank, B tokens, H elements per row,
N rows of a high-throughput receive array.)")
        .def(
            "update", &Handle::update, "topk_idx"_a.none(), nb::kw_only(), "layout_info"_a.none() = nb::none(),
            "stream"_a.none() = nb::none(),
            nb::sig("def update(self, topk_idx: object, *, layout_info: LayoutInfo | None = None, stream: object = "
                    "None) -> None"),
            "Binds the routing of the next operations: topk_idx [B, K], int32 or int64, expert numbers; a negative one "
            "drops that choice. Low latency: local, and the array is read until the combine is done, so leave it "
            "unchanged. High throughput: collective, the array is copied, layout_info receives counts.")
        .def("dispatch", &Handle::dispatch, "inputs"_a.none(), "outputs"_a.none(), nb::kw_only(),
             "layout_info"_a.none() = nb::none(), "config"_a.none() = nb::none(), "stream"_a.none() = nb::none(),
             "fields"_a,
             nb::sig("def dispatch(self, inputs: object, outputs: object, *, layout_info: LayoutInfo | None = None, "
                     "config: DispatchConfig | None = None, stream: object = None, **fields: typing.Any) -> None"),
             "Sends B tokens to the ranks of their experts and receives what others send here. Collective. inputs: "
             "DispatchInputs, or the tokens alone; outputs: DispatchOutputs, or the tokens alone. Receive shapes: "
             "low latency [L, R*M, H] or [R, M, H], high throughput [N, H]. Fields of DispatchConfig by keyword.")
        .def("combine", &Handle::combine, "inputs"_a.none(), "outputs"_a.none(), nb::kw_only(),
             "config"_a.none() = nb::none(), "stream"_a.none() = nb::none(), "fields"_a,
             nb::sig("def combine(self, inputs: object, outputs: object, *, config: CombineConfig | None = None, "
                     "stream: object = None, **fields: typing.Any) -> None"),
             "Sends the experts' rows back to their tokens' ranks and sums them: inputs are shaped as dispatch's "
             "outputs, outputs.tokens "
             "[B, H]. Collective. Low-latency expert-major also needs outputs.topk_weights, which it reads. Fields of "
             "CombineConfig by keyword.")
        .def("route_and_dispatch", &Handle::route_and_dispatch, "topk_idx"_a, "tokens"_a, "rows"_a, "counters"_a,
             "scales"_a.none(), "transposed_scales"_a, "send_only"_a, "round_scales"_a, "stream"_a.none() = nb::none(),
             nb::sig("def route_and_dispatch(self, topk_idx: object, tokens: object, rows: object, counters: object, "
                     "scales: object, transposed_scales: bool, send_only: bool, round_scales: bool, stream: object = "
                     "None) -> None"),
             "Low latency, expert-major: update and dispatch in one call, to FP8 where scales is not None; counters: "
             "LayoutInfo's expert_counters. transposed_scales: scales [L, R*M, H / 128] lie in memory as a dense [L, "
             "H / 128, R*M] does, for groups of api_version 1.")
        .def("combine_weighted", &Handle::combine_weighted, "rows"_a, "topk_weights"_a, "tokens"_a, "send_only"_a,
             "stream"_a.none() = nb::none(),
             nb::sig("def combine_weighted(self, rows: object, topk_weights: object, tokens: object, send_only: bool, "
                     "stream: object = None) -> None"),
             "Low latency, expert-major: combine of rows into tokens.")
        .def("dispatch_rows", &Handle::dispatch_rows, "rows"_a, "received"_a, "words"_a.none() = nb::none(),
             "received_words"_a.none() = nb::none(), "stream"_a.none() = nb::none(),
             nb::sig("def dispatch_rows(self, rows: object, received: object, words: object = None, received_words: "
                     "object = None, stream: object = None) -> None"),
             "High throughput: rows [B, ..] of any type, and words beside them, to the places of the routing; their "
             "lengths are multiples of 16 bytes.")
        .def("complete", &Handle::complete, nb::kw_only(), "stream"_a.none() = nb::none(),
             "The receive half of a send_only operation; without one, nothing.")
        .def("set_sums", &Handle::set_sums, "sums"_a, "How low-latency expert-major combines sum from now on.")
        .def(
            "rebind", &Handle::rebind, "topk_idx"_a.none(),
            "Low latency, expert-major, after a dispatch: its combines read this topk_idx from now on. Each element is "
            "as it was dispatched, or -1 where sums leave a choice out.")
        .def("dropped_tokens", &Handle::dropped_tokens, "count"_a.none(), nb::kw_only(), "stream"_a.none() = nb::none(),
             "Writes to count [1] how many pairs of an own token and a masked rank the routing dropped.")
        .def("sources", &Handle::sources, "tokens"_a.none(), "ranges"_a.none(), nb::kw_only(),
             "stream"_a.none() = nb::none(),
             "Low latency, expert-major: where the last dispatch's rows came from. Writes tokens [L, R*M] int32, each "
             "row's token on its source, and ranges [L, R] int64: rows of a source, and its first row shifted by 32.")
        .def(
            "forget_arrays", &Handle::forget_arrays,
            "Lets go of the arrays of earlier calls, which on GPUs are kept until the next call. For callers who order "
            "what they do with that memory by streams, as torch does.")
        .def_prop_ro("ptr", &Handle::address, "The address of the ncclEpHandle_t, for C code; 0 once it is closed.")
        .def(
            "close", &Handle::close,
            "Destroys the handle. Local, but a pending half is cancelled, which may wait for ranks of other LSA teams. "
            "Repeating it is fine.")
        .def("destroy", &Handle::close, "The same as close.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Handle"))
        .def(
            "__exit__", [](Handle& self, const nb::args&) { self.close(); },
            nb::sig("def __exit__(self, *exception: object) -> None"));
}

}  // namespace crossdock::python
