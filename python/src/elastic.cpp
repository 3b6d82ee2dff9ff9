// SPDX-License-Identifier: Apache-2.0
#include "elastic.h"

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "collected.h"
#include "configs.h"
#include "error.h"
#include "handle.h"
#include "stream.h"
#include "strided.h"
#include "torch_maker.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

Strided strided_of(nb::handle tensor) {
    Strided found;
    if (!strided_from(tensor, found))
        invalid_argument("a tensor is " + shown_tensor(tensor) + ", expected [rows, columns]");
    return found;
}

// Itself, or else a dense copy.
nb::object dense(nb::handle tensor, const Strided& found) {
    return found.is_dense() ? nb::borrow(tensor) : nb::object(tensor.attr("contiguous")());
}
nb::object dense(nb::handle tensor) { return tensor.is_none() ? nb::none() : dense(tensor, strided_of(tensor)); }

// Makes tensors of the type and on the device of another one.
struct Alike {
    nb::object dtype;
    nb::object like;
    int device;  // -1: the host

    static Alike of(nb::handle tensor, int device) { return {tensor.attr("dtype"), nb::borrow(tensor), device}; }
    nb::object make(int64_t rows) const {
        return new_tensor(nb::make_tuple(rows), nb::make_tuple(1), dtype, like, device);
    }
    nb::object make(int64_t rows, int64_t columns) const {
        return new_tensor(nb::make_tuple(rows, columns), nb::make_tuple(columns > 0 ? columns : 1, 1), dtype, like,
                          device);
    }
    // Columns lie behind each other, at multiples of 16 bytes of 4-byte elements.
    nb::object make_by_column(int64_t rows, int64_t columns) const {
        const int64_t stride = (rows + 3) / 4 * 4;
        const nb::object whole = make(columns, stride);
        return whole.attr("as_strided")(nb::make_tuple(rows, columns), nb::make_tuple(1, stride > 0 ? stride : 1));
    }
};

constexpr int64_t kUnitBytes = 16;  // rows have whole units

int64_t row_bytes_of(const Strided& rows) { return rows.shape[1] * rows.item_bytes; }
bool has_whole_units(const Strided& rows) { return row_bytes_of(rows) % kUnitBytes == 0; }

// Rows with zeros up to whole units.
nb::object padded(const nb::object& rows, const Strided& found) {
    if (rows.is_none() || has_whole_units(found)) return rows;
    const int64_t missing = (kUnitBytes - row_bytes_of(found) % kUnitBytes) / found.item_bytes;
    return nb::module_::import_("torch.nn.functional").attr("pad")(rows, nb::make_tuple(0, missing));
}

// The first columns of rows.
nb::object cut(const nb::object& rows, int64_t columns) {
    return rows.attr("narrow")(1, 0, columns).attr("contiguous")();
}

// Contiguous rows of any type and length, as the library moves them.
class CarriedRows {
  public:
    explicit CarriedRows(nb::handle rows) : given_(nb::borrow(rows)), carried_(given_), found_(strided_of(rows)) {
        is_given_ = found_.type && has_whole_units(found_);
        if (is_given_) return;
        // Without rows, or of one column, contiguous ones have any strides.
        const nb::object dense = rows.attr("as_strided")(rows.attr("shape"), nb::make_tuple(found_.shape[1], 1));
        const nb::object bytes = dense.attr("view")(nb::module_::import_("torch").attr("uint8"));
        carried_ = padded(bytes, strided_of(bytes));
    }
    nb::handle get() const { return carried_; }
    // What came of them, in their own type and length.
    nb::object restored(nb::object came) const {
        return is_given_ ? came : cut(came, row_bytes_of(found_)).attr("view")(given_.attr("dtype"));
    }

  private:
    nb::object given_, carried_;
    Strided found_;
    bool is_given_;
};

// Adds scales of any strides.
ncclEpTensor_t* add_scales(CallArrays& arrays, nb::handle scales, const char* name, int64_t (&strides)[2]) {
    if (scales.is_none()) return nullptr;
    const Strided view = strided_of(scales);
    std::copy_n(view.strides, 2, strides);
    Array array;
    array.set_memory(view.data, ncclInt32, view.device < 0 ? Place::kHost : Place::kCuda, view.device, true);
    const size_t sizes[] = {static_cast<size_t>(view.shape[0]), static_cast<size_t>(view.shape[1])};
    array.set_shape(sizes, 2);
    array.keep(scales);
    return arrays.add_described(std::move(array), name);
}

// The outputs of a dispatch that differ from call to call along one routing.
struct Received {
    nb::object rows, scales = nb::none(), ids = nb::none(), weights = nb::none();

    nb::object x() const { return scales.is_none() ? rows : nb::object(nb::make_tuple(rows, scales)); }
};

struct DispatchCall {
    const ElasticPlan& plan;
    nb::handle x, scales, topk_weights, statistics;
    bool zero_padding, column_major;

    Received make_outputs(int64_t num_rows, nb::handle topk_idx, int device) const {
        Received made{Alike::of(x, device).make(num_rows, strided_of(x).shape[1])};
        if (!scales.is_none()) {
            const Alike kind = Alike::of(scales, device);
            const int64_t columns = strided_of(scales).shape[1];
            made.scales = column_major ? kind.make_by_column(num_rows, columns) : kind.make(num_rows, columns);
        }
        if (!plan.by_expert) made.ids = Alike::of(topk_idx, device).make(num_rows, plan.num_topk);
        if (!topk_weights.is_none()) {
            const Alike kind = Alike::of(topk_weights, device);
            made.weights = plan.by_expert ? kind.make(num_rows) : kind.make(num_rows, plan.num_topk);
        }
        return made;
    }
    void describe(CallArrays& arrays, const Received& received, crossdockElasticDispatch_t& call) const {
        call.tokens = arrays.add_rows(x, "x", Access::kRead, std::nullopt);
        call.scales = add_scales(arrays, scales, "the tensor of scales", call.scale_strides);
        call.topk_weights = arrays.add_known(topk_weights, "topk_weights", Access::kRead);
        call.alignment = plan.alignment;
        call.origin_stride = plan.origin_stride;
        call.zero_padding = zero_padding ? 1 : 0;
        call.own_weights_only = plan.own_weights ? 1 : 0;
        call.out_tokens = arrays.add_rows(received.rows, "recv_x", Access::kWrite, std::nullopt);
        call.out_scales = add_scales(arrays, received.scales, "recv_sf", call.out_scale_strides);
        call.out_topk_idx = arrays.add_known(received.ids, "recv_topk_idx", Access::kWrite);
        call.out_topk_weights = arrays.add_known(received.weights, "recv_topk_weights", Access::kWrite);
        call.statistics = arrays.add_known(statistics, "cumulative_local_expert_recv_stats", Access::kWrite);
    }
};

nb::object elastic_dispatch(nb::handle plan_object, nb::handle x, nb::handle scales, nb::handle routed_by,
                            nb::handle weighted_by, nb::handle statistics, int64_t num_rows, int64_t num_sources,
                            unsigned int num_sms, unsigned int tag, bool copies_topk_idx, bool zero_padding,
                            bool column_major) {
    auto& plan = nb::cast<ElasticPlan&>(plan_object);
    const Strided ids = strided_of(routed_by);
    const nb::object topk_idx = dense(routed_by, ids), topk_weights = dense(weighted_by);
    const int device = ids.device;
    const bool is_captured = device >= 0 && is_capturing();
    nb::object lease_object = nb::inst_alloc(nb::type<ElasticLease>());
    auto& lease = *new (nb::inst_ptr<ElasticLease>(lease_object)) ElasticLease;
    nb::inst_mark_ready(lease_object);
    lease.plan = nb::borrow(plan_object);
    lease.topk_idx = topk_idx;
    lease.num_tokens = ids.shape[0];
    lease.num_rows = num_rows;
    lease.take(plan.pool, plan.free, plan.num_topk, is_captured);
    auto& handle = nb::cast<Handle&>(lease.taken);
    handle.expect_open();

    const CarriedRows rows(x);
    const DispatchCall call_of{plan, rows.get(), scales, topk_weights, statistics, zero_padding, column_major};
    Received received = call_of.make_outputs(num_rows, topk_idx, device);
    const Alike int32{nb::borrow(torch_int32()), topk_idx, device};
    const nb::object sources = int32.make(num_sources, plan.num_topk + 2);
    const nb::object rank_ends = plan.of_ranks.make(is_captured);
    const nb::object expert_counts = plan.of_experts.make(is_captured);
    const nb::object expert_ends = plan.of_experts.make(is_captured);
    nb::object kept = topk_idx;
    // High throughput keeps what it needs itself.
    const bool is_copied_by_kernel = copies_topk_idx && plan.is_low_latency;
    if (is_copied_by_kernel) {
        kept = Alike::of(topk_idx, device).make(ids.shape[0], ids.shape[1]);
    } else if (copies_topk_idx) {
        kept = topk_idx.attr("clone")();
    }
    handle.set_tag(tag);
    if (!plan.is_low_latency) handle.set_sms(num_sms);
    if (!plan.is_low_latency && plan.by_expert) handle.set_alignment(plan.alignment);

    CallArrays routing(handle.is_of_cpus(), 1);
    const ncclEpTensor_t* routed = routing.add_known(topk_idx, "topk_idx", Access::kRead);
    CallArrays arrays(handle.is_of_cpus());
    auto call = make_struct<crossdockElasticDispatch_t>();
    call_of.describe(arrays, received, call);
    call.sources = arrays.add_known(sources, "recv_src_metadata", Access::kWrite);
    call.rank_ends = arrays.add_known(rank_ends, "psum_num_recv_tokens_per_scaleup_rank", Access::kWrite);
    call.expert_counts = arrays.add_known(expert_counts, "num_unaligned_recv_tokens_per_expert", Access::kWrite);
    call.expert_ends = arrays.add_known(expert_ends, "psum_num_recv_tokens_per_expert", Access::kWrite);
    if (is_copied_by_kernel) call.topk_idx_copy = arrays.add_known(kept, "the copy of topk_idx", Access::kWrite);
    const cudaStream_t where = stream_from(nb::none(), handle.is_of_cpus(), device);
    handle.run_dispatch(arrays, false, where, [&](ncclEpHandle_t own) {
        check(ncclEpUpdateHandle(own, routed, nullptr, where));
        check(crossdockElasticDispatch(own, &call, where));
    });
    lease.topk_idx = kept;
    handle.forget_arrays();
    received.rows = rows.restored(received.rows);
    return nb::make_tuple(received.x(), received.ids, received.weights, lease_object, kept, rank_ends, expert_ends,
                          expert_counts, sources);
}

// A tag that was given, or what the form of a call says; nullopt: Python has to look at the call.
std::optional<unsigned int> tag_of(nb::handle given, const Forms& forms, std::initializer_list<nb::handle> arguments) {
    const nb::handle tag = given.is_none() ? forms.look_up(arguments) : given;
    if (!tag.is_valid() || !PyLong_Check(tag.ptr())) return std::nullopt;
    return nb::cast<unsigned int>(tag);
}

nb::object elastic_dispatch_again(nb::handle lease_object, nb::handle x, nb::handle scales, nb::handle weighted_by,
                                  nb::handle statistics, unsigned int num_sms, bool zero_padding, bool column_major,
                                  nb::handle given_tag) {
    const auto& lease = nb::cast<const ElasticLease&>(lease_object);
    const auto& plan = nb::cast<const ElasticPlan&>(lease.plan);
    const auto tag =
        tag_of(given_tag, plan.repetitions, {x, scales, weighted_by, statistics, nb::int_(lease.num_tokens)});
    if (!tag) return nb::none();
    auto& handle = nb::cast<Handle&>(lease.taken);
    handle.set_tag(*tag);
    if (!plan.is_low_latency) handle.set_sms(num_sms);
    const nb::object topk_weights = dense(weighted_by);
    const CarriedRows rows(x);
    const DispatchCall call_of{plan, rows.get(), scales, topk_weights, statistics, zero_padding, column_major};
    Received received = call_of.make_outputs(lease.num_rows, lease.topk_idx, strided_of(x).device);
    CallArrays arrays(handle.is_of_cpus());
    auto call = make_struct<crossdockElasticDispatch_t>();
    call_of.describe(arrays, received, call);
    const cudaStream_t where = stream_from(nb::none(), handle.is_of_cpus(), arrays.device());
    handle.run_dispatch(arrays, false, where,
                        [&](ncclEpHandle_t own) { check(crossdockElasticDispatch(own, &call, where)); });
    handle.forget_arrays();
    received.rows = rows.restored(received.rows);
    return nb::make_tuple(received.x(), received.ids, received.weights);
}

nb::object elastic_combine(nb::handle lease_object, nb::handle x, nb::handle weighted_by, nb::handle first_bias,
                           nb::handle second_bias, unsigned int num_sms, bool weights_follow, nb::handle given_tag) {
    const auto& lease = nb::cast<const ElasticLease&>(lease_object);
    const auto& plan = nb::cast<const ElasticPlan&>(lease.plan);
    const auto tag = tag_of(given_tag, plan.combines,
                            {x, weighted_by, first_bias, second_bias, nb::handle(weights_follow ? Py_True : Py_False),
                             nb::int_(lease.num_rows), nb::int_(lease.num_tokens)});
    if (!tag) return nb::none();
    auto& handle = nb::cast<Handle&>(lease.taken);
    handle.set_tag(*tag);
    if (!plan.is_low_latency) handle.set_sms(num_sms);
    const Strided given = strided_of(x);
    const int device = given.device;
    const nb::object rows = padded(nb::borrow(x), given), topk_weights = dense(weighted_by);
    const nb::object bias = padded(dense(first_bias), given), bias2 = padded(dense(second_bias), given);
    const nb::object sums = Alike::of(x, device).make(lease.num_tokens, strided_of(rows).shape[1]);
    nb::object weights = nb::none();
    if (!topk_weights.is_none()) weights = Alike::of(topk_weights, device).make(lease.num_tokens, plan.num_topk);
    CallArrays arrays(handle.is_of_cpus());
    auto call = make_struct<crossdockElasticCombine_t>();
    call.tokens = arrays.add_known(rows, "x", Access::kRead);
    call.topk_weights = arrays.add_known(topk_weights, "topk_weights", Access::kRead);
    call.bias[0] = arrays.add_known(bias, "bias", Access::kRead);
    call.bias[1] = arrays.add_known(bias2, "the second bias", Access::kRead);
    call.out_tokens = arrays.add_known(sums, "combined_x", Access::kWrite);
    call.out_topk_weights = arrays.add_known(weights, "combined_topk_weights", Access::kWrite);
    const cudaStream_t where = stream_from(nb::none(), handle.is_of_cpus(), device);
    handle.run_combine(arrays, false, where,
                       [&](ncclEpHandle_t own) { check(crossdockElasticCombine(own, &call, where)); });
    handle.forget_arrays();
    return nb::make_tuple(has_whole_units(given) ? sums : cut(sums, given.shape[1]), weights);
}

}  // namespace

int ElasticPlan::visit(visitproc visit, void* arg) const {
    for (const nb::object* held : {&pool, &free}) Py_VISIT(held->ptr());
    for (const PieceMaker* maker : {&of_ranks, &of_experts}) {
        if (const int found = maker->visit(visit, arg); found != 0) return found;
    }
    const int found = repetitions.visit(visit, arg);
    return found != 0 ? found : combines.visit(visit, arg);
}

void ElasticPlan::clear() {
    for (nb::object* held : {&pool, &free}) held->reset();
    of_ranks.clear();
    of_experts.clear();
    repetitions.clear();
    combines.clear();
}

int ElasticLease::visit(visitproc visit, void* arg) const {
    for (const nb::object* held : {&plan, &taken, &free, &topk_idx}) Py_VISIT(held->ptr());
    return 0;
}

void ElasticLease::clear() {
    give_back();
    for (nb::object* held : {&plan, &taken, &free, &topk_idx}) held->reset();
}

void bind_elastic(nb::module_& module) {
    nb::class_<ElasticPlan>(module, "ElasticPlan", nb::type_slots(collected<ElasticPlan>()),
                            "What the dispatches of one kind share.")
        .def(
            "__init__",
            [](ElasticPlan* self, nb::object pool, bool is_low_latency, nb::handle device, int64_t num_ranks,
               int64_t num_experts, int num_topk, unsigned int alignment, unsigned int origin_stride, bool by_expert,
               bool own_weights) {
                nb::object free = pool.attr("free")(num_topk);
                PieceMaker of_ranks(device, num_ranks), of_experts(device, num_experts / num_ranks);
                new (self) ElasticPlan{pool,          free,      is_low_latency, num_experts, num_topk,  alignment,
                                       origin_stride, by_expert, own_weights,    of_ranks,    of_experts};
            },
            "pool"_a, "is_low_latency"_a, "device"_a, "num_ranks"_a, "num_experts"_a, "num_topk"_a, "alignment"_a,
            "origin_stride"_a, "by_expert"_a, "own_weights"_a,
            nb::sig("def __init__(self, pool: object, is_low_latency: bool, device: object, num_ranks: int, "
                    "num_experts: int, num_topk: int, alignment: int, origin_stride: int, by_expert: bool, "
                    "own_weights: bool) -> None"),
            "pool: a PooledGroup; own_weights: received weights of other ranks' experts are 0.")
        .def_ro("num_experts", &ElasticPlan::num_experts)
        .def_ro("by_expert", &ElasticPlan::by_expert)
        .def_prop_ro(
            "repetitions", [](ElasticPlan& plan) { return &plan.repetitions; }, nb::rv_policy::reference_internal)
        .def_prop_ro(
            "combines", [](ElasticPlan& plan) { return &plan.combines; }, nb::rv_policy::reference_internal)
        .def_ro("is_low_latency", &ElasticPlan::is_low_latency)
        .def_ro("pool", &ElasticPlan::pool, nb::for_getter(nb::sig("def pool(self) -> typing.Any")));
    nb::class_<ElasticLease>(module, "ElasticLease", nb::type_slots(collected<ElasticLease>()),
                             "A handle that serves one dispatch, its repetitions and its combines.")
        .def_ro("plan", &ElasticLease::plan, nb::for_getter(nb::sig("def plan(self) -> ElasticPlan")))
        .def_ro("handle", &ElasticLease::taken, nb::for_getter(nb::sig("def handle(self) -> Handle")))
        .def_ro("topk_idx", &ElasticLease::topk_idx, nb::for_getter(nb::sig("def topk_idx(self) -> typing.Any")))
        .def_ro("num_tokens", &ElasticLease::num_tokens)
        .def_ro("num_rows", &ElasticLease::num_rows);
    module.def(
        "elastic_dispatch", &elastic_dispatch, "plan"_a, "x"_a, "scales"_a.none(), "topk_idx"_a,
        "topk_weights"_a.none(), "statistics"_a.none(), "num_rows"_a, "num_sources"_a, "num_sms"_a, "tag"_a,
        "copies_topk_idx"_a, "zero_padding"_a, "column_major"_a,
        nb::sig("def elastic_dispatch(plan: ElasticPlan, x: object, scales: object, topk_idx: object, topk_weights: "
                "object, statistics: object, num_rows: int, num_sources: int, num_sms: int, tag: int, copies_topk_idx: "
                "bool, zero_padding: bool, column_major: bool) -> tuple[typing.Any, ...]"),
        "A fresh dispatch to new tensors, of x of any type and length: (recv_x, ids, weights, ElasticLease, topk_idx "
        "that the library reads, rank_ends, expert_ends, expert_counts, sources). tag: what ranks compare.");
    module.def(
        "elastic_dispatch_again", &elastic_dispatch_again, "lease"_a, "x"_a.none(), "scales"_a.none(),
        "topk_weights"_a.none(), "statistics"_a.none(), "num_sms"_a, "zero_padding"_a, "column_major"_a,
        "tag"_a.none() = nb::none(),
        nb::sig("def elastic_dispatch_again(lease: ElasticLease, x: object, scales: object, topk_weights: object, "
                "statistics: object, num_sms: int, zero_padding: bool, column_major: bool, tag: int | None = None) -> "
                "typing.Any"),
        "Along the same routing, x of any type whose rows fit the group: (recv_x, ids, weights). Without a tag, it is "
        "that of the plan's repetitions for x, scales, topk_weights, statistics and the lease's num_tokens; None: "
        "there is none.");
    module.def(
        "elastic_combine", &elastic_combine, "lease"_a, "x"_a.none(), "topk_weights"_a.none(), "bias"_a.none(),
        "bias2"_a.none(), "num_sms"_a, "weights_follow"_a, "tag"_a.none() = nb::none(),
        nb::sig("def elastic_combine(lease: ElasticLease, x: object, topk_weights: object, bias: object, bias2: "
                "object, num_sms: int, weights_follow: bool, tag: int | None = None) -> typing.Any"),
        "Of x whose rows fit the group: (sums, weights). Without a tag, it is that of the plan's combines for x, "
        "topk_weights, bias, bias2, weights_follow, and the lease's num_rows and num_tokens; None: there is "
        "none.");
}

}  // namespace crossdock::python
