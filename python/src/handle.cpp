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

// On CPUs an unsplit operation is complete when its call returns. On GPUs, and in a split operation, the arrays must
// stay; those of the call before may go, as work on one handle is ordered.
void Handle::keep(std::vector<Array>& where, CallArrays& arrays, bool is_split, cudaStream_t stream) {
    device_ = arrays.device();
    stream_ = stream;
    if (is_split || !is_cpu(*group_)) where = arrays.take();
    if (!is_pending_) former_overlaps_.clear();
    is_pending_ = is_pending_ || is_split;
}

void Handle::keep_overlap(std::vector<Array> arrays) {
    for (Array& array : overlap_) former_overlaps_.push_back(std::move(array));
    overlap_ = std::move(arrays);
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
    run_dispatch(arrays, settings.send_only != 0, where, [&](ncclEpHandle_t handle) {
        check(ncclEpDispatch(handle, &sent, &received, info, &settings, where));
    });
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
    run_combine(arrays, settings.send_only != 0, where,
                [&](ncclEpHandle_t handle) { check(ncclEpCombine(handle, &sent, &received, &settings, where)); });
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

void Handle::set_tag(unsigned int tag) {
    expect_open();
    if (tag == tag_) return;
    check(crossdockHandleSetTag(handle_, tag));
    tag_ = tag;
}

void Handle::set_alignment(unsigned int alignment) {
    expect_open();
    if (alignment == alignment_) return;
    check(crossdockHandleSetAlignment(handle_, alignment));
    alignment_ = alignment;
}

void Handle::set_sms(unsigned int num_sms) {
    expect_open();
    if (num_sms == sms_) return;
    group_->call([&] { check(crossdockHandleSetSms(handle_, num_sms)); });
    sms_ = num_sms;
}

size_t Handle::overlap_words(unsigned int block_rows) const {
    expect_open();
    size_t words = 0;
    check(crossdockOverlapWords(handle_, block_rows, &words));
    return words;
}

void Handle::set_overlap(nb::handle memory, unsigned int block_rows, nb::handle done, unsigned int done_value) {
    expect_open();
    CallArrays arrays(is_cpu(*group_), 2);
    auto overlap = make_struct<crossdockOverlap_t>();
    overlap.block_rows = block_rows;
    overlap.done_value = done_value;
    overlap.memory = arrays.add(memory, "memory", Access::kWrite);
    overlap.done = arrays.add(done, "done", Access::kRead);
    const bool is_off = overlap.memory == nullptr && overlap.done == nullptr;
    group_->call([&] { check(crossdockHandleSetOverlap(handle_, is_off ? nullptr : &overlap)); });
    keep_overlap(arrays.take());
}

nb::tuple Handle::sms() const {
    expect_open();
    unsigned int update = 0, dispatch = 0, combine = 0;
    group_->call([&] { check(crossdockHandleSms(handle_, &update, &dispatch, &combine)); });
    return nb::make_tuple(update, dispatch, combine);
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

void Handle::routing(nb::handle topk_idx, nb::handle stream) {
    expect_open();
    CallArrays arrays(is_cpu(*group_), 1);
    const ncclEpTensor_t* ids = arrays.add(topk_idx, "topk_idx", Access::kWrite);
    const cudaStream_t where = stream_from(stream, is_cpu(*group_), arrays.device());
    group_->call([&] { check(crossdockHandleRouting(handle_, ids, where)); });
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
    for (std::vector<Array>* some : {&memory_, &routing_, &overlap_, &former_overlaps_, &dispatched_, &combined_}) {
        for (Array& array : *some) all.push_back(std::move(array));
        some->clear();
    }
    return all;
}

void Handle::close() { group_->destroy(std::exchange(handle_, nullptr), take_arrays()); }

Handle::~Handle() {
    // A collector of garbage cannot wait for other ranks.
    if (is_pending_ && !group_->is_closed()) {
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

Handle* init_handle(Group& group, ncclEpLayout_t layout, nb::handle topk, nb::handle config, nb::handle handle_mem,
                    const nb::kwargs& fields) {
    GroupState& state = *group.state();
    const int num_topk = topk_of(topk);
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

int topk_of(nb::handle value) { return as<int>(value, "num_topk", "1..64"); }

static unsigned int number_of(nb::handle value, const char* name) {
    return as<unsigned int>(value, name, "0..4294967295");
}

void bind_handle(nb::module_& module) {
    nb::class_<Handle>(module, "Handle", R"(The routing of one layer or micro-batch, and the operations that follow it.

Group.create_handle and Group.init_handle make it.

- Arrays are those of NumPy or torch, dense and row-major, on the group's device. Nothing is copied.
- On GPUs, calls only enqueue: on torch's current stream, or on stream.
- On CPUs, calls are complete when they return. They release the GIL while they wait for other ranks.

Letters: R ranks, E experts, L = E / R, K choices per token, M = max_dispatch_tokens_per_rank, B tokens, H elements per
row, N rows of a high-throughput receive array.)")
        .def(
            "update", &Handle::update, "topk_idx"_a.none(), nb::kw_only(), "layout_info"_a.none() = nb::none(),
            "stream"_a.none() = nb::none(),
            nb::sig("def update(self, topk_idx: object, *, layout_info: LayoutInfo | None = None, stream: object = "
                    "None) -> None"),
            "Sets the routing of the next operations: topk_idx [B, K], int32 or int64, holds expert ids. A negative id "
            "drops the choice.\n\n"
            "- Low latency: local. The array is read until the combine is complete: do not change it before.\n"
            "- High throughput: collective. The array is copied, and layout_info receives counts.")
        .def("dispatch", &Handle::dispatch, "inputs"_a.none(), "outputs"_a.none(), nb::kw_only(),
             "layout_info"_a.none() = nb::none(), "config"_a.none() = nb::none(), "stream"_a.none() = nb::none(),
             "fields"_a,
             nb::sig("def dispatch(self, inputs: object, outputs: object, *, layout_info: LayoutInfo | None = None, "
                     "config: DispatchConfig | None = None, stream: object = None, **fields: typing.Any) -> None"),
             "Sends B tokens to the ranks of their experts, and receives what others send here. Collective.\n\n"
             "- inputs: DispatchInputs, or the tokens alone.\n"
             "- outputs: DispatchOutputs, or the tokens alone: [L, R*M, H] (low latency, expert-major), [R, M, H] (low "
             "latency, rank-major) or [N, H] (high throughput).\n"
             "- fields: those of DispatchConfig.")
        .def(
            "combine", &Handle::combine, "inputs"_a.none(), "outputs"_a.none(), nb::kw_only(),
            "config"_a.none() = nb::none(), "stream"_a.none() = nb::none(), "fields"_a,
            nb::sig("def combine(self, inputs: object, outputs: object, *, config: CombineConfig | None = None, "
                    "stream: object = None, **fields: typing.Any) -> None"),
            "Returns the experts' rows to the ranks of their tokens, and sums them there. Collective.\n\n"
            "- inputs: CombineInputs, or the rows alone, in the shape of dispatch's outputs.\n"
            "- outputs: CombineOutputs, or the tokens [B, H] alone. Low latency, expert-major also needs topk_weights, "
            "which it reads.\n"
            "- fields: those of CombineConfig.")
        .def("complete", &Handle::complete, nb::kw_only(), "stream"_a.none() = nb::none(),
             "Runs the receive half of a send_only operation. Does nothing if none is pending.")
        .def("set_sums", &Handle::set_sums, "sums"_a, "How low-latency expert-major combines sum from now on.")
        .def("set_tag", &Handle::set_tag, "tag"_a,
             "Sets a number, 0..1023, which ranks compare in the next operations (low latency: in elastic ones). If it "
             "differs, the operation fails.")
        .def(
            "set_alignment",
            [](Handle& self, nb::handle alignment) { self.set_alignment(number_of(alignment, "alignment")); },
            "alignment"_a.none(), nb::sig("def set_alignment(self, alignment: int) -> None"),
            "High throughput, expert-major: from the next update on, an expert's rows begin at a multiple of "
            "alignment.")
        .def(
            "set_sms", [](Handle& self, nb::handle num_sms) { self.set_sms(number_of(num_sms, "num_sms")); },
            "num_sms"_a.none(), nb::sig("def set_sms(self, num_sms: int) -> None"),
            "From now on each operation takes at most num_sms SMs. High throughput: all ranks must set the same. 0: "
            "use "
            "the group's settings.")
        .def(
            "overlap_words",
            [](Handle& self, nb::handle block_rows) { return self.overlap_words(number_of(block_rows, "block_rows")); },
            "block_rows"_a.none(), nb::sig("def overlap_words(self, block_rows: int) -> int"),
            "The elements of set_overlap's memory, for blocks of block_rows rows.")
        .def(
            "set_overlap",
            [](Handle& self, nb::handle memory, nb::handle block_rows, nb::handle done, nb::handle done_value) {
                self.set_overlap(memory, number_of(block_rows, "block_rows"), done,
                                 number_of(done_value, "done_value"));
            },
            "memory"_a.none() = nb::none(), nb::kw_only(), "block_rows"_a.none() = 1, "done"_a.none() = nb::none(),
            "done_value"_a.none() = 0,
            nb::sig("def set_overlap(self, memory: object = None, *, block_rows: int = 1, done: object = None, "
                    "done_value: int = 0) -> None"),
            "From now on, dispatches tell a kernel on another stream which rows are in place. Low latency: combines "
            "wait for its rows. High throughput (expert-major): only memory may be given. Without arguments: no "
            "longer.\n\n"
            "- memory [overlap_words(block_rows)], int32 or uint32, zeros: the counters of both; crossdock.triton and "
            "crossdock/overlap.hpp read and write them. None: dispatches tell nothing.\n"
            "- done_value: a combine sends a block's rows when its counter has this value. 0: it waits for nothing.\n"
            "- done [L, blocks], blocks = R*M / block_rows rounded up: counters of your own instead of those in "
            "memory, "
            "to be cleared before each combine.\n\n"
            "See crossdockHandleSetOverlap in crossdock.h.")
        .def_prop_ro("sms", &Handle::sms, nb::sig("def sms(self) -> tuple[int, int, int]"),
                     "High throughput: how many SMs the next update, dispatch and combine take. On CPUs: 1.")
        .def("rebind", &Handle::rebind, "topk_idx"_a.none(),
             "Low latency, expert-major, after a dispatch: its combines read this topk_idx from now on. Each element "
             "must be the one that was dispatched, or -1: then sums leave out this choice.")
        .def("dropped_tokens", &Handle::dropped_tokens, "count"_a.none(), nb::kw_only(), "stream"_a.none() = nb::none(),
             "Writes to count [1] how many pairs of an own token and a masked rank the routing has dropped.")
        .def("routing", &Handle::routing, "topk_idx"_a.none(), nb::kw_only(), "stream"_a.none() = nb::none(),
             nb::sig("def routing(self, topk_idx: object, *, stream: object = None) -> None"),
             "Low latency, expert-major: writes to topk_idx [B, K] int32 the routing of the last dispatch, with -1 for "
             "dropped choices. It does not depend on what update's array holds now.")
        .def("sources", &Handle::sources, "tokens"_a.none(), "ranges"_a.none(), nb::kw_only(),
             "stream"_a.none() = nb::none(),
             "Low latency, expert-major: writes where the last dispatch's rows came from.\n\n"
             "- tokens [L, R*M] int32: each row's token at its source rank.\n"
             "- ranges [L, R] int64: the number of rows of a source, plus its first row shifted left by 32 bits.")
        .def_prop_ro("ptr", &Handle::address, "The address of the ncclEpHandle_t, for C code; 0 once it is closed.")
        .def("close", &Handle::close,
             "Destroys the handle. Local. A pending receive half is cancelled, which may wait for ranks of other LSA "
             "teams. May be called again.")
        .def("destroy", &Handle::close, "The same as close.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Handle"))
        .def(
            "__exit__", [](Handle& self, const nb::args&) { self.close(); },
            nb::sig("def __exit__(self, *exception: object) -> None"));
}

}  // namespace crossdock::python
