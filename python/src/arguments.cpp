// SPDX-License-Identifier: Apache-2.0
#include "arguments.h"

#include "configs.h"
#include "error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace crossdock::python {
namespace {

// A struct of arrays, or just the tokens.
template <class Struct>
Struct struct_from(nb::handle object) {
    if (nb::isinstance<Struct>(object)) return nb::cast<const Struct&>(object);
    Struct tokens_alone;
    tokens_alone.tokens = nb::borrow(object);
    return tokens_alone;
}

}  // namespace

ncclEpTensor_t* CallArrays::add(nb::handle object, const char* name, Access access) {
    return add_array(array_from(object, name, access), name);
}

ncclEpTensor_t* CallArrays::add_known(nb::handle object, const char* name, Access access) {
    Array array;
    return describe_known(object, array) ? add_array(std::move(array), name) : add(object, name, access);
}

ncclEpTensor_t* CallArrays::add_transposed(nb::handle object, const char* name, Access access) {
    if (object.is_none()) return nullptr;
    Array array;
    if (describe_transposed(object, array)) return add_array(std::move(array), name);
    ncclEpTensor_t* dense = add(object.attr("transpose")(1, 2), name, access);
    if (dense != nullptr && dense->ndim == 3) std::swap(dense->sizes[1], dense->sizes[2]);
    return dense;
}

ncclEpTensor_t* CallArrays::add_array(Array array, const char* name) {
    if (!array.is_set()) return nullptr;
    if (array.place() == Place::kCuda) {
        if (is_cpu_) {
            const std::string device = array.device() < 0 ? "" : " (device " + std::to_string(array.device()) + ")";
            invalid_argument(std::string(name) + " is on a GPU" + device +
                             ", expected host memory: the group's ranks are on CPUs");
        }
        if (device_ < 0) device_ = array.device();
    } else if (!is_cpu_) {
        invalid_argument(std::string(name) + " is in host memory, expected GPU memory: the group's ranks are on GPUs");
    }
    arrays_.push_back(std::move(array));
    return arrays_.back().descriptor();
}

ncclEpTensor_t* CallArrays::add_rows(nb::handle object, const char* name, Access access,
                                     std::optional<ncclDataType_t> type) {
    if (add_known(object, name, access) == nullptr) return nullptr;
    Array& array = arrays_.back();
    const size_t row_bytes = array.size(array.num_dimensions() - 1) * bytes_of_datatype(array.datatype());
    constexpr size_t kGranule = 16;
    if (row_bytes % kGranule != 0) {
        invalid_argument(std::string(name) + " has rows of " + std::to_string(row_bytes) +
                         " bytes, allowed: multiples of 16");
    }
    array.set_row_type(type.value_or(is_carried(array.datatype()) ? array.datatype() : ncclUint8));
    return array.descriptor();
}

ncclEpDispatchInputs_t CallArrays::dispatch_inputs(nb::handle object) {
    const auto given = struct_from<DispatchInputs>(object);
    auto inputs = make_struct<ncclEpDispatchInputs_t>();
    inputs.tokens = add(given.tokens, "inputs.tokens", Access::kRead);
    inputs.topk_weights = add(given.topk_weights, "inputs.topk_weights", Access::kRead);
    inputs.scales = add(given.scales, "inputs.scales", Access::kRead);
    return inputs;
}

ncclEpDispatchOutputs_t CallArrays::dispatch_outputs(nb::handle object) {
    const auto given = struct_from<DispatchOutputs>(object);
    auto outputs = make_struct<ncclEpDispatchOutputs_t>();
    outputs.tokens = add(given.tokens, "outputs.tokens", Access::kWrite);
    outputs.topk_weights = add(given.topk_weights, "outputs.topk_weights", Access::kWrite);
    outputs.scales = add(given.scales, "outputs.scales", Access::kWrite);
    outputs.topk_idx = add(given.topk_idx, "outputs.topk_idx", Access::kWrite);
    return outputs;
}

ncclEpCombineInputs_t CallArrays::combine_inputs(nb::handle object) {
    const auto given = struct_from<CombineInputs>(object);
    auto inputs = make_struct<ncclEpCombineInputs_t>();
    inputs.tokens = add(given.tokens, "inputs.tokens", Access::kRead);
    inputs.topk_weights = add(given.topk_weights, "inputs.topk_weights", Access::kRead);
    inputs.scales = add(given.scales, "inputs.scales", Access::kRead);
    return inputs;
}

ncclEpCombineOutputs_t CallArrays::combine_outputs(nb::handle object, bool reads_weights) {
    const auto given = struct_from<CombineOutputs>(object);
    auto outputs = make_struct<ncclEpCombineOutputs_t>();
    outputs.tokens = add(given.tokens, "outputs.tokens", Access::kWrite);
    outputs.topk_weights =
        add(given.topk_weights, "outputs.topk_weights", reads_weights ? Access::kRead : Access::kWrite);
    return outputs;
}

const ncclEpLayoutInfo_t* CallArrays::layout_info(nb::handle object) {
    if (object.is_none()) return nullptr;
    if (!nb::isinstance<LayoutInfo>(object)) {
        invalid_argument(std::string("layout_info is of type ") + Py_TYPE(object.ptr())->tp_name +
                         ", allowed: LayoutInfo, None");
    }
    const auto& given = nb::cast<const LayoutInfo&>(object);
    layout_info_ = make_struct<ncclEpLayoutInfo_t>();
    layout_info_.expert_counters = add(given.expert_counters, "layout_info.expert_counters", Access::kWrite);
    layout_info_.src_rank_counters = add(given.src_rank_counters, "layout_info.src_rank_counters", Access::kWrite);
    layout_info_.expert_offsets = add(given.expert_offsets, "layout_info.expert_offsets", Access::kWrite);
    layout_info_.recv_total_counter = add(given.recv_total_counter, "layout_info.recv_total_counter", Access::kWrite);
    layout_info_.recv_topk_idx_kind = given.recv_topk_idx_kind;
    return &layout_info_;
}

void bind_arguments(nb::module_& module) {
    nb::class_<DispatchInputs>(module, "DispatchInputs",
                               "What a rank sends: tokens [B, H]; weights [B, K] fp32 (not low-latency expert-major, "
                               "not backward); scales [B, S] (recipe FWD).")
        .def(
            "__init__",
            [](DispatchInputs* self, nb::object tokens, nb::object topk_weights, nb::object scales) {
                new (self) DispatchInputs{tokens, topk_weights, scales};
            },
            nb::kw_only(), "tokens"_a.none() = nb::none(), "topk_weights"_a.none() = nb::none(),
            "scales"_a.none() = nb::none())
        .def_rw("tokens", &DispatchInputs::tokens, nb::arg().none())
        .def_rw("topk_weights", &DispatchInputs::topk_weights, nb::arg().none())
        .def_rw("scales", &DispatchInputs::scales, nb::arg().none());

    nb::class_<DispatchOutputs>(module, "DispatchOutputs",
                                "What a rank receives, shaped as its layout says: tokens, topk_weights, scales, "
                                "topk_idx.")
        .def(
            "__init__",
            [](DispatchOutputs* self, nb::object tokens, nb::object topk_weights, nb::object scales,
               nb::object topk_idx) {
                new (self) DispatchOutputs{tokens, topk_weights, scales, topk_idx};
            },
            nb::kw_only(), "tokens"_a.none() = nb::none(), "topk_weights"_a.none() = nb::none(),
            "scales"_a.none() = nb::none(), "topk_idx"_a.none() = nb::none())
        .def_rw("tokens", &DispatchOutputs::tokens, nb::arg().none())
        .def_rw("topk_weights", &DispatchOutputs::topk_weights, nb::arg().none())
        .def_rw("scales", &DispatchOutputs::scales, nb::arg().none())
        .def_rw("topk_idx", &DispatchOutputs::topk_idx, nb::arg().none());

    nb::class_<CombineInputs>(module, "CombineInputs",
                              "The experts' rows, where dispatch put them: tokens; topk_weights (backward); scales "
                              "(recipes that take one per row).")
        .def(
            "__init__",
            [](CombineInputs* self, nb::object tokens, nb::object topk_weights, nb::object scales) {
                new (self) CombineInputs{tokens, topk_weights, scales};
            },
            nb::kw_only(), "tokens"_a.none() = nb::none(), "topk_weights"_a.none() = nb::none(),
            "scales"_a.none() = nb::none())
        .def_rw("tokens", &CombineInputs::tokens, nb::arg().none())
        .def_rw("topk_weights", &CombineInputs::topk_weights, nb::arg().none())
        .def_rw("scales", &CombineInputs::scales, nb::arg().none());

    nb::class_<CombineOutputs>(module, "CombineOutputs",
                               "What comes back: tokens [B, H]; topk_weights [B, K] fp32, which low-latency "
                               "expert-major reads and backward writes.")
        .def(
            "__init__",
            [](CombineOutputs* self, nb::object tokens, nb::object topk_weights) {
                new (self) CombineOutputs{tokens, topk_weights};
            },
            nb::kw_only(), "tokens"_a.none() = nb::none(), "topk_weights"_a.none() = nb::none())
        .def_rw("tokens", &CombineOutputs::tokens, nb::arg().none())
        .def_rw("topk_weights", &CombineOutputs::topk_weights, nb::arg().none());

    nb::class_<LayoutInfo>(module, "LayoutInfo",
                           "Counts and positions of received rows, which the library writes: expert_counters [L], "
                           "src_rank_counters [R], expert_offsets [L], recv_total_counter [1].")
        .def(
            "__init__",
            [](LayoutInfo* self, nb::object expert_counters, nb::object src_rank_counters, nb::object expert_offsets,
               nb::object recv_total_counter, ncclEpExpertIdKind_t recv_topk_idx_kind) {
                new (self) LayoutInfo{expert_counters, src_rank_counters, expert_offsets, recv_total_counter,
                                      recv_topk_idx_kind};
            },
            nb::kw_only(), "expert_counters"_a.none() = nb::none(), "src_rank_counters"_a.none() = nb::none(),
            "expert_offsets"_a.none() = nb::none(), "recv_total_counter"_a.none() = nb::none(),
            "recv_topk_idx_kind"_a = NCCL_EP_EXPERT_ID_AUTO)
        .def_rw("expert_counters", &LayoutInfo::expert_counters, nb::arg().none())
        .def_rw("src_rank_counters", &LayoutInfo::src_rank_counters, nb::arg().none())
        .def_rw("expert_offsets", &LayoutInfo::expert_offsets, nb::arg().none())
        .def_rw("recv_total_counter", &LayoutInfo::recv_total_counter, nb::arg().none())
        .def_rw("recv_topk_idx_kind", &LayoutInfo::recv_topk_idx_kind);
}

}  // namespace crossdock::python
